"""The optimizer: which parameters decay, which go to Muon, and Muon itself.

optimizer = create_optimizer(model, OptimizerConfig(name="muon"))
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError
from engine.machine import hardware
from engine.optim.schedule import SCHEDULES
from engine.parallel import sharding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial: steepest at zero
ITERATIONS = 5


@dataclass
class OptimizerConfig:
    """How the weights are learned; the fields are explained in `conf/optimizer/`."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    normalize: bool = False
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    cooldown_ratio: float = 0.4

    def __post_init__(self):
        if self.name not in ("adamw", "muon"):
            raise UserError(f"optimizer.name={self.name}: must be adamw or muon")
        if self.schedule not in SCHEDULES:
            raise UserError(
                f"optimizer.schedule={self.schedule}: must be one of {', '.join(SCHEDULES)}"
            )
        if not 0 < self.learning_rate <= 1e38:  # what float32 holds
            raise UserError(
                f"optimizer.learning_rate={self.learning_rate}: must be above 0, at most 1e38"
            )
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"optimizer.{name}={getattr(self, name)}: must be at least 0 and below 1"
                )
        for name in ("min_lr_ratio", "cooldown_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)}: must lie between 0 and 1")
        if not 0 <= self.weight_decay <= 1000:
            raise UserError(
                f"optimizer.weight_decay={self.weight_decay}: must lie between 0 and 1000"
            )
        if self.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps={self.warmup_steps}: must not be negative")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> dict[str, list[nn.Parameter]]:
    """Every trainable parameter once, in one of `hidden`, `decay` and `no_decay`.

    `hidden`: the matrices inside the blocks, which Muon takes over where it is asked for. `decay`:
    the head (tied to the embedding or not), and the embeddings where `decay_embeddings` says so
    (nanoGPT does, minGPT does not). `no_decay`: biases, norms, shifts, and else the embeddings.
    `model` may be wrapped, in DDP say: only the names of its parameters count.
    """
    groups: dict[str, list[nn.Parameter]] = {"hidden": [], "decay": [], "no_decay": []}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
            groups["no_decay"].append(parameter)
        elif ".blocks." in f".{name}":
            groups["hidden"].append(parameter)
        elif id(parameter) in linear or config.decay_embeddings:
            groups["decay"].append(parameter)
        else:
            groups["no_decay"].append(parameter)
    return groups


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """For each of (N, R, C) matrices one near U V' of its singular value decomposition, by a
    Newton-Schulz iteration, whose singular values end between about 0.7 and 1.2: in bfloat16 where
    the hardware computes in it.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)  # lie down: the smaller of the two products
    x = matrices.mT if tall else matrices
    if hardware.computes_in_bfloat16(x.device):
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def equalize(matrices: torch.Tensor) -> torch.Tensor:
    """`orthogonalize`, after which the rows of a tall matrix, or the columns of a wide one, are
    made as large as each other; together they are as large as an orthogonal matrix.

    NorMuon (Li et al., 2025) without its running mean of their sizes, which brought nothing here
    (benchmarks/experiments.md).
    """
    x = orthogonalize(matrices)
    rows, columns = x.shape[1:]
    size = (min(rows, columns) / max(rows, columns)) ** 0.5
    norm = x.norm(dim=2 if rows >= columns else 1, keepdim=True, dtype=torch.float32)
    return x * (size / norm.clamp(min=1e-7)).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov's) made orthogonal, with `normalize` equalized too, and decoupled weight
    decay.

    Updates are scaled to the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training",
    2025), so that both can share a learning rate. Raises ValueError for what is not a matrix.
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
        super().__init__(parameters, {**defaults, "normalize": normalize})

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() != 2:
                raise ValueError(f"Muon is for matrices, not for a shape of {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure()` does, if it is given."""
        with torch.enable_grad():
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

            shape_up = equalize if group["normalize"] else orthogonalize
            same_shape = defaultdict(list)
            for p, update in zip(parameters, updates, strict=True):
                same_shape[p.shape].append((p, update))
            for shape, pairs in same_shape.items():
                batch = torch.stack([update for _, update in pairs])
                result = sharding.map_matrices(shape_up, batch)
                size = 0.2 * max(shape) ** 0.5
                torch._foreach_add_([p for p, _ in pairs], [*result], alpha=-group["lr"] * size)
        return loss


class AdamW(torch.optim.AdamW):
    """torch's, without the import of torch._dynamo that comes with the first step: one to three
    seconds of every start, for what is never compiled here.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure()` does, if it is given."""
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    # At their first call torch wraps these in `torch._dynamo.disable`, for which it imports
    # torch._dynamo, unless this attribute has the result already (torch/_compile.py). A later torch
    # that ignores it costs those seconds again, and nothing else.
    _plain = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    setattr(_plain, "__dynamo_disable", _plain)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for one list of matrices and torch's AdamW for other parameter groups, as one optimizer.

    One optimizer means one `step` for a `GradScaler` to skip and one state to save.
    """

    def __init__(self, matrices: list[nn.Parameter], groups: list[dict], muon: dict, adamw: dict):
        self.parts = (
            Muon(matrices, **muon),
            AdamW(groups, **adamw),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "parts": self.parts}  # for copies

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns what `closure()` does, if it is given."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        # Theirs is what is here: loading a state or adding a group replaces it.
        for part, groups in zip(
            self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True
        ):
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), or Muon (Jordan et al., 2024) for the hidden matrices
    and AdamW for the rest.

    Weight decay is decoupled and applies to `hidden` and `decay` of `parameter_groups`. Each
    group's peak learning rate is its `initial_lr`; the trainer multiplies it by the schedule.
    """
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "fused": True}
    rest: list[dict[str, Any]] = [
        {"params": groups["decay"], "weight_decay": config.weight_decay},
        {"params": groups["no_decay"], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if config.name == "muon":
        muon = {
            "lr": config.learning_rate,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
            "normalize": config.normalize,
        }
        optimizer = MuonWithAdamW(groups["hidden"], [g for g in rest if g["params"]], muon, adamw)
    else:
        rest[0]["params"] = groups["hidden"] + rest[0]["params"]
        optimizer = AdamW([g for g in rest if g["params"]], **adamw)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return optimizer
