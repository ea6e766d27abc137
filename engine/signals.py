"""Signals as requests: SIGUSR1 saves; SIGHUP, SIGTERM, SIGUSR2 and SIGINT save and stop.

A signal reaches one process, at any moment. The trainer takes requests between micro-batches, where
all ranks agree on the highest one.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from enum import IntEnum

from engine import portable

started = time.monotonic()  # when the program started: this is the first module that it imports


class Request(IntEnum):
    """What a run is asked to do; of several requests, the highest counts."""

    NOTHING = 0
    SAVE = 1  # SIGUSR1
    HANG_UP = 2  # SIGHUP: the terminal was closed
    TERMINATE = 3  # SIGTERM
    YIELD = 4  # SIGUSR2: a cluster job's time is nearly up; above SIGTERM, which SLURM sends next
    INTERRUPT = 5  # SIGINT


NAMES = {
    "SIGUSR1": Request.SAVE,
    "SIGHUP": Request.HANG_UP,
    "SIGTERM": Request.TERMINATE,
    "SIGUSR2": Request.YIELD,
    "SIGINT": Request.INTERRUPT,
}
SIGNALS = {number: NAMES[number.name] for number in portable.signals(*NAMES)}


class Stopped(Exception):
    """Training stopped as requested, after saving. `status` is the shell's, 128 + the signal."""

    def __init__(self, request: Request):
        number = next(number for number, meant in SIGNALS.items() if meant == request)
        super().__init__(f"stopped by {number.name}")
        self.name, self.status = number.name, 128 + number


class Requests:
    """Context manager that records signals as requests; a second SIGINT ends the process at once.

    Signals that are ignored (under nohup, in a shell's background) stay ignored, except SIGUSR1.
    Outside the main thread, where Python allows no handlers, nothing changes.
    """

    def __init__(self):
        self._requested: set[Request] = set()
        self._handlers: dict = {}

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if SIGNALS[number] == Request.SAVE or not ignored:
                    self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._requested, self._handlers = set(), {}

    def _record(self, number: int, _) -> None:
        self._requested.add(SIGNALS[signal.Signals(number)])
        if number == signal.SIGINT:  # the default handler also ends a process stuck outside Python
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take(self) -> Request:
        """The highest request so far; a request to save is returned once."""
        highest = max(self._requested, default=Request.NOTHING)
        if highest == Request.SAVE:
            self._requested.discard(highest)
        return highest


def prepare() -> None:
    """Before the imports, which take seconds: SIGUSR1 is ignored, with nothing to save yet, and SIGINT
    ends the process without a traceback until `interruptible`.

    On Linux a worker of torchrun also gets SIGTERM when torchrun dies; it would otherwise train on
    and hold the run directory. (If torchrun died before this, the rendezvous fails.)
    """
    for number in portable.signals("SIGUSR1"):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def interruptible() -> None:
    """SIGINT raises KeyboardInterrupt again, unless it was ignored before `prepare`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
