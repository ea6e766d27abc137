"""The command lines of the small programs: `name=value` arguments, the fields of a dataclass."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.errors import UserError

T = TypeVar("T")


def parse(cls: type[T], arguments: list[str]) -> T:
    """An instance of the dataclass `cls`, its fields given as `name=value`.

    Texts are taken as they are: nothing in them has a meaning. Of other types, `null` is None.
    Raises `UserError` naming an argument that is unknown, empty, missing or of the wrong type.
    """
    assert is_dataclass(cls)
    types = {f.name: f.type for f in fields(cls)}
    texts: dict[str, str] = {}
    others: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in types:
            known = ", ".join(f"{name}=" for name in types)
            if "run_dir" in types and name == "run_name":
                known += f"; a run is named by its directory: run_dir=runs/{value}"
            elif {"run_dir", "run_dirs"} & types.keys() and os.path.isdir(argument):
                several = "s" * ("run_dirs" in types)  # it may be a sweep's
                known += f"; for what is in it: run_dir{several}={argument}"
            raise UserError(f"{argument}: not an argument; there are {known}")
        if not value:
            raise UserError(f"{argument}: is empty; give a value, or leave it out")
        if types[name] in (str, str | None):
            texts[name] = value
        else:
            others[name] = None if value == "null" else value
    for f in fields(cls):
        if f.default is MISSING and f.name not in texts | others:
            raise UserError(f"{f.name}: is missing; give {f.name}=VALUE")
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(cls), others)
        return cls(**texts, **{name: merged[name] for name in others})
    except OmegaConfBaseException as error:
        raise UserError(explain_value(error)) from error


KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def explain_value(error: Exception) -> str:
    """One line for what OmegaConf says of a value, naming its key."""
    key, first = getattr(error, "full_key", None), str(error).splitlines()[0]
    wrong = re.match(r"Value '(.*?)' .*(?:converted to |not a valid )(\w+)", first)
    if wrong and wrong[2] in KINDS:
        return f"{key}={wrong[1]}: must be {KINDS[wrong[2]]}"
    if "is not Optional" in first:
        return f"{key}: must not be null"
    if re.match("Cannot convert 'list' to", first):
        return f"{key}: must be one value, not a list"
    if wrong := re.match(r"Value '(.*?)' .*incompatible with type hint", first):
        return f"{key}={wrong[1]}: must be a whole number or a word"
    return f"{key}: {first}"


def run_program(program: Callable[[list[str]], int | None]) -> None:
    """Ends the process with the status of `program(arguments)`, given those of the command line.

    `--help` prints what stands at the top of the program's file. A `UserError`, and an OSError, is
    one line and status 1.
    """
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print((sys.modules[program.__module__].__doc__ or "").strip())
        return
    try:
        status = program(arguments)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.exit(status)
