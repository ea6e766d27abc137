"""The optimizer of a run: settings, learning-rate schedule, which parameters decay, which go to Muon."""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError, check_option, check_range
from engine.optim.muon import Muon

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass
class OptimizerConfig:
    """How the weights are updated."""

    # fmt: off
    name: str = "adamw"  # adamw, or muon: Muon for the matrices inside the blocks, AdamW for the rest
    learning_rate: float | None = 3e-4  # peak learning rate; null: chosen, see engine/sizing.py
    weight_decay: float | None = 0.1  # decoupled, times the learning rate; of matrices only; null: chosen
    decay_embeddings: bool = False  # whether embedding tables decay too (nanoGPT: true, minGPT: false)
    beta1: float = 0.9  # decay of AdamW's mean of gradients, per step
    beta2: float = 0.95  # decay of AdamW's mean of squared gradients, per step
    momentum: float = 0.95  # of Muon, per step
    normalize: bool = False  # Muon: whether the rows of an update (columns, if more) are scaled to equal norms
    schedule: str = "constant"  # constant, linear, cosine or wsd, after the warm-up
    warmup_steps: int = 0  # steps over which the learning rate rises to its peak
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of the peak
    cooldown_ratio: float = 0.4  # share of all steps over which wsd falls
    # fmt: on

    def __post_init__(self):
        check_option("optimizer.name", self.name, ("adamw", "muon"))
        check_option("optimizer.schedule", self.schedule, SCHEDULES)
        check_range("optimizer.learning_rate", self.learning_rate, above=0, high=1e38)  # float32
        check_range("optimizer.weight_decay", self.weight_decay, 0, 1000)
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
    and with `decay_embeddings` to the embeddings; not to biases, norms and token shifts. `model` may be
    wrapped; only the names of its parameters count.
    """
    hidden: list[nn.Parameter] = []  # for Muon
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for name, parameter in model.named_parameters():
        in_block = ".blocks." in f".{name}"
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
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
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "fused": True}
    if config.name == "adamw":
        return AdamW(groups, **adamw)
    muon = {name: getattr(config, name) for name in ("momentum", "weight_decay", "normalize")}
    if not hidden:
        raise UserError("optimizer.name=muon: the model has no matrices in `blocks`; set adamw")
    return MuonWithAdamW(hidden, groups, {"lr": config.learning_rate, **muon}, adamw)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets each group's learning rate to `factor` times its peak, its `initial_lr` or first `lr`."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # `float` waits for a rate on the GPU
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
