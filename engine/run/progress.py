"""Progress: the live line on a terminal, the time of a step, how durations and losses are shown."""

import contextlib
import io
import logging
import sys
import time

import torch

log = logging.getLogger("gpt")


def escape_unencodable() -> None:
    """Escapes characters that the terminal cannot encode; Python would raise an error."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.isatty() and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


class Progress:
    """Progress bar: one live line below the log, on a terminal with tqdm installed.

    Elsewhere, or if not `shown`, it does nothing. Its numbers are those last logged, so it never
    waits for the device. If the terminal goes away, it closes and the run continues.
    """

    def __init__(self, step: int, total_steps: int, shown: bool):
        self.bar, self.numbers = None, ""
        self.stack = contextlib.ExitStack()
        if not (shown and sys.stdout.isatty()):
            return
        try:
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm
        except ImportError:
            log.info("tqdm is not installed: no progress bar (pip install tqdm)")
            return

        class Bar(tqdm):
            monitor_interval = 0  # no thread of its own

        self.bar = Bar(
            total=total_steps,
            initial=step,
            file=sys.stdout,
            leave=False,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% {bar:10} {n_fmt}/{total_fmt} | {remaining} left{desc}",
        )
        if log.handlers:  # or it would add one
            self.stack.enter_context(logging_redirect_tqdm([log], Bar))

    def log(self, loss: float, rate: float) -> None:
        """Sets the loss (nats per character) and speed (characters per second) to show."""
        self.numbers = f" | loss {loss:.4f} | {rate:,.0f} characters/s"

    def step(self) -> None:
        """Counts one step."""
        if self.bar is None:
            return
        self.bar.set_description_str(self.numbers, refresh=False)
        try:
            self.bar.update()
        except OSError:
            self.close()

    def close(self) -> None:
        """Removes the line."""
        self.stack.close()
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
            self.bar = None


class Stopwatch:
    """Times training steps, without evaluations and saves."""

    def __init__(self, step: int, device: torch.device):
        self.device = device
        self.step, self.started = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Seconds per step since the last lap."""
        now = time.perf_counter()
        seconds = (now - self.started) / (step - self.step)
        self.step, self.started = step, now
        return seconds

    @contextlib.contextmanager
    def paused(self):
        """Leaves the time of the block out."""
        if self.device.type == "cuda":  # finish the queued steps before the pause starts
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_loss(loss: float | None) -> str:
    """Four decimals, or "-" for None."""
    return "-" if loss is None else f"{loss:.4f}"
