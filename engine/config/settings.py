"""Settings by dotted key: which ones a resumed run may not change, and which ones affect the loss."""

import dataclasses
import json
from typing import Any

from engine.config.schema import Config

# The dataclasses, by the prefix of their fields.
GROUPS: dict[str, Any] = {f"{f.name}.": f.type for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}
GROUPS[""] = Config
SETTINGS = [
    prefix + f.name
    for prefix, group in GROUPS.items()
    for f in dataclasses.fields(group)
    if not dataclasses.is_dataclass(f.type)
]


def marked(name: str) -> set[str]:
    """The settings that their dataclass lists in `name`: see engine/config/schema.py."""
    return {prefix + setting for prefix, group in GROUPS.items() for setting in getattr(group, name, ())}


FREE, FIXED, IRRELEVANT, HIDDEN = map(marked, ("FREE", "FIXED", "IRRELEVANT", "HIDDEN"))


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the setting `key`."""
    # The model may be one with settings of its own; the optimizer's class is recorded for those without main.py.
    is_of_run = key.startswith("model.") or key == "optimizer.class" or (key.startswith("data.") and key in SETTINGS)
    return key in FIXED or (is_of_run and key not in FREE)


def as_plain(value: Any) -> Any:
    """`value` in JSON's types, which a snapshot can hold: dataclasses as dictionaries, others as text."""
    text = json.dumps(value, default=lambda x: vars(x) if dataclasses.is_dataclass(x) else str(x))
    return json.loads(text)


def as_typed(value: Any) -> str:
    """A value in command-line syntax: null and true, not None and True."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def defaults_of(configs: dict[str, Any]) -> dict[str, Any]:
    """The defaults of dataclasses by dotted key, except None and default factories."""
    return {
        f"{name}.{field.name}": field.default
        for name, config in configs.items()
        for field in dataclasses.fields(config)
        if isinstance(field.default, bool | int | float | str)
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
