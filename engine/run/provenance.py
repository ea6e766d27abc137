"""Provenance: the configuration, the versions, the hardware and the command line of each start of a run."""

import os
import platform
import time
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from engine.files import atomic_write, masked
from engine.machine import hardware
from engine.parallel import distributed
from engine.run.directory import CONFIG, ENVIRONMENT
from engine.run.metrics import as_line, read_lines


def record_start(run_dir: str, run_config: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
    """Writes `config.yaml`, and a line of `environment.jsonl` with `facts` for the start of a run at `step`. Without
    Hydra, `recipe` and `overrides` are None. Drops starts recorded at the same step or later, whose results were
    discarded.
    """
    with atomic_write(os.path.join(run_dir, CONFIG)) as file:
        OmegaConf.save(run_config, file)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    start = {
        "step": step,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": masked(list(hydra.overrides.task)) if hydra else None,
        **facts,
        "device": hardware.device_name(distributed.device()),
        "processes": distributed.size(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    path = os.path.join(run_dir, ENVIRONMENT)
    earlier = [line for line in read_lines(path) if line["step"] < step]
    with atomic_write(path, "wb") as file:
        file.writelines(map(as_line, [*earlier, start]))
