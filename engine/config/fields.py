"""Field help: type, default and meaning of each field of a dataclass, for `--help`."""

import dataclasses
import inspect
import json
import re
from typing import Any

# A field is one line, `name: type = default  # meaning`.
FIELD = re.compile(r"    (\w+): ([^=#]+?)(?: = .*?)?(?:  # (.*))?")


def field_table(cls: Any, prefix: str = "") -> str:
    """The fields of a dataclass but nested ones, inherited ones first, as lines for a terminal:
    `name=default`, type and meaning in columns.
    """
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__[:-1]):  # without `object`
        for line in inspect.getsource(base).splitlines():
            if own := FIELD.fullmatch(line):
                found[own[1]] = own[2], own[3] or ""
    fields = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(f.type)]
    rows = [(f"{prefix}{f.name}={default_of(f)}", *found[f.name]) for f in fields]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)


def default_of(field: Any) -> str:
    """The default as on a command line; empty for a field that has none."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
