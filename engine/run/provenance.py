"""Provenance: versions, hardware, command line; one JSON line per start in `environment.jsonl`."""

import os
import platform
import time
from typing import Any

import torch

from engine.machine.hardware import device_name
from engine.run.directory import ENVIRONMENT
from engine.run.metrics import read_lines, write_lines


def record_start(
    run_dir: str, trainer: Any, recipe: str | None, overrides: list[str] | None
) -> None:
    """Appends the start of the run of a `Trainer`; `recipe` and `overrides` are None without Hydra.

    Earlier starts at or past its step are dropped: nothing that they computed is kept.
    """
    path, world = os.path.join(run_dir, ENVIRONMENT), trainer.world
    start = {
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": recipe,
        "overrides": overrides,
        "device": device_name(world.device),
        "hosts": -(-world.size // world.local_size),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "precision": trainer.choices["amp_dtype"],
        "compiled": trainer.choices["compile"],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "text_sha256": trainer.train_dataset.digest,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    earlier = [line for line in read_lines(path) if line["step"] < trainer.step]
    write_lines(path, [*earlier, start])
