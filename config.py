"""The root of the configuration: four typed groups, checked together, with errors that name the
key.

Hydra composes it from `conf/`; `register` tells it the types. `validate` turns the composed
configuration into the dataclasses that the application is built from.
"""

import difflib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from char_dataset import DataConfig
from distributed import computes_in_bfloat16, launched_size
from errors import UserError
from launch import LaunchConfig, without
from model import ARCHITECTURE, GPTConfig
from optimizer import OptimizerConfig
from settings import flatten
from trainer_config import TrainerConfig

log = logging.getLogger("gpt")

CONF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf")
GROUPS = ("data", "model", "optimizer", "trainer", "experiment")


@dataclass
class Config:
    """One run: what it learns from, what learns, how, for how long, by how many processes, and
    where its files go.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    init_from: str | None = None
    explicit: list[str] = field(default_factory=list)
    samples: bool = True
    report: bool = True
    run_name: str = "run"
    run_dir: str = "runs/${run_name}"


KNOWN = list(flatten(cast(dict, OmegaConf.to_container(OmegaConf.structured(Config)))))
LAST = {key.split(".")[-1]: key for key in KNOWN}  # by the last part of its name


def register() -> None:
    """Makes the schema known to Hydra. Call before composing."""
    ConfigStore.instance().store(name="base_config", node=Config)


def job_name(overrides: list[str], swept: str = "") -> str:
    """A directory name for one job of a sweep: the overrides of the keys `swept`, separated by
    spaces, and a digest of the others; without `swept` all of them. Those of `launch` do not count.

    The same overrides give the same name, so that the same sweep goes on where it stopped. Others
    give another: where characters are replaced, or many left out, it ends with a digest, too.
    """
    own = sorted(without(overrides, "launch."))
    shown = [o for o in own if not swept or o.split("=")[0].lstrip("+~") in swept.split()]
    whole = ",".join(shown) or "defaults"
    name = re.sub(r"[^\w.,=+-]", "_", whole)
    if name == whole and len(name) <= 120 and shown == own:
        return name
    return f"{name[:100]}-{hashlib.sha256(','.join(own).encode()).hexdigest()[:8]}"


# Not in `register`: a job of submitit's names its directory before it calls anything of ours.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)


def with_recipe(arguments: list[str]) -> list[str]:
    """`arguments` and the recipe that fits this machine, unless they name one."""
    if "experiment=null" in arguments:  # Hydra has no such override; null is what config.yaml has
        return [a for a in arguments if a != "experiment=null"]
    names = {argument.split("=")[0].lstrip("+~") for argument in arguments}
    if names & {"experiment", "--hydra-help", "--version"}:
        return arguments
    # torch's own way to ask would keep the GPU from processes that begin as copies of this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if torch.cuda.is_available() and "trainer.device=cpu" not in arguments:
        recipe = "shakespeare_gpu"
    elif computes_in_bfloat16(torch.device("cpu")):
        recipe = "shakespeare_cpu"
    else:
        recipe = "shakespeare_float32"
    if names.isdisjoint(
        {"--help", "-h", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
    ):
        log.info("recipe      %s, which fits this machine; --help lists the others", recipe)
    # A choice made inside conf/config.yaml would be an interpolated group, and those may not
    # override other groups. Hydra wants all overrides in one place.
    overrides = (i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-"))
    first = next(overrides, 0)
    return [*arguments[:first], f"experiment={recipe}", *arguments[first:]]


def validate(config: DictConfig) -> Config:
    """The dataclasses behind a composed configuration, every check passed that needs no text.

    Raises `UserError` naming the key for a missing value, a wrong type, or an impossible value or
    combination, before any process group or download.
    """
    for key in flatten(cast(dict, OmegaConf.to_container(config))):
        if key not in KNOWN:  # a `+` before the key lets it past Hydra
            raise UserError(no_such_key(key))
    try:
        OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(explain(error, sys.argv[1:])) from error
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise UserError(
            f"{', '.join(sorted(missing))}: missing; give a value, such as {min(missing)}=VALUE"
        )
    try:
        result = cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, sys.argv[1:])) from error
    if result.model.block_size != result.data.block_size:
        raise UserError(
            f"model.block_size={result.model.block_size}: must equal data.block_size "
            f"({result.data.block_size}); set data.block_size instead"
        )
    if not result.run_name.strip() or not result.run_dir.strip():
        raise UserError("run_name and run_dir: must not be empty")
    result.launch.check()
    result.trainer.check_world_size(launched_size() * result.launch.processes())
    return result


def follow_overrides(composed: DictConfig, overrides: Iterable[str]) -> None:
    """Changes in `composed` what its overrides, as they were typed, mean beyond what they say."""
    named = {key.lstrip("+~"): value for key, _, value in (o.partition("=") for o in overrides)}
    sizes = ("n_layer", "n_head", "n_embd")
    if "model.model_type" in named and not any(f"model.{s}" in named for s in sizes):
        for size in sizes:  # the recipe's sizes are not those of the type that was asked for
            composed.model[size] = None
    chosen = os.path.join(CONF, "optimizer", f"{named.get('optimizer')}.yaml")
    if os.path.exists(chosen):  # the recipe's values are for its own
        for name, value in cast(DictConfig, OmegaConf.load(chosen)).items():
            if f"optimizer.{name!s}" not in named:
                composed.optimizer[name] = value
    if "data.path" in named and "data.url" not in named:
        composed.data.url = None  # the configured url and digest are those of another text
        if "data.sha256" not in named:
            composed.data.sha256 = None
    if named.keys() & {"data", "data.path", "data.url"}:
        composed.data.fallback = None  # no other text stands in for one that was chosen
    if composed.init_from is not None:
        means = {"model": ["arch"], "model.model_type": sizes, "data.block_size": ["block_size"]}
        if composed.model.model_type is None:
            del means["model.model_type"]
        asked = {name for key in named for name in means.get(key, ())}
        asked |= {
            n for n in ARCHITECTURE if f"model.{n}" in named and composed.model[n] is not None
        }
        composed.explicit = sorted(asked)


def plain(config: Config) -> dict:
    """The configuration as nested dictionaries of plain types, for a snapshot or a YAML file;
    without `launch` and `explicit`, which say how a run is started, and may differ from start to
    start.
    """
    result = cast(dict, OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
    del result["launch"], result["explicit"]
    return result


def no_such_key(key: str) -> str:
    """The line for a key that does not exist, with the nearest that does."""
    known = [*KNOWN, *GROUPS]
    near = difflib.get_close_matches(key, known, n=1)
    near = near or [LAST[k] for k in difflib.get_close_matches(key.split(".")[-1], LAST, n=1)]
    hint = f"did you mean {near[0]}?" if near else "see python main.py --help"
    return f"{key}: unknown key; {hint}"


def no_such_option(group: str, name: str, options: Iterable[str]) -> str:
    """The line for a file that a group does not have."""
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    own = "; a text of your own is data=text data.path=FILE" if group == "data" else ""
    return f"{group}={name}: there is none; {hint}There are {', '.join(options)}{own}"


def check_dashes(arguments: Iterable[str]) -> None:
    """Raises `UserError` for a setting that is given as other programs' options are, with
    dashes.
    """
    for argument in arguments:
        name, _, value = argument.lstrip("-").replace("-", "_").partition("=")
        if argument.startswith("--") and (key := LAST.get(name.split(".")[-1])):
            raise UserError(f"{argument}: settings have no dashes: {key}={value or 'VALUE'}")


KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def explain(error: Exception, arguments: Iterable[str]) -> str:
    """One line for an error of Hydra or OmegaConf, naming the key; `arguments` were given to it."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return no_such_option(group, name, error.options)
    if isinstance(error, OverrideParseException) and not re.match(r".+=", error.override):
        return f"{error.override}: settings are KEY=VALUE, without spaces around the ="
    for argument in arguments:
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0].replace("/", ".")
        if "=" not in argument or key.startswith(("hydra", "-")):
            continue
        if not any(k == key or k.startswith(f"{key}.") for k in [*KNOWN, *GROUPS]):
            return no_such_key(key)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full_key = getattr(cause, "full_key", None)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not full_key:
        return " ".join(lines)
    if "is not a ListConfig" in lines[0]:
        return f"{full_key}: must be a list, as in '{full_key}=[a,b]'"
    wrong = re.match(r"Value '(.*?)' .*(?:converted to |not a valid )(\w+)", lines[0])
    if wrong and wrong[2] in KINDS:
        return f"{full_key}={wrong[1]}: must be {KINDS[wrong[2]]}"
    return f"{full_key}: {lines[0]}"
