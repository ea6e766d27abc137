"""Field help: type, default and meaning of each field of a dataclass, for `--help`.

A field is one line, `name: type = default  # meaning`; lines of comment directly above it belong to
its meaning.
"""

import dataclasses
import inspect
import json
import re
from typing import Any

FIELD = re.compile(r"    (\w+): ([^=#]+?)(?: = .*?)?(?:  # (.*))?")


def field_lines(cls: Any) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each field of a dataclass, inherited ones first. The
    default is written as on a command line, and is "" for a field that has none.
    """
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__[:-1]):  # without `object`
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if comment := re.fullmatch(r"    # (?!fmt:)(.*)", line):
                above.append(comment[1])
                continue
            if own := FIELD.fullmatch(line):
                found[own[1]] = own[2], " ".join([*above, own[3] or ""]).strip()
            above = []
    lines = []
    for field in dataclasses.fields(cls):
        kind, meaning = found.get(field.name, (str(field.type), ""))
        lines.append((field.name, kind, default_of(field), meaning))
    return lines


def default_of(field: Any) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, str):
        return value
    is_plain = value is None or isinstance(value, bool | int | float | list)
    return json.dumps(value) if is_plain else ""


def field_table(cls: Any, prefix: str = "") -> str:
    """The fields as lines for a terminal: `name=default`, type and meaning in columns."""
    rows = [
        (f"{prefix}{n}={default}", kind, meaning) for n, kind, default, meaning in field_lines(cls)
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)
