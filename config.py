"""The root of the configuration: typed groups, checked together, with errors that name the
key.

Hydra composes it from `conf/`; `register` tells it the types. `validate` turns the composed
configuration into the dataclasses that the application is built from.
"""

import difflib
import logging
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from char_dataset import DataConfig
from engine.config.arguments import explain_value
from engine.config.settings import flatten
from engine.errors import UserError
from engine.optim.optimizer import OptimizerConfig
from engine.parallel.distributed import launched_size
from engine.parallel.launch import LaunchConfig, quoted
from model import GPTConfig
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
LAST = {key.split(".")[-1]: key for key in reversed(KNOWN)}  # the first that ends so


def register() -> None:
    """Makes the schema known to Hydra. Call before composing."""
    ConfigStore.instance().store(name="base_config", node=Config)


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that these overrides make, and nothing else. Raises `UserError`."""
    register()
    try:
        if HydraConfig.initialized():  # within `hydra.main`
            return hydra.compose("config", overrides)
        with hydra.initialize_config_dir(CONF, version_base="1.3"):
            return hydra.compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, overrides)) from error


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
        if missing := OmegaConf.missing_keys(config):
            raise UserError(
                f"{', '.join(sorted(missing))}: missing; give a value, such as {min(missing)}=VALUE"
            )
        result = cast(Config, OmegaConf.to_object(config))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(explain(error, ())) from error
    if result.model.block_size != result.data.block_size:
        raise UserError(
            f"model.block_size={result.model.block_size}: must equal data.block_size "
            f"({result.data.block_size}); set data.block_size instead"
        )
    if not result.run_name.strip() or not result.run_dir.strip():
        raise UserError("run_name and run_dir: must not be empty")
    if ".." in result.run_name.split("/"):
        raise UserError(f"run_name={result.run_name}: leads out of runs/; run_dir= may be anywhere")
    if result.init_from == "":
        raise UserError("init_from: must not be empty; null begins with fresh weights")
    result.launch.check()
    result.trainer.check_world_size(launched_size() * result.launch.processes())
    return result


def plain(config: Config) -> dict:
    """The configuration as nested dictionaries of plain types, for a snapshot or a YAML file;
    without `launch` and `explicit`, which say how a run is started, and may differ from start to
    start.
    """
    result = cast(dict, OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
    del result["launch"], result["explicit"]
    return result


def no_such_key(key: str) -> str:
    """The line for a key that does not exist: the nearest that does, in its group first, or else
    where to look.
    """
    group, _, last = key.rpartition(".")
    own = {k.rpartition(".")[2]: k for k in [*KNOWN, *GROUPS] if k.rpartition(".")[0] == group}
    near = [own[k] for k in own if len(last) > 2 and k.startswith(last)]
    near = near or [own[k] for k in difflib.get_close_matches(last, own, n=1)]
    near = near or difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.8)
    near = near or [LAST[k] for k in difflib.get_close_matches(last, LAST, n=1)]
    if near:
        return f"{key}: unknown key; did you mean {near[0]}?"
    where = f"conf/{group}/" if group in GROUPS else "python main.py --help"
    return f"{key}: unknown key; see {where} for those there are"


def no_such_option(group: str, name: str, options: Iterable[str]) -> str:
    """The line for a file that a group does not have."""
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {group}={near[0]}? Choose" if near else "choose"
    own = "; for a text of your own: data=text data.path=FILE" if group == "data" else ""
    return f"{group}={name}: no such file in conf/{group}; {hint} from {', '.join(options)}{own}"


def explain(error: Exception, arguments: Iterable[str]) -> str:
    """One line for an error of Hydra or OmegaConf, naming the key; `arguments` were given to it."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.partition("/")
        return no_such_option(group, name, error.options)
    if isinstance(error, OverrideParseException) and not re.match(r".+=", error.override):
        return f"{error.override}: settings are KEY=VALUE, without spaces around the ="
    if isinstance(error, OverrideParseException) and not re.match(r".+=[\[{]", error.override):
        key, _, value = error.override.partition("=")
        both = f"{key}={quoted(value)}"
        both = shlex.quote(both) if set('"$`\\!') & set(both) else f'"{both}"'  # easier to read
        return f"{error.override}: quote the value, for Hydra and for the shell: {both}"
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
    return explain_value(cause)
