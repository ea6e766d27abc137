"""Provenance: versions, hardware, command line; one JSON line per start in `environment.jsonl`."""

import os
import platform
import time
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig

from engine.machine.hardware import device_name
from engine.parallel.distributed import World
from engine.run.directory import ENVIRONMENT
from engine.run.metrics import read_lines, write_lines


def record_start(run_dir: str, world: World, step: int, **values: Any) -> None:
    """Appends a start of the run at `step`, with `values` of the caller's; without Hydra, `recipe` and
    `overrides` are None.

    Earlier starts at or past its step are dropped: nothing that they computed is kept.
    """
    path = os.path.join(run_dir, ENVIRONMENT)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    start = {
        "step": step,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": list(hydra.overrides.task) if hydra else None,
        **values,
        "device": device_name(world.device),
        "hosts": -(-world.size // world.local_size),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    earlier = [line for line in read_lines(path) if line["step"] < step]
    write_lines(path, [*earlier, start])
