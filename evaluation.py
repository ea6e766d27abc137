"""The held-out loss: exact, and the same for any number of processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from char_dataset import IGNORE
from engine.parallel import distributed
from engine.parallel.distributed import World

EVAL_CHARACTERS = {"cpu": 8192, "cuda": 32768}  # scored at once by each process


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Any, world: World, poll: Callable[[], None]
) -> tuple[float, int, list[float | None]]:
    """The loss of `model` over every character of `dataset` but the first, each scored once, in
    windows laid end to end.

    Returns (nats per character over all ranks, characters scored, each rank's own loss; None for a
    rank that had no window). The ranks share the windows; the figure depends neither on how many
    there are nor on the batch size, but for rounding. `poll()` is called before each batch, equally
    often on every rank, and may raise.
    """
    first = dataset.num_eval_windows * world.rank // world.size
    last = dataset.num_eval_windows * (world.rank + 1) // world.size
    most = -(-dataset.num_eval_windows // world.size)  # of any rank: all poll equally often
    size = max(1, EVAL_CHARACTERS[world.device.type] // dataset.block_size)
    total, scored = torch.zeros((), dtype=torch.float64, device=world.device), 0
    was_training = model.training
    model.eval()
    try:
        for start in range(first, first + most, size):
            poll()
            # A rank without windows left still runs a forward pass: to gather the blocks of a
            # sharded model takes every rank.
            end = min(start + size, last)
            x, y = (
                z.to(world.device)
                for z in (
                    dataset.eval_windows(start, end) if start < end else dataset.eval_windows(0, 1)
                )
            )
            loss = model(x, y)[1].double()
            if start < end:
                ignored = int((y == IGNORE).sum()) if end == last else 0
                total += loss * (y.numel() - ignored)
                scored += y.numel() - ignored
    finally:
        model.train(was_training)
    results = distributed.gather((total.item(), scored), world)
    losses = [loss / count if count else None for loss, count in results]
    everything = sum(count for _, count in results)
    return sum(loss for loss, _ in results) / everything, everything, losses
