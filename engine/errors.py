"""User errors, reported in one line; checks of a setting's value."""

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


class UserError(ValueError):
    """An error that the user can correct: a setting, a text, a snapshot, a device.

    Programs print it as one line without a traceback and exit with status 1. The message names the mistake and the fix.
    """

    def _render_traceback_(self) -> list[str]:
        """Replaces IPython's traceback: one line in a notebook, too."""
        return [f"error: {self}"]


def one_line(error: BaseException) -> str:
    """The message of an error on one line, or the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


def check_option(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises `UserError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def check_only_one(**given: Any) -> None:
    """Raises `UserError` if more than one of the arguments is given: neither None nor False."""
    names = [f"{name}=" for name, value in given.items() if value not in (None, False)]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: give only one of them")


Number = float | None


def check_range(
    key: str,
    value: Number,
    low: Number = None,
    high: Number = None,
    *,
    above: Number = None,
    below: Number = None,
    null: bool = False,
) -> None:
    """Raises `UserError` unless `low` <= `value` <= `high` and `above` < `value` < `below`, for the bounds that are
    given. None is accepted, and nan is not; the message names `null` if that has a meaning.
    """
    bounds = [
        ("at least", operator.ge, low),
        ("above", operator.gt, above),
        ("at most", operator.le, high),
        ("below", operator.lt, below),
    ]
    given = [(words, holds, bound) for words, holds, bound in bounds if bound is not None]
    if not isinstance(value, Real | None):  # from Python or a snapshot: any type
        raise UserError(f"{key}={value!r}: must be a number")
    if value is not None and not all(holds(value, bound) for _, holds, bound in given):
        must = " and ".join(f"{words} {bound}" for words, _, bound in given)
        raise UserError(f"{key}={value}: must be {must}{', or null' * null}")
