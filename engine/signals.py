"""Signals as requests: SIGUSR1 saves; SIGHUP, SIGTERM, SIGUSR2 and SIGINT save and stop.

A signal reaches one process, at any moment. The trainer checks requests between micro-batches, where all ranks agree on
the highest. The clock of rank 0 also requests saves.
"""

import ctypes
import os
import signal
import sys
import time

from engine import portable

started = time.monotonic()  # when the program started: this is the first module that it imports


# By rising priority.
REQUESTS = (
    "",  # no request
    "trainer.save_every_minutes",  # save
    "SIGUSR1",  # save
    "SIGHUP",  # the terminal was closed; from here on: save, then stop
    "SIGTERM",  # the process is asked to end
    "SIGUSR2",  # the time of a cluster's job is nearly up; SLURM sends SIGTERM next
    "SIGINT",  # Ctrl-C
)
TIMED_SAVE, SAVE = 1, 2


class Stopped(Exception):
    """Training stopped as requested, after saving. `status` is the shell's, 128 + the signal."""

    def __init__(self, request: int):
        self.name = REQUESTS[request]
        self.status = 128 + getattr(signal, self.name)
        super().__init__(f"stopped by {self.name}")


def prepare() -> None:
    """Call before the imports, which take seconds: opens standard streams that are closed, ignores SIGUSR1 while there
    is nothing to save, and lets SIGINT end the process without a traceback until `interruptible`.

    On Linux a worker of torchrun also gets SIGTERM when torchrun dies; it would otherwise train on
    and hold the run directory. (If torchrun died before this, the rendezvous fails.)
    """
    portable.open_closed_streams()
    for number in portable.available_signals("SIGUSR1"):
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
