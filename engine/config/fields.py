"""Field help: type, default and meaning of each field of a dataclass, for `--help`."""

import dataclasses
import inspect
import json
import re
from typing import Any, cast

from omegaconf import OmegaConf

# A field is one line, `name: type = default  # meaning`.
FIELD = re.compile(r"    (\w+): ([^=#]+?)(?: = .*?)?(?:  # (.*))?")


def field_table(cls: Any, prefix: str = "") -> str:
    """The fields of a dataclass but nested ones, inherited ones first, as lines for a terminal:
    `name=default`, type and meaning in columns. A field without a default shows `???`.
    """
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__[:-1]):  # without `object`
        for line in inspect.getsource(base).splitlines():
            if own := FIELD.fullmatch(line):
                found[own[1]] = own[2], own[3] or ""
    fields = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(f.type)]
    defaults = cast(dict, OmegaConf.to_container(OmegaConf.structured(cls)))
    given = {k: v if isinstance(v, str) else json.dumps(v) for k, v in defaults.items()}
    rows = [(f"{prefix}{f.name}={given[f.name]}", *found[f.name]) for f in fields]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)
