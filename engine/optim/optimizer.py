"""The optimizer of a run: which parameters decay, which go to Muon, and with what settings."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from engine.config.checks import check_option, check_range
from engine.optim.adamw import AdamW
from engine.optim.muon import MuonWithAdamW
from engine.optim.schedule import SCHEDULES


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
    return MuonWithAdamW(hidden, groups, {"lr": config.learning_rate, **muon}, adamw)
