"""State: what a run has done and decided so far."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class State:
    """The training loop advances it, a snapshot holds a copy, and a run resumes from that. Something new to resume is
    one more field: a plain type, whose default is right for older snapshots.
    """

    # fmt: off
    step: int = 0  # optimizer steps taken
    progress: float = 0.0  # from 0 to 1: of the steps or of the time limit, whichever is further
    seconds: float = 0.0  # of training, over all starts, without start-ups
    limit_s: float | None = None  # `seconds` at which a time limit ends the run; None: there is none, or not yet
    minutes: float | None = None  # the `trainer.max_minutes` that `limit_s` is for
    loss: float | None = None  # newest held-out loss, nats per character
    loss_step: int | None = None  # and its step
    since_best: int = 0  # evaluations since the one with the lowest loss
    best_loss: float | None = None  # lowest held-out loss that has a snapshot
    best_step: int | None = None  # and its step
    metrics_lines: int = 0  # lines of metrics.jsonl
    choices: dict[str, Any] = field(default_factory=dict)  # what the `auto` settings became: see `Precision`
    micro_batch_size: int | None = None  # windows of each process and pass, as chosen for its memory
    # fmt: on

    @property
    def is_evaluated(self) -> bool:
        """Whether this step has been evaluated."""
        return self.loss_step == self.step

    @property
    def is_best(self) -> bool:
        """Whether this step has been evaluated, with the lowest loss so far."""
        return self.is_evaluated and self.since_best == 0

    def record(self, loss: float) -> None:
        """Records the held-out loss of this step."""
        self.loss, self.loss_step = loss, self.step
        self.since_best = 0 if self.best_loss is None or loss < self.best_loss else self.since_best + 1
