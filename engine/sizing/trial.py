"""Trial: times a few training steps on this machine, and tells how much of the time limit is left."""

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.config.schema import Config, DataConfig, GPTConfig
from engine.machine import hardware
from engine.parallel import distributed
from engine.precision import Precision
from engine.run.plan import Plan
from engine.run.requests import Requests
from engine.sizing.draft import DROPOUT, NO_NGRAMS, Draft
from engine.snapshots.state import State

TRIAL_S = 1.2  # seconds of steps to time
# For fields that are chosen after the trial.
PROVISIONAL = {
    **dict.fromkeys(DROPOUT, 0.0), **NO_NGRAMS, "optimizer.weight_decay": 0.2, "optimizer.learning_rate": 8e-3,
}  # fmt: skip


class SizedText(Protocol):
    """A `CharDataset`."""

    data: torch.Tensor

    def with_config(self, config: DataConfig) -> "SizedText": ...

    def split(self) -> Any: ...


class TimedTrainer(Protocol):
    """What is used of a `Trainer`."""

    state: State
    plan: Plan
    model: torch.nn.Module
    precision: Precision
    requests: Requests

    def step(self) -> tuple[torch.Tensor, torch.Tensor, float]: ...

    def close(self) -> None: ...


Build = Callable[[Config, Any], TimedTrainer]  # of a configuration and a split


class Trial:
    """Times steps on `text`. `build(config, split)` builds the Trainer to time; `deadline` is the end of the time
    limit, as `time.monotonic()` gives it.
    """

    def __init__(self, text: SizedText, deadline: float, build: Build):
        self.text, self.deadline, self.build = text, deadline, build

    def seconds_left(self) -> float:
        """Seconds to the deadline, the minimum over ranks."""
        return min(distributed.all_gather(self.deadline - time.monotonic()))

    def seconds_per_step(self, draft: Draft) -> float:
        """Seconds per training step of `draft`."""
        draft = copy.deepcopy(draft)
        draft.fill(PROVISIONAL)
        config = draft.config
        config.model = sized_model(config)
        config.trainer.max_steps, config.trainer.max_epochs = 30, None
        step_s = time_steps(self.build(config, self.text.with_config(config.data).split()))
        hardware.free_unused(distributed.device())  # only garbage collection frees a Trainer
        return step_s


def sized_model(config: Config) -> GPTConfig:
    """`config.model` as a checked `GPTConfig`, with the block size of `config.data`. Raises `UserError`."""
    block_size = config.data.block_size
    return dataclasses.replace(config.model, model_type=None, block_size=block_size)


def time_steps(trainer: TimedTrainer) -> float:
    """Median time of a training step, seconds, on the slowest rank, over about `TRIAL_S` seconds or all steps. Updates
    the model.
    """
    on_gpu = distributed.device().type == "cuda"
    timed: list[float] = []
    trainer.model.train()
    with trainer.precision.determinism(), contextlib.closing(trainer):
        while trainer.state.step < trainer.plan.total_steps:
            started = time.perf_counter()
            loss, *_ = trainer.step()
            loss.item()  # waits for the device
            timed.append(max(distributed.all_gather(time.perf_counter() - started)))
            # The first steps capture and check the CUDA graph. On a CPU, a step may take half a minute.
            fewest = 18 if on_gpu else 4 if sum(timed) < 4 * TRIAL_S else 2
            if len(timed) >= fewest and sum(timed) > TRIAL_S:
                break
    trainer.requests.wait()  # for the exchange that is pending
    return statistics.median(timed[1:] or timed)  # the first step allocates and loads
