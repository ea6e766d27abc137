"""The exception that a user can cause and put right, and how errors are said."""


class UserError(ValueError):
    """Something the user can mend: a setting, a text, a snapshot, a device.

    Every program shows it as one line, without a traceback, and exits with status 1. The message
    names the thing that is wrong and what would be right.
    """


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
