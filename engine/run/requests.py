"""Requests to save or to stop, agreed by all ranks."""

import torch
import torch.distributed as dist

from engine.parallel.distributed import World
from engine.signals import Request, Requests, Stopped


class AgreedRequests(Requests):
    """Context manager that records signals as requests, on which all ranks agree: a `check` acts on the
    all-reduce (MAX) that the one before began, so that no step waits.

    Attributes:
        save: whether a save was requested.
    """

    def __init__(self, world: World):
        super().__init__()
        self.world, self.save = world, False
        self._highest = torch.zeros((), dtype=torch.int64)  # on the CPU: no wait for a GPU
        self._work: dist.Work | None = None

    def check(self) -> None:
        """Notes a request to save; raises `Stopped` on every rank at the same point of the run if one
        of them was asked to stop. Every rank must call it equally often.
        """
        own = agreed = self.take()
        if self.world.size > 1:
            agreed = self.finish()
            self._highest.fill_(own)
            self._work = dist.all_reduce(self._highest, dist.ReduceOp.MAX, async_op=True)
        if agreed > Request.SAVE:
            raise Stopped(agreed)
        self.save = self.save or agreed == Request.SAVE

    def finish(self) -> Request:
        """Ends the agreement in progress; returns its result."""
        if self._work is None:
            return Request.NOTHING
        self._work.wait()
        self._work = None
        return Request(int(self._highest))
