"""Settings by dotted key: which ones a resumed run may not change, and which ones affect the loss."""

import dataclasses
import json
from typing import Any

from engine.config.schema import Config


def listed(name: str) -> set[str]:
    """The settings that the dataclasses of schema.py list in their attribute `name`."""
    groups = {f"{field.name}.": field.type for field in dataclasses.fields(Config)} | {"": Config}
    return {prefix + setting for prefix, group in groups.items() for setting in getattr(group, name, ())}


FREE, FIXED, IRRELEVANT, HIDDEN = map(listed, ("FREE", "FIXED", "IRRELEVANT", "HIDDEN"))


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the setting `key`. Without main.py, there may be others than schema.py's."""
    return key in FIXED or (key.startswith(("data.", "model.", "optimizer.class")) and key not in FREE)


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
