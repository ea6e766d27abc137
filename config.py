"""The root of the configuration: four typed groups, checked together, with errors that name the
key.

Hydra composes it from `conf/`; `register` tells it the types. `validate` turns the composed
configuration into the dataclasses that the application is built from.
"""

import difflib
import sys
from dataclasses import dataclass, field
from typing import cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from char_dataset import DataConfig
from distributed import launched_size
from errors import UserError
from model import GPTConfig, OptimizerConfig
from snapshot import flatten
from trainer import TrainerConfig

GROUPS = ("data", "model", "optimizer", "trainer", "experiment")


@dataclass
class Config:
    """One run: what it learns from, what learns, how, for how long, and where its files go."""

    data: DataConfig = field(default_factory=DataConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run_name: str = "run"
    run_dir: str = "runs/${run_name}"


def register() -> None:
    """Makes the schema known to Hydra. Call before composing."""
    ConfigStore.instance().store(name="base_config", node=Config)


def validate(config: DictConfig) -> Config:
    """The dataclasses behind a composed configuration, every check passed that needs no text.

    Raises `UserError` naming the key for a missing value, a wrong type, or an impossible value or
    combination, before any process group or download.
    """
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise UserError(
            f"{', '.join(sorted(missing))}: missing; give a value, such as {min(missing)}=VALUE"
        )
    try:
        result = cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    if result.model.block_size != result.data.block_size:
        raise UserError(
            f"model.block_size={result.model.block_size}: is data.block_size "
            f"({result.data.block_size}); set that one"
        )
    result.trainer.check_world_size(launched_size())
    return result


def plain(config: Config) -> dict:
    """The configuration as nested dictionaries of plain types, for a snapshot or a YAML file."""
    return cast(dict, OmegaConf.to_container(OmegaConf.structured(config), resolve=True))


def explain(error: Exception) -> str:
    """One line for an error of Hydra or OmegaConf, naming the key and, if it does not exist, the
    nearest that does.
    """
    known = [*flatten(cast(dict, OmegaConf.to_container(OmegaConf.structured(Config)))), *GROUPS]
    for argument in sys.argv[1:]:
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0].replace("/", ".")
        prefixes = (k for k in known if k == key or k.startswith(f"{key}."))
        if "=" not in argument or key.startswith(("hydra", "-")) or any(prefixes):
            continue
        near = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(
            key.split(".")[-1], [k.split(".")[-1] for k in known], n=1
        )
        full = next((k for k in known if near and k.endswith(near[0])), None)
        return f"{key}: there is no such key" + (
            f"; did you mean {full}?" if full else "; see python main.py --help"
        )
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    message = lines[0] if key else " ".join(lines)
    return f"{key}: {message}" if key else message
