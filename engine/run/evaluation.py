"""Evaluation: the exact held-out loss, the same for any number of processes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn

from engine.kernels.ops import IGNORE
from engine.parallel import distributed
from engine.precision import evaluating
from engine.run.dataset import Windows

EVAL_CHARACTERS = {"cpu": 8192, "cuda": 32768}  # per rank and forward pass; other devices: cpu


class Evaluation(NamedTuple):
    """The result of `evaluate`."""

    loss: float  # nats per character, over all ranks
    characters: int  # characters scored
    rank_losses: list[float | None]  # of each rank; None if it had no window


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Windows,
    check_requests: Callable[[], None] = lambda: None,
    max_windows: int | None = None,
) -> Evaluation:
    """The held-out loss, exact: every character of `dataset` except the first is scored, exactly once, in
    non-overlapping windows, which the ranks share. Up to rounding it depends neither on the number of ranks nor on the
    batch size. A forward pass has at most `max_windows` windows. `check_requests()` is called before each batch,
    equally often on every rank, and may raise.
    """
    rank, size = distributed.rank(), distributed.size()
    device = distributed.device()
    first = dataset.num_eval_windows * rank // size
    last = dataset.num_eval_windows * (rank + 1) // size
    most = -(-dataset.num_eval_windows // size)  # of any rank
    batch = max(1, EVAL_CHARACTERS.get(device.type, EVAL_CHARACTERS["cpu"]) // dataset.block_size)
    batch = min(batch, max_windows or batch)
    scored = []
    with evaluating(model):
        for start in range(first, first + most, batch):
            check_requests()
            # Ranks without windows still run a forward pass, because FSDP's all-gather is collective.
            end = min(start + batch, last)
            x, y = dataset.eval_windows(*((start, end) if start < end else (0, 1)))
            loss = model(x.to(device), y.to(device))[1]
            if start < end:
                scored.append((loss, (y != IGNORE).sum()))
    # Summed in Python's numbers, at the end: not every device has float64, and a number waits for the device.
    parts = [(float(loss), int(count)) for loss, count in scored]
    total = sum(loss * count for loss, count in parts)
    results = distributed.all_gather((total, sum(count for _, count in parts)))
    characters = sum(count for _, count in results)
    rank_losses = [loss / count if count else None for loss, count in results]
    return Evaluation(sum(loss for loss, _ in results) / characters, characters, rank_losses)
