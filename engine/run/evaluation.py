"""Evaluation: the held-out loss, exact, and the same for any world size."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from engine.parallel import distributed
from engine.parallel.distributed import World

EVAL_CHARACTERS = {"cpu": 8192, "cuda": 32768}  # of a rank and forward pass
IGNORE = -1  # a target that is not scored; minGPT's convention


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Any, world: World, check_requests: Callable[[], None]
) -> tuple[float, int, list[float | None]]:
    """The held-out loss, exact: every character of `dataset` but the first is scored once, in windows
    laid end to end, which the ranks share.

    Returns (nats per character over all ranks, characters scored, each rank's own loss or None if it
    had no window). Up to rounding the loss depends neither on the world size nor on the batch size.
    `check_requests()` is called before each batch, equally often on every rank, and may raise.
    """
    first = dataset.num_eval_windows * world.rank // world.size
    last = dataset.num_eval_windows * (world.rank + 1) // world.size
    most = -(-dataset.num_eval_windows // world.size)  # of any rank
    size = max(1, EVAL_CHARACTERS[world.device.type] // dataset.block_size)
    total, scored = torch.zeros((), dtype=torch.float64, device=world.device), 0
    was_training = model.training
    model.eval()
    try:
        for start in range(first, first + most, size):
            check_requests()
            # A rank without windows left runs a forward pass all the same: gathering the blocks of a
            # sharded model takes every rank.
            end = min(start + size, last)
            windows = dataset.eval_windows(*((start, end) if start < end else (0, 1)))
            x, y = (z.to(world.device) for z in windows)
            loss = model(x, y)[1].double()
            if start < end:
                count = y.numel() - (int((y == IGNORE).sum()) if end == last else 0)
                total += loss * count
                scored += count
    finally:
        model.train(was_training)
    results = distributed.gather((total.item(), scored), world)
    characters = sum(count for _, count in results)
    rank_losses = [loss / count if count else None for loss, count in results]
    return sum(loss for loss, _ in results) / characters, characters, rank_losses
