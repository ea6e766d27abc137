"""Evaluation: its schedule, and the exact held-out loss, the same for any world size."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from engine.errors import UserError
from engine.kernels import execution
from engine.parallel import distributed
from engine.parallel.distributed import World
from engine.run.plan import Plan

EVAL_CHARACTERS = {"cpu": 8192, "cuda": 32768}  # per rank and forward pass; other devices: cpu
MIN_STEPS_FOR_HALFWAY = 20  # the fewest steps of a run that is also evaluated halfway


class Evaluation(NamedTuple):
    """The result of `evaluate`."""

    loss: float  # nats per character, over all ranks
    characters: int  # characters scored
    rank_losses: list[float | None]  # of each rank; None if it had no window


@dataclass
class Evaluations:
    """Evaluation schedule of a `TrainerConfig`: every `eval_every_steps` steps (by default every epoch), at the last
    step, halfway if the last would be the only one, and before the first if `is_pretrained`; never unless
    `has_dataset`. Early stopping: `patience_is_over` after `patience` evaluations in a row without a lower loss.
    """

    plan: Plan
    config: Any
    has_dataset: bool
    is_pretrained: bool
    last: tuple[float, int] | None = None  # (held-out loss, step) of the newest evaluation
    since_best: int = 0  # evaluations since the one with the lowest loss

    def __post_init__(self):
        if self.config.patience is not None and not self.has_dataset:
            raise UserError(f"trainer.patience={self.config.patience}: there is nothing to evaluate")

    @property
    def interval(self) -> int:
        """Steps between evaluations: `eval_every_steps`, or an epoch."""
        return self.config.eval_every_steps or -(-self.plan.windows // self.plan.batch_size)

    @property
    def last_loss(self) -> float | None:
        return self.last[0] if self.last else None

    def is_done(self, step: int) -> bool:
        """Whether `step` has been evaluated."""
        return self.last is not None and self.last[1] == step

    def is_best(self, step: int) -> bool:
        """Whether `step` has been evaluated, with the lowest loss so far."""
        return self.is_done(step) and self.since_best == 0

    def is_due(self, step: int) -> bool:
        """Whether `step` must still be evaluated."""
        if not self.has_dataset or self.is_done(step):
            return False
        if step == 0:
            return self.is_pretrained
        plan, total, every_steps = self.plan, self.plan.total_steps, self.config.eval_every_steps
        # One point does not show whether a run learns.
        last_step = self.last[1] if self.last else 0
        is_halfway = self.interval >= total >= MIN_STEPS_FOR_HALFWAY and last_step < total // 2 <= step
        every_epochs = None if every_steps else 1
        return step == total or is_halfway or plan.is_due(step, every_steps, every_epochs)

    def record(self, step: int, loss: float, best: tuple[float, int] | None) -> None:
        """Records the held-out loss of `step`; `best`: the lowest one before, and its step."""
        self.last = (loss, step)
        self.since_best = 0 if best is None or loss < best[0] else self.since_best + 1

    def patience_is_over(self, step: int) -> bool:
        """Whether `step` has been evaluated, and was the last of `patience` evaluations without a lower loss."""
        return self.is_done(step) and self.since_best >= (self.config.patience or math.inf)


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Any, world: World, check_requests: Callable[[], None], max_windows: int | None = None
) -> Evaluation:
    """The held-out loss, exact: every character of `dataset` but the first is scored once, in
    non-overlapping windows, which the ranks share. Up to rounding it depends neither on the world size nor on the batch
    size. A forward pass has at most `max_windows` windows. `check_requests()` is called before each batch, equally
    often on every rank, and may raise.
    """
    first = dataset.num_eval_windows * world.rank // world.size
    last = dataset.num_eval_windows * (world.rank + 1) // world.size
    most = -(-dataset.num_eval_windows // world.size)  # of any rank
    size = max(1, EVAL_CHARACTERS.get(world.device.type, EVAL_CHARACTERS["cpu"]) // dataset.block_size)
    size = min(size, max_windows or size)
    losses, counts = [], []
    with execution.evaluating(model):
        for start in range(first, first + most, size):
            check_requests()
            # Ranks without windows still run a forward pass, because FSDP's all-gather is collective.
            end = min(start + size, last)
            x, y = dataset.eval_windows(*((start, end) if start < end else (0, 1)))
            loss = model(x.to(world.device), y.to(world.device))[1]
            if start < end:
                losses.append(loss)
                scored_to = min(end * dataset.block_size, len(dataset.data) - 1)
                counts.append(scored_to - start * dataset.block_size)
    # Summed in Python's floats: not every device has float64.
    means = torch.stack(losses).tolist() if losses else []
    total = sum(mean * count for mean, count in zip(means, counts, strict=True))
    results = distributed.all_gather((total, sum(counts)), world)
    characters = sum(count for _, count in results)
    rank_losses = [loss / count if count else None for loss, count in results]
    return Evaluation(sum(loss for loss, _ in results) / characters, characters, rank_losses)
