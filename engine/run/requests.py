"""Requests to save or to stop, agreed by all ranks."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine import portable
from engine.parallel import distributed
from engine.signals import REQUESTS, SAVE, TIMED_SAVE, Stopped


class Requests:
    """Context manager that records signals as requests, on which all ranks agree. Asynchronous: each `check` reads
    the all-reduce (MAX) that the previous one started, and starts the next. A second SIGINT ends the process at once.
    Rank 0 also requests a save if `is_time()`. Its `share()` of the time limit is agreed on in the same exchange.

    Signals that are ignored (under nohup, in a shell's background) stay ignored, except SIGUSR1. Outside the
    main thread, where Python allows no handlers, nothing changes.
    """

    def __init__(self, is_time: Callable[[], bool] = lambda: False, share: Callable[[], float] = lambda: 0.0):
        self.is_time, self.own_share = is_time, share
        self.save = 0  # SAVE or TIMED_SAVE if one was requested
        self.share = share()  # of the time limit, as agreed
        self._is_last_save = False
        self.served = 0  # the request that has stopped the run
        self._own: set[int] = set()
        self._handlers: dict = {}
        # The request, and the share in billionths. On the CPU: no wait for a GPU.
        self._highest = torch.zeros(2, dtype=torch.int64)
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
        self._own, self._handlers, self._is_last_save = set(), {}, False

    def _record(self, number: int, _) -> None:
        self._own.add(REQUESTS.index(signal.Signals(number).name))
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it also ends a process stuck outside Python
            if distributed.is_rank_0() and not self._is_last_save:  # a micro-batch may take long
                # Not by the log: the signal may have interrupted it in the middle of a line.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping: will save after the current micro-batch\n")

    def take(self) -> int:
        """The highest request to this process; returns a request to save only once."""
        highest = max(self._own, default=0)
        if highest == SAVE:
            self._own.discard(SAVE)  # only this one: a signal may arrive meanwhile
        if not highest and not self.save and distributed.is_rank_0() and self.is_time():
            return TIMED_SAVE
        return highest

    def begin_last_save(self) -> None:
        """From now on a signal ends the wait for the last save (`gives_up`); SIGINT ends the process at the second. One
        that has stopped the run does not; one that came as the run ended, does.
        """
        self.wait()
        self._own, self._is_last_save = self._own - {self.served}, True
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, self._record)

    def gives_up(self, seconds: float) -> bool:
        """Waits so many seconds; returns whether a signal to any rank ended that."""
        end = time.monotonic() + seconds
        while True:
            stops, ends = zip(*distributed.all_gather((self.take() > SAVE, time.monotonic() >= end)), strict=True)
            if any(stops) or ends[0]:
                return any(stops)
            time.sleep(0.1)

    def check(self) -> None:
        """Records a request to save. Raises `Stopped` on every rank at the same point if any was asked to stop. All
        ranks must call it equally often.
        """
        if distributed.size() == 1:
            agreed, self.share = self.take(), self.own_share()
        else:
            agreed = self.wait()
        if agreed > SAVE:
            self.served = agreed
            raise Stopped(agreed)
        self.save = max(self.save, agreed)
        if distributed.size() > 1:
            share = self.own_share() if distributed.is_rank_0() else 0.0
            self._highest.copy_(torch.tensor([self.take(), round(1e9 * share)]))
            self._work = dist.all_reduce(self._highest, dist.ReduceOp.MAX, distributed.gloo(), async_op=True)

    def wait(self) -> int:
        """Waits for the pending all-reduce; returns the request in its result."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        request, share = self._highest.tolist()
        self.share = share / 1e9
        return request
