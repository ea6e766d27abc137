"""User errors: what a user can correct, reported in one line."""


class UserError(ValueError):
    """An error that the user can correct: a setting, a text, a snapshot, a device.

    Programs print it as one line without a traceback and exit with status 1. The message names
    what is wrong and what would be right.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback: in a notebook, too, it is one line."""
        return [f"error: {self}"]


def one_line(error: BaseException) -> str:
    """The message of an error on one line; the name of its type where there is no message."""
    return " ".join(str(error).split()) or type(error).__name__
