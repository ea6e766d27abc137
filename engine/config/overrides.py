"""Overrides as they are typed, `KEY=VALUE`: the default recipe, and one clear line for every mistake."""

import difflib
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.config.arguments import explain_value
from engine.errors import UserError
from engine.machine.hardware import computes_in_bfloat16

log = logging.getLogger("gpt")
GROUPS = ("data", "model", "optimizer", "experiment")


def key_of(override: str) -> str:
    """`trainer.seed` of `+trainer.seed=1`."""
    return override.split("=", 1)[0].lstrip("+~")


def without(overrides: Iterable[str], *prefixes: str) -> list[str]:
    """The overrides that do not start with one of `prefixes`, such as `launch.` or `run_dir=`."""
    return [o for o in overrides if not o.lstrip("+~").startswith(prefixes)]


def quoted(value: str) -> str:
    """`value` as Hydra reads it back, whatever is in it."""
    return QuotedString(value, Quote.single).with_quotes()


def worker_arguments(hydra: Any, overrides: list[str], run_dir: str) -> list[str]:
    """The command line of each process that this one starts, which composes the same configuration from
    `hydra`, Hydra's own one, and the overrides as typed, in `run_dir`.
    """
    sources = {source.provider: source.path for source in hydra.runtime.config_sources}
    result = ["--config-path", sources["main"], "--config-name", hydra.job.config_name]
    if "command-line" in sources:
        result += ["--config-dir", sources["command-line"]]
    result += [o for o in hydra.overrides.hydra if o.lstrip("+").startswith("hydra.searchpath=")]
    result += without(overrides, "launch.")
    if not any(o.lstrip("+").startswith("experiment=") for o in overrides):
        result.append("experiment=null")  # a worker must not choose a recipe
    return [
        *result,
        f"run_dir={quoted(run_dir)}",
        "launch.nproc_per_node=1",
        "launch.max_restarts=0",
    ]


