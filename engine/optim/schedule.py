"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

import torch

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def learning_rate_factor(step: int, total_steps: int, config) -> float:
    """The factor on the peak learning rate at `step` (0-based) of `total_steps`.

    `config` has `schedule`, `warmup_steps`, `min_lr_ratio` and `cooldown_ratio` (see `OptimizerConfig`).
    The factor rises linearly over `warmup_steps` (at most the run), and then

    - `constant`: stays at 1;
    - `linear`: falls in a straight line to `min_lr_ratio`;
    - `cosine`: falls along half a cosine to `min_lr_ratio` (Loshchilov and Hutter, SGDR, 2017);
    - `wsd`: stays at 1, then falls in a straight line over the last `cooldown_ratio` of all steps
      (warm-up, stable, decay: Hu et al., MiniCPM, 2024).
    """
    warmup_steps = min(config.warmup_steps, total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    start = warmup_steps
    if config.schedule == "wsd":
        start = max(start, total_steps - round(config.cooldown_ratio * total_steps))
    progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
    if config.schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 + (config.min_lr_ratio - 1.0) * progress


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
