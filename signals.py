"""What the outside asks of a run: SIGTERM, SIGINT and SIGHUP to save and stop, SIGUSR1 to save and
go on.

A signal reaches one process, at any moment; the trainer asks at moments of its own, and agrees with
the other processes on the highest request (`distributed.Agreement`).
"""

import signal
import threading
from enum import IntEnum


class Request(IntEnum):
    """What a run is asked to do; of several, the highest counts."""

    NOTHING = 0
    SAVE = 1  # SIGUSR1
    HANG_UP = 2  # SIGHUP, the terminal is gone: save and stop
    TERMINATE = 3  # SIGTERM: save and stop
    INTERRUPT = 4  # SIGINT: save and stop
    GIVE_UP = 5  # not from outside: snapshots cannot be written


SIGNALS = {
    signal.SIGUSR1: Request.SAVE,
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

    A second SIGINT is not: it ends the process at once. SIGHUP stays ignored under nohup. Outside
    the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self):
        self._newest = Request.NOTHING
        self._before: dict = {}

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        self._newest = max(self._newest, SIGNALS[signal.Signals(number)])
        if number == signal.SIGINT:
            # The kernel's own handler also ends a process that is stuck outside Python.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take(self) -> Request:
        """The highest request since; one to save is handed out once."""
        taken = self._newest
        if taken == Request.SAVE:
            self._newest = Request.NOTHING
        return taken