def with_recipe(arguments: list[str]) -> list[str]:
    """`arguments`, with the recipe that fits this machine unless they name one."""
    if "experiment=null" in arguments:  # not an override that Hydra has; null is the default
        return [a for a in arguments if a != "experiment=null"]
    names = {key_of(argument) for argument in arguments}
    if names & {"experiment", "--hydra-help", "--version"}:
        return arguments
    # torch's default way to ask would keep the GPU from processes that are forks of this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available() and "trainer.device=cpu" not in arguments:
        recipe = "shakespeare_gpu"
    elif computes_in_bfloat16(torch.device("cpu")):
        recipe = "shakespeare_cpu"
    else:
        recipe = "shakespeare_float32"
    if names.isdisjoint({"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}):
        log.info("recipe      %s, which fits this machine; --help lists the others", recipe)
    # Hydra wants all overrides in one place. A choice inside conf/config.yaml would be an interpolated
    # group, and those may not override other groups.
    positions = (i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-"))
    first = next(positions, 0)
    return [*arguments[:first], f"experiment={recipe}", *arguments[first:]]


def job_name(overrides: list[str], swept: str = "") -> str:
    """The directory of one job of a sweep: the overrides of the keys in `swept` (separated by spaces; all
    without it) and, unless these are the whole of a short name, a digest of all. Those of `launch` do not
    count. The same overrides give the same name, so that the same sweep resumes its jobs.
    """
    own = sorted(without(overrides, "launch."))
    shown = [o for o in own if not swept or key_of(o) in swept.split()]
    full = ",".join(shown) or "defaults"
    name = re.sub(r"[^\w.,=+-]", "_", full)
    if name == full and len(name) <= 120 and shown == own:
        return name
    return f"{name[:100]}-{hashlib.sha256(','.join(own).encode()).hexdigest()[:8]}"


# At import: a submitit worker names its directory before it calls anything of this application.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)


@dataclass
class Schema:
    """What overrides can name: the dotted `keys`, the files of each group in the folder `conf`, and the
    keys of the `architecture`, which a pretrained model has already.
    """

    keys: list[str]
    conf: str
    architecture: frozenset[str]

    def options(self, group: str) -> list[str]:
        files = sorted(os.listdir(os.path.join(self.conf, group)))
        return [os.path.splitext(file)[0] for file in files]

    def by_last_name(self) -> dict[str, str]:
        """`n_layer` to `model.n_layer`; the first key of those that end alike."""
        return {key.split(".")[-1]: key for key in reversed(self.keys)}

    def check(self, arguments: Iterable[str]) -> None:
        """Raises `UserError` for what Hydra has no clear word for, and for a size beside pretrained
        weights, which have their own.
        """
        arguments = list(arguments)
        starts_pretrained = any(
            key_of(a) == "init_from" and not a.endswith("=null") for a in arguments
        )
        for argument in arguments:
            name, _, value = argument.lstrip("-").replace("-", "_").partition("=")
            key = name if name in GROUPS else self.by_last_name().get(name.split(".")[-1])
            if argument.startswith("--") and key:
                raise UserError(f"{argument}: settings have no dashes: {key}={value or 'VALUE'}")
            if argument.startswith("="):
                raise UserError(f"{argument}: settings are KEY=VALUE, without spaces around the =")
            if argument.startswith("~") and argument[1:] in (*self.keys, *GROUPS):
                raise UserError(f"{argument}: cannot be removed; give another value, or null")
            group, _, name = argument.lstrip("+").partition("=")
            if group in GROUPS and re.fullmatch("null|true|false|[-+]?[0-9.]+", name.lower()):
                raise UserError(self.unknown_option(group, name, self.options(group)))
            if starts_pretrained and group in self.architecture and name.lower() != "null":
                raise UserError(
                    f"{argument}: the pretrained model of init_from= has its own; leave it out"
                )

    def check_keys(self, keys: Iterable[str]) -> None:
        """Raises `UserError` for a key that does not exist, which `+` lets past Hydra."""
        for key in keys:
            if key not in self.keys:
                raise UserError(self.unknown_key(key))

    def unknown_key(self, key: str) -> str:
        """The line for a key that does not exist: the nearest that does, or where to look."""
        group, _, last = key.rpartition(".")
        own = {
            k.rpartition(".")[2]: k for k in [*self.keys, *GROUPS] if k.rpartition(".")[0] == group
        }
        by_last_name = self.by_last_name()
        near = [own[name] for name in own if len(last) > 2 and name.startswith(last)]
        near = near or [own[name] for name in difflib.get_close_matches(last, own, n=1)]
        near = near or difflib.get_close_matches(key, self.keys, n=1, cutoff=0.8)
        near = near or [by_last_name[k] for k in difflib.get_close_matches(last, by_last_name, n=1)]
        if near:
            return f"{key}: unknown key; did you mean {near[0]}?"
        return f"{key}: unknown key; python main.py --help lists all"

    def unknown_option(self, group: str, name: str, options: Iterable[str]) -> str:
        """The line for a file that a group does not have."""
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"did you mean {group}={near[0]}? Choose" if near else "choose"
        own = "; for a text of your own: data=text data.path=FILE" if group == "data" else ""
        return (
            f"{group}={name}: no such file in conf/{group}; {hint} from {', '.join(options)}{own}"
        )

    def explain(self, error: Exception, arguments: Iterable[str]) -> str:
        """One line for an error of Hydra or OmegaConf, which were given `arguments`."""
        if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
            group, _, name = error.missing_cfg_file.partition("/")
            return self.unknown_option(group, name, error.options)
        if isinstance(error, OverrideParseException) and not re.match(r".+=", error.override):
            return f"{error.override}: settings are KEY=VALUE, without spaces around the ="
        if isinstance(error, OverrideParseException) and not re.match(r".+=[\[{]", error.override):
            key, _, value = error.override.partition("=")
            both = f"{key}={quoted(value)}"
            both = shlex.quote(both) if set('"$`\\!') & set(both) else f'"{both}"'
            return f"{error.override}: quote the value, for Hydra and for the shell: {both}"
        for argument in arguments:
            key = key_of(argument).split("@")[0].replace("/", ".")
            if "=" not in argument or key.startswith(("hydra", "-")):
                continue
            if not any(k == key or k.startswith(f"{key}.") for k in [*self.keys, *GROUPS]):
                return self.unknown_key(key)
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        full_key = getattr(cause, "full_key", None)
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        if not full_key:
            return " ".join(lines)
        if "is not a ListConfig" in lines[0]:
            return f"{full_key}: must be a list, as in '{full_key}=[a,b]'"
        return explain_value(cause)
