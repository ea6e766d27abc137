"""Provenance: the configuration, the versions, the hardware and the command line of each start of a run."""

import logging
import os
import platform
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from engine.files import atomic_write
from engine.machine import hardware
from engine.parallel import sharding
from engine.run.directory import CONFIG, ENVIRONMENT
from engine.run.metrics import read_lines, write_lines

log = logging.getLogger("gpt")


def log_parts(config: Any, trainer: Any, unseen: float) -> None:
    """Logs the text, the model and the optimizer. `unseen`: fraction of the held-out characters that do not occur in
    training.
    """
    text, optimizer = trainer.train_dataset, config.optimizer
    log.info(
        "text        %s: %s %ss to train on, %s held out%s, %d distinct",
        config.data.path, f"{len(text.data):,}", text.unit, f"{len(trainer.test_dataset.data):,}",
        f" (of which {unseen:.2%} do not occur in training)" if unseen else "", text.vocab_size,
    )  # fmt: skip
    parameters, sharded = trainer.bare.parameters(), ", sharded" * sharding.is_sharded(trainer.bare)
    log.info("parameters  %s%s", f"{sum(p.numel() for p in parameters):,}", sharded)
    ngrams = f", n-gram decay {optimizer.ngram_decay:g}" if config.model.ngram_rows else ""
    log.info(
        "optimizer   %s, %s schedule, learning rate %g, weight decay %g%s",
        optimizer.name, optimizer.schedule, optimizer.learning_rate, optimizer.weight_decay, ngrams,
    )  # fmt: skip


def record_run(unigram_loss: float, started: str, trainer: Any) -> None:
    """Writes `config.yaml`, and the line of `environment.jsonl` for the start of `trainer`, at the time `started`.
    `unigram_loss`: of the held-out part, in nats. Without Hydra, `recipe` and `overrides` are None. Drops
    starts recorded at the same step or later, whose results were discarded.
    """
    run_dir = trainer.snapshots.run_dir
    with atomic_write(os.path.join(run_dir, CONFIG)) as file:
        OmegaConf.save(trainer.run_config, file)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    world, choices = trainer.world, trainer.choices
    start = {
        "step": trainer.first_step,
        "started": started,
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": list(hydra.overrides.task) if hydra else None,
        "total_steps": trainer.plan.total_steps,
        "precision": choices["amp_dtype"],
        "compiled": choices["compile"],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "text_sha256": trainer.train_dataset.digest,
        "unigram_loss": unigram_loss,
        "device": hardware.device_name(world.device),
        "hosts": -(-world.size // world.local_size),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    path = os.path.join(run_dir, ENVIRONMENT)
    earlier = [line for line in read_lines(path) if line["step"] < trainer.first_step]
    write_lines(path, [*earlier, start])
