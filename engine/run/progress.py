"""How far a run is and how fast: the live line on a terminal, the time of a step."""

import contextlib
import io
import logging
import os
import sys
import time
from typing import TextIO

import torch
import torch.nn as nn

log = logging.getLogger("gpt")
WIDE = 105  # columns that the whole of the live line fits in


def show_every_character() -> None:
    """Has a terminal that lacks a character show its number, rather than the program fail."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.isatty() and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


def size(file: TextIO) -> tuple[int, int]:
    """The columns and rows of a terminal that a line may fill. Those that nothing sits in front of
    (`script` in a job, `docker exec -t`) say 0: they are taken for the usual 80 and 24.
    """
    try:
        columns, rows = os.get_terminal_size(file.fileno())
    except OSError:  # it has gone away
        columns, rows = 0, 0
    return (columns or 80) - 1, (rows or 24) - 1


class Progress:
    """Where training stands, in one line that stays below the log.

    Shown where the output is a terminal and tqdm is installed, and only if `shown`; else nothing
    happens, and the log is all there is. The numbers are the last that the log has, so nothing
    waits for the device. A terminal that goes away takes the line with it, not the run.
    """

    def __init__(self, step: int, total_steps: int, shown: bool):
        self.bar, self.numbers, self.handlers = None, "", []
        if not (shown and sys.stdout.isatty()):
            return
        try:
            from tqdm import tqdm
        except ImportError:
            log.info("tqdm is not installed: no progress bar (pip install tqdm)")
            return

        class Bar(tqdm):
            monitor_interval = 0  # no thread of its own

        columns, rows = size(sys.stdout)
        self.bar = Bar(
            total=total_steps,
            initial=step,
            file=sys.stdout,
            leave=False,
            ncols=columns,
            nrows=rows,
            bar_format="{percentage:3.0f}% {bar:10} {n_fmt}/{total_fmt} | {remaining} left{desc}",
        )
        self.bar.dynamic_ncols = size  # tqdm's own shows nothing where the size is not known
        for handler in log.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(self)
                self.handlers.append(handler)

    def log(self, loss: float, rate: float) -> None:
        """Shows a loss in nats per character and a speed in characters per second."""
        self.numbers = f" | loss {loss:.4f} | {rate:,.0f} characters/s"

    def step(self, next_evaluation: int | None) -> None:
        """Counts one step."""
        if self.bar is None:
            return
        due = "" if next_evaluation is None else f" | next evaluation at {next_evaluation}"
        if size(sys.stdout)[0] < WIDE:  # or its end would be cut off
            due = ""
        self.bar.set_description_str(self.numbers + due, refresh=False)
        try:
            self.bar.update()
        except OSError:
            self.close()

    def write(self, text: str) -> None:
        """Writes above the line; the log's handlers take this for their stream."""
        assert self.bar is not None  # `close` takes the handlers back
        with self.bar.external_write_mode(sys.stdout):
            sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        """Removes the line."""
        if self.bar is None:
            return
        for handler in self.handlers:
            handler.stream = sys.stdout  # setStream would flush first, and a terminal may be gone
        with contextlib.suppress(OSError):
            self.bar.close()
        self.bar = None


class Stopwatch:
    """Seconds a training step takes, evaluations and saves not counted."""

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
        if self.device.type == "cuda":  # or what it still has to do would count as the pause
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started


def flops_per_token(model: nn.Module) -> float:
    """The model's own count, or 6 per parameter."""
    own = getattr(model, "flops_per_token", None)
    return own() if own else 6.0 * sum(p.numel() for p in model.parameters())


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
