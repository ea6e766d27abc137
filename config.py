"""The configuration: composed by Hydra from `conf/` and the command line, checked once.

The fields are declared in engine/config/schema.py.
"""

import dataclasses
import logging
import os
from typing import cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.config.arguments import field_table
from engine.config.overrides import COMPOSING, FOLDERS, check_overrides, explain
from engine.config.schema import GROUPS, Config, GPTConfig, as_typed, flatten
from engine.errors import UserError
from engine.files import is_local
from engine.parallel.distributed import all_gather

log = logging.getLogger("gpt")
CONF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf")

BASE = OmegaConf.structured(Config)
BASE.model = OmegaConf.structured(GPTConfig)  # of the class, as an instance fills in its null sizes
ConfigStore.instance().store(name="base_config", node=BASE)


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that Hydra composes from `conf/` and `overrides`. Raises `UserError`."""
    check_overrides(overrides)
    try:
        with hydra.initialize_config_dir(CONF, version_base="1.3"):
            return hydra.compose("config", overrides)
    except COMPOSING as error:
        raise UserError(explain(error)) from error


def as_config(composed: DictConfig) -> Config:
    """Converts a composed configuration to dataclasses, and runs every check that needs no text. Raises `UserError`
    naming a key whose value is missing, mistyped or impossible.
    """
    try:
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    raw, plain = (flatten(cast(dict, OmegaConf.to_container(composed, resolve=resolve))) for resolve in (False, True))
    config.unresolved = {k: v for k, v in raw.items() if "${oc.env:" in str(v) and not is_local(str(plain[k]))}
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
    if in_sweep() and (os.path.isabs(path) or not is_local(path)) and config.run_dir not in path:
        raise UserError(f"trainer.snapshot_path={path}: all jobs of the sweep would share it; include ${{run_dir}}")
    return config


def in_sweep() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_ranks_agree(config: Config, text_digest: str) -> None:
    """Raises `UserError` if texts or settings differ between ranks, such as recipes chosen for different hardware."""
    local = ("run_dir", "trainer.threads")
    own = dataclasses.asdict(config)
    own["text"] = text_digest
    first, *others = map(flatten, all_gather(own))
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
    for group in FOLDERS:
        files = sorted(os.listdir(os.path.join(CONF, group)))
        lines.append(f"  {group:12} {', '.join(file.removesuffix('.yaml') for file in files)}")
    lines.append(
        "\nFields (python main.py KEY=VALUE) and their defaults. A recipe changes many of them; one is\n"
        "used unless experiment=null. python main.py --cfg job prints the values of a run."
    )
    return "\n".join([*lines, *(f"\n{field_table(group, prefix)}" for prefix, group in GROUPS.items())])
