"""The configuration: the dataclasses of all groups joined, checked once.

Each field is declared once, in its dataclass: type, default, unit and meaning in one line. `conf/` has only values
that differ from the defaults.
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
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from char_dataset import DataConfig
from engine.config.arguments import field_table
from engine.config.overrides import GROUPS, check_overrides, explain
from engine.config.settings import as_typed, flatten
from engine.errors import UserError
from engine.optim import OptimizerConfig
from engine.parallel.distributed import World, all_gather
from engine.snapshots.storage import is_local
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
    init_from: str | None = None  # pretrained weights: a snapshot, a run directory, or a directory that export.py wrote
    samples: bool = True  # sample text at the log lines 1, 4, 16, 64, ... and the last, into metrics.jsonl
    report: bool = True  # write report.html into run_dir at the end
    run_name: str = "run"  # names the directory of the run; recipes set it to their own name
    run_dir: str = "runs/${run_name}"  # where the run writes
    # fmt: on

    def resolve_architecture(self, architecture: dict[str, Any]) -> None:
        """Copies a pretrained model's `architecture`; the context is the smaller of both."""
        source = GPTConfig.recorded(architecture).complete()
        asked = self.data.block_size
        block_size = min(asked or source.block_size, source.block_size)
        values = {name: getattr(source, name) for name in ARCHITECTURE} | {"block_size": block_size}
        self.model = dataclasses.replace(self.model, model_type=None, **values)
        self.data = dataclasses.replace(self.data, block_size=block_size)
        differ = asked not in (None, source.block_size)
        smaller = f", the smaller of {source.block_size} and data.block_size={asked}" * differ
        log.info(
            "architecture %s, layers %d, heads %d, width %d, of the pretrained model; context %d%s",
            source.arch, source.n_layer, source.n_head, source.n_embd, block_size, smaller,
        )  # fmt: skip


BASE = OmegaConf.structured(Config)
BASE.model = OmegaConf.structured(GPTConfig)  # of the class, as an instance fills in its null sizes
KEYS = [*flatten(cast(dict, OmegaConf.to_container(BASE)))]  # dotted
ConfigStore.instance().store(name="base_config", node=BASE)


def check_typed(overrides: list[str]) -> None:
    """Raises `UserError` for overrides as they were typed: see `check_overrides`."""
    check_overrides(overrides, KEYS, {f"model.{name}" for name in (*ARCHITECTURE, "model_type")})


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that Hydra composes from `conf/` and `overrides`. Raises `UserError`."""
    check_typed(overrides)
    try:
        with hydra.initialize_config_dir(CONF, version_base="1.3"):
            return hydra.compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def validate(composed: DictConfig) -> Config:
    """Converts a composed configuration to dataclasses, and runs every check that needs no text. Raises `UserError`
    naming a key whose value is missing, mistyped or impossible.
    """
    try:
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    for name, source in (("block_size", "data.block_size"), ("vocab_size", "the text")):
        if (value := getattr(config.model, name)) is not None:
            raise UserError(f"model.{name}={value}: follows from {source}; leave it null")
    config.model.block_size = config.data.block_size
    config.run_dir = os.path.expanduser(config.run_dir)
    config.init_from = config.init_from and os.path.expanduser(config.init_from)
    for name in ("run_name", "run_dir", "init_from"):
        if getattr(config, name) is not None and not getattr(config, name).strip():
            raise UserError(f"{name}: must not be empty")
    if "/" in config.run_name or config.run_name in (".", ".."):
        raise UserError(f"run_name={config.run_name}: must be a name without a slash; run_dir= may be any directory")
    path = config.trainer.snapshot_path
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep and (os.path.isabs(path) or not is_local(path)) and config.run_dir not in path:
        raise UserError(
            f"trainer.snapshot_path={path}: all jobs of the sweep would share it; make it relative, or "
            "include ${run_dir}"
        )
    return config


def check_ranks_agree(config: Config, text_digest: str, world: World) -> None:
    """Raises `UserError` if texts or settings differ between ranks, such as recipes chosen for different hardware."""
    local = ("run_dir", "trainer.threads")
    own = dataclasses.asdict(config)
    own["data"]["sha256"] = text_digest
    first, *others = map(flatten, all_gather(own, world))
    for other in others:
        for key in sorted(first):
            if first[key] != other[key] and key not in local:
                raise UserError(
                    f"{key}: the ranks differ, {as_typed(first[key])} and {as_typed(other[key])}; start all with "
                    "the same text and command, and name the recipe: experiment=NAME"
                )


def help_text() -> str:
    """Every group and field with type, default and meaning, for `python main.py --help`."""
    lines = ["Groups, and their files in conf/ (python main.py GROUP=FILE):", ""]
    for group in GROUPS:
        files = sorted(os.listdir(os.path.join(CONF, group)))
        lines.append(f"  {group:12} {', '.join(file.removesuffix('.yaml') for file in files)}")
    lines.append(
        "\nFields (python main.py KEY=VALUE) and their defaults. A recipe changes many of them; one is\n"
        "used unless experiment=null. python main.py --cfg job prints the values of a run.\n"
    )
    for f in dataclasses.fields(Config):
        if dataclasses.is_dataclass(f.type):
            lines += [field_table(f.type, f"{f.name}."), ""]
    return "\n".join([*lines, field_table(Config)])
