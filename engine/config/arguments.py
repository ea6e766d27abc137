"""Command lines: `name=value` arguments of the small programs, the fields of a dataclass; that of main.py as typed."""

import dataclasses
import glob
import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast, get_args

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from engine import portable
from engine.config.schema import as_typed
from engine.errors import UserError
from engine.files import masked

T = TypeVar("T")
Text = Annotated[str, "verbatim"]  # type of a field whose value is no path and is taken as it is, also null and ~
# A field is one line, `name: type = default  # meaning`.
FIELD = re.compile(r"^    (\w+): ([^=#\n]+?)(?: = .*?)?(?:  # (.*))?$", re.MULTILINE)


def parse(cls: type[T], arguments: list[str]) -> T:
    """An instance of the dataclass `cls`. `Text` is verbatim. Of the others, `null` is None, `~` in paths is the home
    directory, and lists are `[a,b]` or a single value. Raises `UserError` naming an argument that is unknown,
    missing, empty or of the wrong type.
    """
    # A type variable cannot say that its type is a dataclass.
    types = {f.name: (f.type, *get_args(f.type)) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    typed = OmegaConf.structured(cls)
    given: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in types:
            known = ", ".join(f"{other}=" for other in types)
            raise UserError(f"{argument}: not an argument; there are {known}")
        if not value:
            raise UserError(f"{argument}: is empty; give a value, or leave it out")
        if Text in types[name]:
            given[name] = value
        elif list[str] in types[name] and value != "null":
            is_list = value.startswith("[") and value.endswith("]")
            items = split_paths(value[1:-1]) if is_list else [value]
            given[name] = [os.path.expanduser(item.strip()) for item in items if item.strip()]
        elif str in types[name] and value != "null":
            given[name] = os.path.expanduser(value)
        else:
            try:
                typed[name] = None if value == "null" else value
                given[name] = typed[name]  # converted
            except OmegaConfBaseException as error:
                raise UserError(explain_value(error)) from error
    for name in OmegaConf.missing_keys(typed) - given.keys():
        raise UserError(f"{name}: missing; give {name}=VALUE")
    return cls(**given)


def split_paths(text: str) -> list[str]:
    """The items between commas. A file or a pattern with commas, as the jobs of a sweep have, is one."""
    items: list[str] = []
    left = text.split(",")
    while left:
        joined = [",".join(left[:n]) for n in range(len(left), 0, -1)]
        paths = {each: os.path.expanduser(each.strip()) for each in joined}
        item = next((each for each, path in paths.items() if os.path.exists(path) or glob.glob(path)), left[0])
        items.append(item)
        left = left[item.count(",") + 1 :]
    return items


def this_command(*changed: str, without: tuple[str, ...] = ()) -> str:
    """The command line of main.py as it was typed, with the overrides `changed`, and without those whose keys begin as
    one of `without`; of another program, only `changed`.
    """
    program = sys.argv[0]
    if os.path.basename(program) != "main.py" or program not in sys.orig_argv:
        return shlex.join(changed)
    typed = sys.orig_argv[sys.orig_argv.index(program) + 1 :]
    replaced = tuple(override.partition("=")[0] + "=" for override in changed)
    kept = [argument for argument in typed if not argument.lstrip("+").startswith((*replaced, *without))]
    launcher = "torchrun ..." if "RANK" in os.environ else "python"
    return masked(f"{launcher} {shlex.join([program, *kept, *changed])}")


def explain_value(error: OmegaConfBaseException) -> str:
    """An error of OmegaConf as one line that names the key."""
    key, first = error.full_key, str(error).splitlines()[0]
    if "is not a ListConfig" in first:
        first = f"must be a list, in quotes for the shell: '{key}=[A,B]'"
    if first.endswith("is not Optional"):
        first = "must not be null"
    if isinstance(error, MissingMandatoryValue):
        first = f"missing; give {key}=VALUE"
    return f"{key}: {first}"


def field_table(cls: type, prefix: str = "") -> str:
    """The fields of a dataclass, which inherits none, without nested ones and those in `HIDDEN`, as lines for a
    terminal: `name=default`, type and meaning in columns. A field without a default shows `???`.
    """
    declared = {name: (kind, meaning) for name, kind, meaning in FIELD.findall(inspect.getsource(cls))}
    hidden = getattr(cls, "HIDDEN", ())
    fields = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(f.type) and f.name not in hidden]
    defaults = cast(dict, OmegaConf.to_container(OmegaConf.structured(cls)))
    rows = [(f"{prefix}{f.name}={as_typed(defaults[f.name])}", *declared[f.name]) for f in fields]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows)


def run_program(program: Callable[[list[str]], int | None], *configs: type) -> None:
    """Runs `program(arguments)` and exits with its status; a `UserError` or OSError is one line and
    status 1, and Ctrl-C ends it without a traceback. `--help` prints the docstring of the program's file and the
    fields of its `configs`.
    """
    portable.open_closed_streams()
    portable.restore_sigpipe()
    portable.replace_unprintable()
    arguments = sys.argv[1:]
    try:
        if {"-h", "--help"} & set(arguments):
            with portable.checked_output():
                print((sys.modules[program.__module__].__doc__ or "").strip())
                for config in configs:
                    print(f"\n{config.__doc__}\n\n{field_table(config)}")
            return
        status = program(arguments)
        with portable.checked_output():
            pass
        sys.exit(status)
    except (UserError, OSError) as error:
        sys.exit(masked(f"error: {error}"))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # start the shell's prompt on a new line
        sys.exit(128 + signal.SIGINT)
