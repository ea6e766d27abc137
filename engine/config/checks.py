"""Checks of a setting's value, each one line that names the setting, its value and what is allowed."""

import operator
from collections.abc import Iterable
from typing import Any

from engine.errors import UserError


def check_option(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises `UserError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def check_range(
    key: str,
    value: float | None,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raises `UserError` unless `low` <= `value` <= `high` and `above` < `value` < `below`, for the
    bounds that are given. None is accepted, and nan is not.
    """
    bounds = [
        ("at least", operator.ge, low),
        ("above", operator.gt, above),
        ("at most", operator.le, high),
        ("below", operator.lt, below),
    ]
    given = [(words, holds, bound) for words, holds, bound in bounds if bound is not None]
    if value is not None and not all(holds(value, bound) for _, holds, bound in given):
        must = " and ".join(f"{words} {bound}" for words, _, bound in given)
        raise UserError(f"{key}={value}: must be {must}")
