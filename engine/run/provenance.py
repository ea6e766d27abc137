"""Provenance: the configuration, the versions, the hardware and the command line of each start of a run."""

import dataclasses
import os
import platform
import time
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from engine.files import atomic_write
from engine.machine import hardware
from engine.run.directory import CONFIG, ENVIRONMENT
from engine.run.metrics import read_lines, write_lines


def record_run(config: Any, frequency_loss: float, trainer: Any) -> None:
    """Writes `config.yaml`, the fields of the dataclass `config`, and a line of `environment.jsonl` for this start of
    `trainer`. `frequency_loss`: see `char_dataset.compare_characters`. Without Hydra, `recipe` and `overrides` are
    None. Earlier starts at or past this step are dropped, as nothing that they computed is kept.
    """
    with atomic_write(os.path.join(config.run_dir, CONFIG)) as file:
        OmegaConf.save(dataclasses.asdict(config), file)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    world, choices = trainer.world, trainer.choices
    start = {
        "step": trainer.step,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": list(hydra.overrides.task) if hydra else None,
        "total_steps": trainer.plan.total_steps,
        "precision": choices["amp_dtype"],
        "compiled": choices["compile"],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "text_sha256": trainer.train_dataset.digest,
        "frequency_loss": frequency_loss,
        "device": hardware.device_name(world.device),
        "hosts": -(-world.size // world.local_size),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    path = os.path.join(config.run_dir, ENVIRONMENT)
    earlier = [line for line in read_lines(path) if line["step"] < trainer.step]
    write_lines(path, [*earlier, start])
