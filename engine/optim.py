"""Optimizers: AdamW, Muon (Jordan et al., 2024), and which parameters decay.

The module knows parameters by name and shape, not the model they belong to.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from engine.config.schema import OptimizerConfig
from engine.errors import UserError
from engine.machine import hardware
from engine.parallel import distributed, sharding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, steepest at zero
ITERATIONS = 5


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW; or Muon for the matrices inside the blocks, and AdamW for the rest.

    Weight decay is decoupled. It applies to the matrices inside the blocks, to the head (tied or not),
    and with `decay_embeddings` to the embeddings; not to biases, norms and token shifts. N-gram embeddings have
    `ngram_decay`. `model` may be wrapped; only the names of its parameters count. `load_state_dict` also takes a
    snapshot's `optimizer_state`, which is by name.
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
    optimizer: torch.optim.Optimizer
    muon = {name: getattr(config, name) for name in ("momentum", "weight_decay")}
    if config.name == "adamw":
        optimizer = AdamW(groups, **adamw)
    elif hidden:
        optimizer = MuonWithAdamW(hidden, groups, {"lr": config.learning_rate, **muon}, adamw)
    else:
        raise UserError("optimizer.name=muon: the model has no matrices in `blocks`; set optimizer.name=adamw")
    in_order = parameter_names(distributed.unwrap(model), optimizer)
    optimizer.register_load_state_dict_pre_hook(functools.partial(numbered, in_order))
    return optimizer


def numbered(names: list[str], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state that torch's `load_state_dict` takes, from one by name; `names` are in the optimizer's order."""
    if "param_groups" in state:
        return state
    by_number = {i: state[name] for i, name in enumerate(names) if state.get(name)}
    return {"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]}


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state of each parameter of the unwrapped `model` that has one, by name."""
    names = parameter_names(model, optimizer)
    return {names[i]: values for i, values in optimizer.state_dict()["state"].items()}


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets each group's learning rate to `factor` times its peak: `initial_lr` or, without that, its `lr` so far.
    Returns that of the first group.
    """
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # once: `float` waits for the GPU
            group["initial_lr"] = float(group["lr"])
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):  # which a CUDA graph reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return optimizer.param_groups[0]["initial_lr"] * factor


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
