"""Muon: momentum, orthogonalized (Jordan et al., 2024)."""

import functools
from collections import defaultdict
from collections.abc import Iterable

import torch

from engine.machine import hardware
from engine.parallel import sharding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, steepest at zero
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Newton-Schulz iteration: approximates U V^T for each matrix U S V^T of (N, R, C). The singular
    values lie between about 0.7 and 1.2. Computes in bfloat16 where the hardware does.

    With `normalize`, rows (columns, if there are more) are scaled to equal norms, and to the norm of an
    orthogonal matrix overall: NorMuon (Li et al., 2025) without its running mean of the norms, which
    gained nothing here (benchmarks/experiments.md).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    # Transposed, so that the Gram matrix is the smaller one.
    x = matrices.mT if is_tall else matrices
    if hardware.computes_in_bfloat16(x.device):
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    x = x.mT if is_tall else x
    if not normalize:
        return x
    rows, columns = x.shape[1:]
    size = (min(rows, columns) / max(rows, columns)) ** 0.5
    # Not `norm`: along a dimension that is not the last in memory it takes ten times as long on a CPU.
    squares = x.float().square().sum(dim=2 if rows >= columns else 1, keepdim=True)
    return x * (size * squares.clamp(min=1e-14).rsqrt()).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, with decoupled weight decay.

    Updates have the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025), so that
    both can share a learning rate. All parameters must be matrices.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        normalize: bool = False,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        # Capturable, as torch calls it: a CUDA graph may repeat `step`.
        super().__init__(parameters, {**defaults, "normalize": normalize, "capturable": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without closures
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:  # all are frozen
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum_buffer"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = gradients  # in place: they are not needed any more
            torch._foreach_lerp_(updates, momenta, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

            by_shape = defaultdict(list)  # one batch of products for all matrices of a shape
            for p, update in zip(parameters, updates, strict=True):
                by_shape[p.shape].append((p, update))
            function = functools.partial(orthogonalize, normalize=group["normalize"])
            for shape, pairs in by_shape.items():
                batch = torch.stack([update for _, update in pairs])
                result = sharding.map_matrices(function, batch)
                # Not as `alpha`, which would read the rate from the GPU, where a CUDA graph has it.
                scale = -group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_add_([p for p, _ in pairs], [*(result.float() * scale)])
