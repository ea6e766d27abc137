"""Optimizers: settings, learning-rate schedule, weight decay; AdamW, Muon (Jordan et al., 2024).

The module knows parameters by name and shape, not the model they belong to.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError, check_option, check_range
from engine.machine import hardware
from engine.parallel import sharding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, steepest at zero
ITERATIONS = 5


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and weight decay."""

    # fmt: off
    name: str = "adamw"  # adamw, or muon: Muon for the matrices inside the blocks, AdamW for the rest
    learning_rate: float | None = 3e-4  # peak learning rate; null: chosen, see docs/own-text.md
    weight_decay: float | None = 0.1  # decoupled, times learning rate; matrices only; null: chosen
    ngram_decay: float | None = 2.0  # weight decay of n-gram embeddings, which overfit; null: chosen
    decay_embeddings: bool = False  # whether embedding tables decay too (nanoGPT: true, minGPT: false)
    beta1: float = 0.9  # decay rate of AdamW's first moment estimate, per step
    beta2: float = 0.95  # decay rate of AdamW's second moment estimate, per step
    momentum: float = 0.95  # momentum of Muon, per step
    schedule: str = "constant"  # constant, linear, cosine or wsd, after the warm-up
    warmup_steps: int = 0  # steps over which the learning rate rises to its peak; at most the run
    min_lr_ratio: float = 0.0  # end of the schedule, as a share of the peak
    cooldown_ratio: float = 0.4  # share of all steps in which wsd decays
    # fmt: on

    def __post_init__(self):
        check_option("optimizer.name", self.name, ("adamw", "muon"))
        check_option("optimizer.schedule", self.schedule, ("constant", "linear", "cosine", "wsd"))
        check_range("optimizer.learning_rate", self.learning_rate, above=0, high=1e38)  # float32
        check_range("optimizer.weight_decay", self.weight_decay, 0, 1000)
        check_range("optimizer.ngram_decay", self.ngram_decay, 0, 1000)
        check_range("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2", "momentum"):
            check_range(f"optimizer.{name}", getattr(self, name), 0, below=1)
        for name in ("min_lr_ratio", "cooldown_ratio"):
            check_range(f"optimizer.{name}", getattr(self, name), 0, 1)

    def learning_rate_factor(self, step: int, total_steps: int) -> float:
        """The factor on the peak learning rate at `step` (0-based) of `total_steps`: a pure function, with nothing
        to save. It rises linearly over `warmup_steps` (at most the run), and then

        - `constant`: stays at 1;
        - `linear`: falls in a straight line to `min_lr_ratio`;
        - `cosine`: falls along half a cosine to `min_lr_ratio` (Loshchilov and Hutter, SGDR, 2017);
        - `wsd`: stays at 1, then falls in a straight line over the last `cooldown_ratio` of all steps
          (warm-up, stable, decay: Hu et al., MiniCPM, 2024).
        """
        warmup_steps = min(self.warmup_steps, total_steps)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        start = warmup_steps
        if self.schedule == "wsd":
            start = max(start, total_steps - round(self.cooldown_ratio * total_steps))
        progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
        if self.schedule == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return 1.0 + (self.min_lr_ratio - 1.0) * progress


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW; or Muon for the matrices inside the blocks, and AdamW for the rest.

    Weight decay is decoupled. It applies to the matrices inside the blocks, to the head (tied or not),
    and with `decay_embeddings` to the embeddings; not to biases, norms and token shifts. N-gram embeddings have
    `ngram_decay`. `model` may be wrapped; only the names of its parameters count.
    """
    hidden: list[nn.Parameter] = []  # for Muon
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    ngrams: list[nn.Parameter] = []
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        in_block = ".blocks." in f".{name}"
        if ".ngrams." in f".{name}":
            ngrams.append(parameter)
        elif parameter.dim() < 2:
            no_decay.append(parameter)
        elif in_block and config.name == "muon" and parameter.dim() == 2:
            hidden.append(parameter)
        elif in_block or id(parameter) in linear or config.decay_embeddings:
            decay.append(parameter)
        else:
            no_decay.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
        {"params": ngrams, "weight_decay": config.ngram_decay},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "fused": True}
    if config.name == "adamw":
        return AdamW(groups, **adamw)
    muon = {name: getattr(config, name) for name in ("momentum", "weight_decay")}
    if not hidden:
        raise UserError("optimizer.name=muon: the model has no matrices in `blocks`; set optimizer.name=adamw")
    return MuonWithAdamW(hidden, groups, {"lr": config.learning_rate, **muon}, adamw)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets each group's learning rate to `factor` times its peak: `initial_lr` or, without that, its `lr` so far."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # once: `float` waits for the GPU
            group["initial_lr"] = float(group["lr"])
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):  # which a CUDA graph reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter, 2019) without the import of torch._dynamo, which takes one to three
    seconds of every start: its `step` is not wrapped for torch.compile.
    """

    @torch.no_grad()
    def step(self, closure=None):
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    # At their first call torch wraps these in `torch._dynamo.disable`, which imports torch._dynamo,
    # unless this attribute holds the result already (torch/_compile.py). If a later torch ignores it,
    # the seconds come back, and nothing else changes.
    _plain = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    setattr(_plain, "__dynamo_disable", _plain)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration: approximates U V^T for each matrix U S V^T of (N, R, C). The singular
    values lie between about 0.7 and 1.2. Computes in bfloat16 where the hardware does.
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
    return x.mT if is_tall else x


def normalize_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Scales the rows of each matrix (columns, if there are more) to equal norms, and to the norm of an orthogonal
    matrix overall: NorMuon (Li et al., 2025) without its running mean of the norms, which gained nothing here
    (benchmarks/experiments.md).
    """
    rows, columns = matrices.shape[1:]
    norm = (min(rows, columns) / max(rows, columns)) ** 0.5  # of a row or column of an orthogonal matrix
    # Not `norm`: along a dimension that is not the last in memory it takes ten times as long on a CPU.
    squares = matrices.float().square().sum(dim=2 if rows >= columns else 1, keepdim=True)
    return matrices * (norm * squares.clamp(min=1e-14).rsqrt()).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, with equal row norms and decoupled weight decay.

    Updates have the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025), so that
    both can share a learning rate. All parameters must be matrices.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        # Capturable, as torch calls it: a CUDA graph may repeat `step`.
        super().__init__(parameters, {**defaults, "capturable": True})

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
            updates = gradients  # in place: no longer needed
            torch._foreach_lerp_(updates, momenta, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

            by_shape = defaultdict(list)  # one batch of products for all matrices of a shape
            for p, update in zip(parameters, updates, strict=True):
                by_shape[p.shape].append((p, update))
            for shape, pairs in by_shape.items():
                batch = torch.stack([update for _, update in pairs])
                result = sharding.map_matrices(lambda x: normalize_rows(orthogonalize(x)), batch)
                # Not as `alpha`, which would read the rate from the GPU, where a CUDA graph has it.
                scale = -group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_add_([p for p, _ in pairs], [*(result.float() * scale)])


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for a list of matrices and AdamW for other parameter groups, as one optimizer: one `step` for
    a `GradScaler` to skip, one state to save.
    """

    def __init__(self, matrices: list[nn.Parameter], groups: list[dict], muon: dict, adamw: dict):
        self.parts = (Muon(matrices, **muon), AdamW(groups, **adamw))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self) -> None:  # type: ignore[override]  # without closures
        # Rebind groups and state: `load_state_dict` replaces them.
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        for part in self.parts:
            part.state = self.state
            part.step()
