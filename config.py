"""The configuration: the dataclasses of all groups joined, checked once.

Hydra composes it from `conf/` and the command line; `validate` turns the result into these dataclasses.
The home of a field is its dataclass: type, default, unit and meaning in one line. `python main.py --help`
prints them all.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from char_dataset import DataConfig
from engine.config.fields import field_table
from engine.config.overrides import GROUPS, Schema
from engine.config.settings import differences, flatten
from engine.errors import UserError
from engine.optim.optimizer import OptimizerConfig
from engine.parallel.distributed import World, gather, launched_size
from engine.parallel.launch import LaunchConfig
from model import ARCHITECTURE, GPTConfig
from trainer import TrainerConfig

log = logging.getLogger("gpt")
CONF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf")


@dataclass
class Config:
    """One run."""

    # fmt: off
    data: DataConfig = field(default_factory=DataConfig)  # text, split and context
    model: GPTConfig = field(default_factory=GPTConfig)  # architecture and size
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # optimizer and learning rate
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # the training loop
    launch: LaunchConfig = field(default_factory=LaunchConfig)  # how many processes; may differ between starts
    init_from: str | None = None  # pretrained weights: a snapshot, a run directory, or one that export.py wrote
    samples: bool = True  # sample text at the log lines 1, 4, 16, 64, ... and the last, into metrics.jsonl
    report: bool = True  # write report.html into run_dir at the end
    run_name: str = "run"  # names the directory of the run; recipes set it to their own name
    run_dir: str = "runs/${run_name}"  # everything the run writes
    # fmt: on


BASE = OmegaConf.structured(Config)
BASE.model = OmegaConf.structured(GPTConfig)  # not an instance, which has filled in what is null
SCHEMA = Schema(
    keys=list(flatten(cast(dict, OmegaConf.to_container(BASE)))),
    conf=CONF,
    architecture=frozenset(f"model.{name}" for name in (*ARCHITECTURE, "model_type")),
)


def register() -> None:
    """Makes the schema known to Hydra; call it before composing."""
    ConfigStore.instance().store(name="base_config", node=BASE)


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that Hydra composes from `conf/` and `overrides`. Raises `UserError`."""
    SCHEMA.check(overrides)
    register()
    try:
        if HydraConfig.initialized():  # within `hydra.main`
            return hydra.compose("config", overrides)
        with hydra.initialize_config_dir(CONF, version_base="1.3"):
            return hydra.compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(SCHEMA.explain(error, overrides)) from error


def validate(composed: DictConfig) -> Config:
    """The dataclasses of a composed configuration, after every check that needs no text.

    Raises `UserError` naming the key, for a missing value, a wrong type, or an impossible value or
    combination; before any process group or download.
    """
    SCHEMA.check_keys(flatten(cast(dict, OmegaConf.to_container(composed))))
    try:
        OmegaConf.to_container(composed, resolve=True)
        if missing := OmegaConf.missing_keys(composed):
            raise UserError(
                f"{', '.join(sorted(missing))}: missing; give a value, such as {min(missing)}=VALUE"
            )
        config = cast(Config, OmegaConf.to_object(composed))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(SCHEMA.explain(error, ())) from error
    if config.model.block_size not in (None, config.data.block_size):
        raise UserError(
            f"model.block_size={config.model.block_size}: must equal data.block_size "
            f"({config.data.block_size}); set data.block_size instead"
        )
    config.model.block_size = config.data.block_size
    if not config.run_name.strip() or not config.run_dir.strip():
        raise UserError("run_name and run_dir: must not be empty")
    if ".." in config.run_name.split("/"):
        raise UserError(f"run_name={config.run_name}: leads out of runs/; run_dir= may be anywhere")
    if config.init_from == "":
        raise UserError("init_from: must not be empty; null starts with fresh weights")
    config.launch.check()
    config.trainer.check_world_size(launched_size() * config.launch.processes())
    return config


def resolve_architecture(config: Config, architecture: dict[str, Any]) -> None:
    """Gives `config` the architecture and sizes of a pretrained model, and its context unless that of the
    configuration is smaller.
    """
    source = GPTConfig.recorded(architecture).complete()
    block_size = min(config.data.block_size, source.block_size)
    values = {name: getattr(source, name) for name in ARCHITECTURE} | {"block_size": block_size}
    config.model = dataclasses.replace(config.model, model_type=None, **values)
    config.data = dataclasses.replace(config.data, block_size=block_size)
    log.info(
        "architecture %s, %d layers, %d heads, %d wide; context %d of %d",
        source.arch, source.n_layer, source.n_head, source.n_embd, block_size, source.block_size,
    )  # fmt: skip


def check_ranks_agree(config: Config, world: World) -> None:
    """Raises `UserError` if the ranks have different settings, as on hosts with different hardware, for
    which different recipes are chosen.
    """
    local = ("data.path", "data.cache_dir", "run_dir", "trainer.threads")
    first, *others = gather(plain(config), world)
    for other in others:
        if changed := [key for key in differences(first, other) if key not in local]:
            raise UserError(
                f"the ranks have different settings, such as {changed[0]}; name the recipe with "
                "experiment=NAME, and start all ranks with the same command"
            )


def plain(config: Config) -> dict:
    """The configuration as nested dictionaries of plain types, for a snapshot or a YAML file; without
    `launch`, which may differ from start to start.
    """
    result = cast(dict, OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
    del result["launch"]
    return result


def help_text() -> str:
    """Every group and field with type, default and meaning, for `python main.py --help`."""
    lines = ["Groups, and their files in conf/ (python main.py GROUP=FILE):", ""]
    lines += [f"  {group:12} {', '.join(SCHEMA.options(group))}" for group in GROUPS]
    lines += ["", "Fields (python main.py KEY=VALUE):"]
    for f in dataclasses.fields(Config):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            lines += ["", field_table(f.type, f"{f.name}.")]
    nested = tuple(
        f"  {f.name}=" for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)
    )
    own = [line for line in field_table(Config).splitlines() if not line.startswith(nested)]
    return "\n".join([*lines, "", *own])
