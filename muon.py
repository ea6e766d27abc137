"""Muon (Jordan et al., 2024), the optimizer of hidden matrices, for many small matrices at once.

    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/

`torch.optim.Muon` takes one matrix after the other, and small ones cost more to start than to
compute, on a CPU and on a GPU. Here all matrices of one shape are one batch; the rest, names
included, is as there.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial: steepest at zero
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """For each of (N, R, C) matrices, R <= C, one near U V' of its singular value decomposition,
    in bfloat16: a Newton-Schulz iteration, whose singular values end between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov's) made orthogonal, and decoupled weight decay.

    Updates are scaled to the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training",
    2025), so that both can share a learning rate. Raises ValueError for what is not a matrix.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(f"Muon is for matrices, not for a shape of {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure()` does, if it is given."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum_buffer"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

            same_shape = defaultdict(list)  # tall matrices lie down: one shape fewer
            for p, update in zip(parameters, updates, strict=True):
                tall = p.size(0) > p.size(1)
                p, update = (p.mT, update.mT) if tall else (p, update)
                same_shape[p.shape].append((p, update))
            for shape, pairs in same_shape.items():
                result = orthogonalize(torch.stack([update for _, update in pairs]))
                size = 0.2 * max(shape) ** 0.5
                for (p, _), update in zip(pairs, result, strict=True):
                    p.add_(update, alpha=-group["lr"] * size)
        return loss
