"""Divergence check: ends a run whose gradients are no longer finite."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import UserError
from engine.parallel.distributed import World
from engine.run.training_log import TrainingLog

MIN_SCALE = 2.0**-20  # a GradScaler halves its scale at each overflow


@dataclass
class DivergenceCheck:
    """Notes the first step whose gradient norm is not finite, on the device, so that no step waits for it; `check`
    reads it. The norm is that over all ranks, so that all come to the same result.
    """

    world: World
    scaler: torch.amp.GradScaler  # skips steps that overflow in float16: no divergence
    learning_rate: Callable[[int], float]  # of a step, for the error
    log: TrainingLog  # records the divergence in the metrics

    def __post_init__(self):
        # Step, this rank's loss and gradient norm of the first bad step; step -1 for none.
        self.bad = torch.full((3,), -1.0, device=self.world.device)

    def record(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Notes the loss and the gradient norm of `step`, scalars on the device."""
        now = torch.stack((torch.full_like(loss, step), loss, grad_norm))
        is_first = ~grad_norm.isfinite() & (self.bad[0] < 0)
        self.bad = torch.where(is_first, now, self.bad)

    def check(self, step: int) -> None:
        """Raises `UserError` on every rank if a gradient norm up to `step` was not finite; with float16, whose scaler
        skips such steps, if its scale has become too small. Waits for the device.
        """
        if self.scaler.is_enabled():
            if self.scaler.get_scale() < MIN_SCALE:
                raise self.error(step, "float16 gradients overflow at any scale")
            return
        first, loss, norm = self.bad.tolist()
        if first >= 0:
            raise self.error(int(first), f"loss {loss:g}, gradient norm {norm:g}", loss, norm)

    def error(
        self, step: int, what: str, loss: float = math.nan, grad_norm: float = math.nan
    ) -> UserError:
        """The error of a run that diverged at `step`, also recorded in its metrics."""
        what += f" at learning rate {self.learning_rate(step - 1):.3g}"
        self.log.log_divergence(step, loss, grad_norm, what)
        return UserError(
            f"step {step}: {what}: training has diverged; lower optimizer.learning_rate or raise "
            "optimizer.warmup_steps; the snapshots saved before stay"
        )
