"""The batches of a run: which windows a process takes at each step; threads may cut them ahead."""

import functools
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from char_dataset import window_order
from engine.parallel.distributed import World

ORDER_STEPS = 64  # steps whose windows are looked up at once: a look-up costs much the same for all


class MicroBatches:
    """Item k is this rank's k-th micro-batch of the whole run, wherever the run stands and however
    it was started.

    Step s takes positions `s * batch_size` and on from the stream of windows; the ranks share them
    in order, and each rank's share is cut into micro-batches in order.
    """

    def __init__(self, dataset: Any, seed: int, batch_size: int, accumulation: int, world: World):
        self.dataset, self.seed = dataset, seed
        self.batch_size, self.accumulation = batch_size, accumulation
        self.share = batch_size // world.size
        self.offset = world.rank * self.share

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, i = divmod(k, self.accumulation)
        block, step = divmod(step, ORDER_STEPS)
        size = self.share // self.accumulation
        first = step * self.batch_size + self.offset + i * size
        order = _order(
            block * ORDER_STEPS * self.batch_size,
            (block + 1) * ORDER_STEPS * self.batch_size,
            len(self.dataset),
            self.seed,
            self.dataset.block_size,
        )
        return self.dataset.batch(order[first : first + size])


@functools.lru_cache(maxsize=2)  # around a border, threads need both
def _order(first: int, last: int, num_windows: int, seed: int, stride: int) -> np.ndarray:
    """The windows at positions `first` to `last` (excluded) of the stream."""
    return window_order(np.arange(first, last), num_windows, seed, stride)


def prefetch(
    source: MicroBatches, first: int, last: int, workers: int, pinned: bool
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches `first` to `last` (excluded) of `source`, `(x, y)` one after the other.

    With `workers` threads they are cut ahead, two for each thread, else when they are asked for.
    `pinned` puts them where a GPU can fetch them from by itself. Close it when done: that ends the
    threads.
    """

    def cut(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = source[k]
        return (x.pin_memory(), y.pin_memory()) if pinned else (x, y)

    if not workers:
        yield from map(cut, range(first, last))
        return
    pool = ThreadPoolExecutor(workers, "batches")
    try:
        due: deque[Future[tuple[torch.Tensor, torch.Tensor]]] = deque()
        for k in range(first, last):
            due.append(pool.submit(cut, k))
            if len(due) == 2 * workers:
                yield due.popleft().result()
        while due:
            yield due.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
