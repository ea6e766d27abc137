"""Plan: the batch arithmetic of a run, and the steps at which evaluations and saves are due."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from engine.config.schema import TrainerConfig
from engine.errors import UserError

MicroBatch = tuple[torch.Tensor, torch.Tensor, float]  # x, y, and the weight of its loss


def planned_steps(config: TrainerConfig, windows: int) -> float:
    """The optimizer steps of a `TrainerConfig`, with `windows` windows per epoch: `max_steps` or `max_epochs`,
    whichever comes first; infinite without both.
    """
    epochs = math.inf
    if config.max_epochs is not None:
        assert config.batch_size is not None
        epochs = -(-config.max_epochs * windows // config.batch_size)
    return min(config.max_steps or math.inf, epochs)


@dataclass(frozen=True)
class Plan:
    """The batch arithmetic of a run."""

    windows: int  # training windows of an epoch
    block_size: int  # characters of a window
    batch_size: int  # windows per optimizer step, over all ranks
    world_size: int  # ranks
    accumulation: int  # micro-batches per rank and step
    total_steps: int  # optimizer steps of the whole run

    @classmethod
    def make(cls, config: TrainerConfig, windows: int, block_size: int, world_size: int) -> "Plan":
        """The plan of a `TrainerConfig`. Micro-batches are as few as `micro_batch_size` allows; the run ends at
        `max_steps` or `max_epochs`, whichever comes first. Raises `UserError` for fewer windows than ranks.
        """
        if config.max_steps is None and (config.max_minutes or config.max_epochs is None):
            raise UserError(
                f"trainer.max_minutes={config.max_minutes}: main.py turns it into steps; give the Trainer max_steps"
            )
        if config.batch_size is None:
            raise UserError("trainer.batch_size=null: main.py chooses it; give a number")
        if config.batch_size < world_size:
            raise UserError(
                f"trainer.batch_size={config.batch_size}: must be at least the number of processes, {world_size}"
            )
        total_steps = int(planned_steps(config, windows))
        plan = cls(windows, block_size, config.batch_size, world_size, 1, total_steps)
        return plan.with_micro_batch(config.micro_batch_size or config.batch_size)

    def with_micro_batch(self, limit: int) -> "Plan":
        """The same steps in as few micro-batches of at most `limit` windows as possible. Prefers equal sizes, one shape
        for compiled code, unless that needs twice as many.
        """
        fewest = -(-self.batch_size // (self.world_size * limit))
        equal = (n for n in range(fewest, 2 * fewest) if self.batch_size % (self.world_size * n) == 0)
        return dataclasses.replace(self, accumulation=next(equal, fewest))

    @property
    def micro_batch_size(self) -> int:
        """Windows of a rank and forward pass, at most."""
        return -(-self.batch_size // (self.world_size * self.accumulation))

    @property
    def max_eval_windows(self) -> int | None:
        """Windows of a forward pass in evaluation, at most: the micro-batch if memory limits it, or None."""
        return self.micro_batch_size if self.accumulation > 1 else None

    @property
    def step_characters(self) -> int:
        """Characters of a step."""
        return self.batch_size * self.block_size

    @property
    def passes(self) -> float:
        """Passes of the whole run over the training text."""
        return self.total_steps * self.step_characters / (self.windows + self.block_size)

    @property
    def first_position(self) -> int:
        """Position of the first window in the stream of windows. The run ends with the last window of the epoch whose
        number is `total_steps`, so with a whole pass over the text: one that ends within a pass has a higher loss
        (benchmarks/experiments.md). With another number of steps, as of a run that is extended, it takes other windows.
        A run shorter than a pass starts at 0; extended, it takes the windows that follow.
        """
        taken = self.windows_seen(self.total_steps)
        epoch = self.total_steps % 2**20  # the position has to fit into 64 bits
        return epoch * self.windows - taken if taken * self.block_size >= self.windows else 0

    def windows_seen(self, step: int) -> int:
        return step * self.batch_size

    def epoch(self, step: int) -> float:
        return self.windows_seen(step) / self.windows

    def finished_epochs(self, step: int) -> int:
        return self.windows_seen(step) // self.windows

    def is_due(self, step: int, every_steps: int | None, every_epochs: int | None) -> bool:
        """Whether an interval of `every_steps` steps or `every_epochs` epochs ends at `step`, which may end several
        epochs.
        """
        if every_steps and step % every_steps == 0:
            return True
        now, before = self.finished_epochs(step), self.finished_epochs(step - 1)
        return every_epochs is not None and now // every_epochs > before // every_epochs
