"""Progress: the time of a step, and how durations and losses are shown."""

import contextlib
import io
import sys
import time

import torch


def escape_unencodable() -> None:
    """Escapes characters that the terminal cannot encode; Python would raise an error."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.isatty() and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


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
