"""Trial: times a few training steps on this machine, and tells how much of the time limit is left."""

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.machine import hardware
from engine.parallel import distributed
from engine.parallel.distributed import World
from engine.run import memory
from engine.sizing.draft import DROPOUT, NO_NGRAMS, Draft

TRIAL_S = 1.2  # seconds of steps to time, more than the `PERIOD` of engine/machine/threads.py
# For fields that are chosen after the trial.
PROVISIONAL = {
    **dict.fromkeys(DROPOUT, 0.0), **NO_NGRAMS, "optimizer.weight_decay": 0.2, "optimizer.learning_rate": 8e-3,
}  # fmt: skip


class Trial:
    """Times steps on `text`. `make_trainer(config, split)` makes the Trainer to time; `deadline` is the end of the time
    limit, as `time.monotonic()` gives it.
    """

    def __init__(self, text: Any, world: World, deadline: float, make_trainer: Callable[[Any, Any], Any]):
        self.text, self.world, self.deadline, self.make_trainer = text, world, deadline, make_trainer
        self.has_warned = False

    def seconds_left(self) -> float:
        """Seconds to the deadline, the minimum over ranks."""
        return min(distributed.all_gather(self.deadline - time.monotonic(), self.world))

    def seconds_per_step(self, draft: Draft) -> float:
        """Seconds per training step of `draft`."""
        draft = copy.deepcopy(draft)
        draft.fill(PROVISIONAL)
        config = draft.config
        config.model = sized_model(config)
        self.warn_if_short(config)
        config.trainer.max_steps, config.trainer.max_epochs = 30, None
        step_s = time_steps(self.make_trainer(config, self.text.with_config(config.data).split()))
        hardware.free_unused(self.world.device)  # only garbage collection frees a Trainer
        return step_s

    def warn_if_short(self, config: Any) -> None:
        """Warns, once, if this host has too little memory for `config`."""
        if not self.has_warned:
            self.has_warned = memory.warn_if_short(config.model, config.trainer, self.world)


def sized_model(config: Any) -> Any:
    """`config.model` as a checked `GPTConfig`, with the block size of `config.data`. Raises `UserError`."""
    block_size = config.data.block_size
    return dataclasses.replace(config.model, model_type=None, block_size=block_size)


def time_steps(trainer: Any) -> float:
    """Median time of a training step, seconds, on the slowest rank, over about `TRIAL_S` seconds or all remaining
    steps; on a busy machine, of the steps with fewer threads. Updates the model.
    """
    on_gpu = trainer.world.device.type == "cuda"
    threads = torch.get_num_threads()
    timed: list[float] = []  # seconds of each step with so many threads
    with contextlib.closing(trainer.steps()) as steps:
        last = time.perf_counter()
        for loss, _ in steps:
            loss.item()  # waits for the device
            before, last = last, time.perf_counter()
            seconds = max(distributed.all_gather(last - before, trainer.world))
            current = torch.get_num_threads()
            if current < threads:
                threads, timed = current, []
            if current == threads:
                timed.append(seconds)
            # The first steps capture and check the CUDA graph. On a CPU, a step may take half a minute.
            fewest = 18 if on_gpu else 4 if sum(timed) < 4 * TRIAL_S else 2
            if len(timed) >= fewest and sum(timed) > TRIAL_S:
                break
    trainer.requests.wait()  # for the exchange that the interrupted loop has pending
    return statistics.median(timed[1:] or timed)  # the first step allocates and loads
