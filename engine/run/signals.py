"""What the outside asks of a run: SIGTERM, SIGINT, SIGHUP and SIGUSR2 to save and stop, SIGUSR1 to
save and go on.

A signal reaches one process, at any moment; the trainer asks at moments of its own, and agrees with
the other processes on the highest request (`distributed.Agreement`).
"""

import ctypes
import os
import signal
import sys
import threading
from enum import IntEnum


class Request(IntEnum):
    """What a run is asked to do; of several, the highest counts."""

    NOTHING = 0
    SAVE = 1  # SIGUSR1
    HANG_UP = 2  # SIGHUP, the terminal is gone: save and stop
    TERMINATE = 3  # SIGTERM: save and stop
    YIELD = 4  # SIGUSR2, the time of a job is nearly up, SIGTERM will follow: save and stop
    INTERRUPT = 5  # SIGINT: save and stop
    GIVE_UP = 6  # not from outside: snapshots cannot be written


SIGNALS = {
    signal.SIGUSR1: Request.SAVE,
    signal.SIGUSR2: Request.YIELD,
    signal.SIGHUP: Request.HANG_UP,
    signal.SIGTERM: Request.TERMINATE,
    signal.SIGINT: Request.INTERRUPT,
}


class Stopped(Exception):
    """Training was asked to stop and did, its snapshot written. `status` is the exit status that
    says so: 128 and the signal's number, as shells have it.
    """

    def __init__(self, request: Request):
        number = next(n for n, asked in SIGNALS.items() if asked == request)
        super().__init__(f"stopped by {number.name}")
        self.name, self.status = number.name, 128 + number


class Requests:
    """While it is entered, signals are noted instead of ending the process.

    A second SIGINT is not: it ends the process at once. SIGHUP and SIGINT stay ignored where they
    were, under nohup or in a shell's background. Outside the main thread, where Python allows no
    handlers, nothing is changed.
    """

    def __init__(self):
        self._save, self._stop = False, Request.NOTHING
        self._before: dict = {}

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if number == signal.SIGUSR1 or not ignored:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._save, self._stop, self._before = False, Request.NOTHING, {}

    def _note(self, number: int, _) -> None:
        request = SIGNALS[signal.Signals(number)]
        if request == Request.SAVE:
            self._save = True
        else:
            self._stop = max(self._stop, request)
        if number == signal.SIGINT:
            # The kernel's own handler also ends a process that is stuck outside Python.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take(self) -> Request:
        """The highest request so far; one to save is handed out once."""
        if self._stop:
            return self._stop
        save, self._save = self._save, False
        return Request.SAVE if save else Request.NOTHING


def prepare() -> None:
    """What a process of a launcher does first, before the seconds that importing torch takes.

    There is nothing to save yet: SIGUSR1 is ignored, and SIGINT ends the process without a
    traceback, until `interruptible`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def interruptible() -> None:
    """SIGINT raises KeyboardInterrupt again, if it did before `prepare`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its launcher dies (Linux; elsewhere nothing
    happens).

    Without it, the workers of a killed torchrun train on and hold the run directory.
    """
    if not sys.platform.startswith("linux"):
        return
    PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # If it died before, another process has taken its place, which is neither a Python program, as
    # launchers are, nor one that a launcher started to wrap this one.
    parent = f"/proc/{os.getppid()}"
    try:
        is_python = os.path.basename(os.readlink(f"{parent}/exe")).startswith("python")
        with open(f"{parent}/environ", "rb") as file:
            is_wrapper = b"TORCHELASTIC_RUN_ID=" in file.read()
    except OSError:
        return
    if not (is_python or is_wrapper):
        os.kill(os.getpid(), signal.SIGTERM)
