"""With what, on what and by which command a run was started: `environment.jsonl` in its directory,
one JSON object for each start.
"""

import hashlib
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf

import model
from engine.errors import UserError
from engine.files import atomic_write
from engine.machine.hardware import device_name
from engine.run.directory import ENVIRONMENT
from engine.run.metrics import read_lines
from engine.snapshots.storage import is_local

if TYPE_CHECKING:
    from trainer import Trainer

log = logging.getLogger("gpt")
CHANGED = "model.py has changed since this run was last started: is it the same model?"


def code() -> str:
    """The SHA-256 of `model.py`."""
    return hashlib.sha256(Path(model.__file__).read_bytes()).hexdigest()


def model_has_changed(snapshot: str) -> bool:
    """Whether the run with the snapshot at this path was last started with another `model.py`, as
    far as the directory of the snapshot tells.
    """
    path = os.path.join(os.path.dirname(snapshot), ENVIRONMENT)
    try:
        starts = read_lines(path) if is_local(snapshot) else []
    except (UserError, OSError):  # the snapshot is none the worse for it
        return False
    return bool(starts) and starts[-1].get("model_sha256", code()) != code()


def record(run_dir: str, trainer: "Trainer") -> None:
    """Notes the start of a run that goes on from `trainer.step`. What an earlier start did past
    that step is lost, and a start that did not get past that step is dropped.

    `recipe` and `overrides` are as Hydra has them, and null where it did not start the run;
    `model_sha256` is of `model.py`, a change of which is warned of.
    """
    from hydra.core.hydra_config import HydraConfig  # what reads a snapshot has no use for it

    path = os.path.join(run_dir, ENVIRONMENT)
    earlier = [line for line in read_lines(path) if line["step"] < trainer.step]
    now = code()
    if earlier and now != earlier[-1].get("model_sha256", now):
        log.warning(CHANGED)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    start = {
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": OmegaConf.to_container(hydra.overrides.task) if hydra else None,
        "device": device_name(trainer.world.device),
        "cores": os.cpu_count(),
        "hosts": -(-trainer.world.size // trainer.world.local_size),
        "processes": trainer.world.size,
        "threads": torch.get_num_threads(),
        "precision": trainer.choices["amp_dtype"],
        "compiled": trainer.choices["compile"],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "text_sha256": trainer.train_dataset.digest,
        "model_sha256": now,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    with atomic_write(path) as file:
        file.writelines(json.dumps(line) + "\n" for line in [*earlier, start])
