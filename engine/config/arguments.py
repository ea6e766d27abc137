"""Command lines of the small programs: `name=value` arguments, the fields of a dataclass."""

import dataclasses
import difflib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from engine import portable
from engine.config.settings import as_typed
from engine.errors import UserError

T = TypeVar("T")
NOT_PATHS = {"prompt", "stop", "device"}  # strings that are taken as they are, also null and ~
KINDS = {"Integer": "an integer, such as 1000", "Float": "a number", "bool": "true or false"}
# A field is one line, `name: type = default  # meaning`.
FIELD = re.compile(r"    (\w+): ([^=#]+?)(?: = .*?)?(?:  # (.*))?")


def parse(cls: type[T], arguments: list[str]) -> T:
    """An instance of the dataclass `cls`. `NOT_PATHS` are verbatim. Of the others, `null` is None, `~` in paths is the
    home directory, and lists are `[a,b]` or a single value. Raises `UserError` naming an argument that is unknown,
    missing, empty or of the wrong type.
    """
    # A type variable cannot say that its type is a dataclass.
    fields: dict[str, Any] = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    strings: dict[str, str | list[str]] = {}
    others: dict[str, str | None] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            known = ", ".join(f"{other}=" for other in fields)
            hint = f"did you mean {near[0]}=?" if near else f"there are {known}"
            raise UserError(f"{argument}: not an argument; {hint}")
        if not value:
            raise UserError(f"{argument}: is empty; give a value, or leave it out")
        for earlier in (strings, others):  # the last value counts
            earlier.pop(name, None)
        if name in NOT_PATHS:
            strings[name] = value
        elif value == "null":
            others[name] = None
        elif fields[name].type in (str, str | None):
            strings[name] = os.path.expanduser(value)
        elif fields[name].type == list[str] | None:
            is_list = value.startswith("[") and value.endswith("]")
            items = value[1:-1].split(",") if is_list else [value]
            strings[name] = [os.path.expanduser(item.strip()) for item in items if item.strip()]
        else:
            others[name] = value
    try:
        typed: Any = OmegaConf.merge(OmegaConf.structured(cls), others)
        required = {name for name in fields if OmegaConf.is_missing(typed, name)} - strings.keys()
        return cls(**strings, **{name: typed[name] for name in others.keys() | required})
    except OmegaConfBaseException as error:
        raise UserError(explain_value(error)) from error


def explain_value(error: Exception) -> str:
    """An error of OmegaConf as one line that names the key."""
    key, first = getattr(error, "full_key", None), str(error).splitlines()[0]
    if wrong := re.match(r"Value '(.*?)' .*\b(Integer|Float|bool)\b", first):
        return f"{key}={wrong[1]}: must be {KINDS[wrong[2]]}"
    if "is not a ListConfig" in first:
        first = f"must be a list, in quotes for the shell: '{key}=[A,B]'"
    if first.endswith("is not Optional"):
        first = "must not be null"
    if isinstance(error, MissingMandatoryValue):
        first = f"missing; give {key}=VALUE"
    return f"{key}: {first}"


def field_table(cls: Any, prefix: str = "") -> str:
    """The fields of a dataclass, which inherits none, without nested ones, as lines for a terminal: `name=default`,
    type and meaning in columns. A field without a default shows `???`.
    """
    declared = filter(None, map(FIELD.fullmatch, inspect.getsource(cls).splitlines()))
    found = {field[1]: (field[2], field[3] or "") for field in declared}
    fields = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(f.type)]
    defaults = cast(dict, OmegaConf.to_container(OmegaConf.structured(cls)))
    rows = [(f"{prefix}{f.name}={as_typed(defaults[f.name])}", *found[f.name]) for f in fields]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)


def run_program(program: Callable[[list[str]], int | None], *configs: Any) -> None:
    """Runs `program(arguments)` and exits with its status; a `UserError` or OSError is one line and
    status 1, and Ctrl-C ends it without a traceback. `--help` prints the docstring of the program's file and the
    fields of its `configs`.
    """
    portable.open_closed_streams()
    portable.restore_sigpipe()
    portable.replace_unprintable()
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print((sys.modules[program.__module__].__doc__ or "").strip())
        for config in configs:
            print(f"\n{config.__doc__}\n\n{field_table(config)}")
        return
    try:
        sys.exit(program(arguments))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)  # start the shell's prompt on a new line
        sys.exit(128 + signal.SIGINT)
