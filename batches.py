"""The batches of a run: which windows a process takes at each step, and the processes that prepare
them.
"""

import contextlib
import multiprocessing.connection
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import signals
from char_dataset import window_order
from distributed import World

ORDER_STEPS = 64  # steps whose windows are looked up at once: a look-up costs much the same for all


class MicroBatches(Dataset):
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
        self.block, self.order = -1, np.empty(0, np.int64)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, i = divmod(k, self.accumulation)
        block, step = divmod(step, ORDER_STEPS)
        if block != self.block:
            positions = (
                np.arange(ORDER_STEPS * self.batch_size) + block * ORDER_STEPS * self.batch_size
            )
            self.block = block
            self.order = window_order(
                positions, len(self.dataset), self.seed, stride=self.dataset.block_size
            )
        size = self.share // self.accumulation
        first = step * self.batch_size + self.offset + i * size
        return self.dataset.batch(self.order[first : first + size])


class Batches:
    """Micro-batches `first` to `last` (excluded) of `source`, one after the other: an iterator of
    `(x, y)`.

    With `workers` processes they are prepared ahead, else when they are asked for. `pinned` puts
    them where a GPU can fetch them from by itself.
    """

    def __init__(self, source: MicroBatches, first: int, last: int, workers: int, pinned: bool):
        # Signals wait until the processes, if any, ignore them.
        with signals.held_back(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # so many processes
            loader = DataLoader(
                source,
                batch_size=None,
                sampler=range(first, last),
                num_workers=workers,
                worker_init_fn=_start_worker,
                pin_memory=pinned,
                generator=torch.Generator(),  # or the iterator would draw from the global one
            )
            self._iterator: Any = iter(loader)  # torch's, which has no public type

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return next(self._iterator)

    def lost_a_process(self) -> bool:
        """Whether an error came from the death of a process that prepares batches: as an error of
        torch's, which a signal raises at any moment, or as a broken connection before that.
        """
        ends = [worker.sentinel for worker in getattr(self._iterator, "_workers", ())]
        try:
            return bool(multiprocessing.connection.wait(ends, timeout=1 if ends else 0))
        except RuntimeError:  # the signal
            return True

    def close(self) -> None:
        """Ends the processes: the interpreter would wait for them, who do not hear its SIGTERM."""
        if hasattr(self._iterator, "_shutdown_workers"):
            # One that has died may be noticed only here: torch raises, and ends the others.
            with contextlib.suppress(RuntimeError):
                self._iterator._shutdown_workers()


def _start_worker(_: int) -> None:
    signals.ignore()  # one to the whole process group is for the trainer; its loaders go with it
    torch.set_num_threads(1)
