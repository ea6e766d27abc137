"""Requests to save or to stop, agreed by all ranks."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine import portable
from engine.parallel.distributed import World
from engine.signals import REQUESTS, SAVE, TIMED_SAVE, Stopped


class Requests:
    """Context manager that records signals as requests, on which all ranks agree. Asynchronous: each `check` reads
    the all-reduce (MAX) that the previous one started, and starts the next. A second SIGINT ends the process at once.
    Rank 0 also requests a save once `save_every_minutes` have passed since the last `saved`, unless `is_saving()`.

    Signals that are ignored (under nohup, in a shell's background) stay ignored, except SIGUSR1. Outside the
    main thread, where Python allows no handlers, nothing changes.
    """

    def __init__(
        self, world: World, save_every_minutes: float | None = None, is_saving: Callable[[], bool] = lambda: False
    ):
        self.world, self.is_saving = world, is_saving
        self.save = 0  # SAVE or TIMED_SAVE if one was requested
        self.save_interval_s = math.inf if save_every_minutes is None else 60 * save_every_minutes
        self._save_at = time.monotonic() + self.save_interval_s
        self._own: set[int] = set()
        self._handlers: dict = {}
        self._highest = torch.zeros((), dtype=torch.int64)  # on the CPU: no wait for a GPU
        self._work: dist.Work | None = None

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for number in portable.available_signals(*REQUESTS[SAVE:]):
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if number.name == REQUESTS[SAVE] or not ignored:
                    self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._own, self._handlers = set(), {}

    def _record(self, number: int, _) -> None:
        self._own.add(REQUESTS.index(signal.Signals(number).name))
        if number == signal.SIGINT:  # the default handler also ends a process stuck outside Python
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self.world.is_rank_0:  # a micro-batch may take long
                # Not by the log: the signal may have interrupted it in the middle of a line.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping: will save after the current micro-batch\n")

    def take(self) -> int:
        """The highest request to this process; returns a request to save only once."""
        highest = max(self._own, default=0)
        if highest == SAVE:
            self._own.discard(SAVE)  # only this one: a signal may arrive meanwhile
        is_time = self.world.is_rank_0 and time.monotonic() >= self._save_at and not self.is_saving()
        if is_time and not highest:
            self._save_at = math.inf  # not again until it is saved
            return TIMED_SAVE
        return highest

    def saved(self) -> None:
        """Ends the request to save, if there is one; the next timed one comes an interval later."""
        self.save = 0
        self._save_at = time.monotonic() + self.save_interval_s

    def check(self) -> None:
        """Records a request to save. Raises `Stopped` on every rank at the same point if any was asked to stop. All
        ranks must call it equally often.
        """
        own = agreed = self.take()
        if self.world.size > 1:
            agreed = self.wait()
            self._highest.fill_(own)
            self._work = dist.all_reduce(self._highest, dist.ReduceOp.MAX, async_op=True)
        if agreed > SAVE:
            raise Stopped(agreed)
        self.save = max(self.save, agreed)

    def wait(self) -> int:
        """Waits for the pending all-reduce; returns its result."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._highest)
