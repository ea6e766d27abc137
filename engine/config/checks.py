"""Checks of a setting's value, each one line that names the setting, its value and what is allowed."""

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
    if value is None:
        return
    bounds = [
        (low, lambda bound: value >= bound, "at least"),
        (above, lambda bound: value > bound, "above"),
        (high, lambda bound: value <= bound, "at most"),
        (below, lambda bound: value < bound, "below"),
    ]
    given = [(bound, holds, words) for bound, holds, words in bounds if bound is not None]
    if not all(holds(bound) for bound, holds, _ in given):
        must = " and ".join(f"{words} {bound}" for bound, _, words in given)
        raise UserError(f"{key}={value}: must be {must}")
