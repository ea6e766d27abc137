"""The live line on a terminal."""

import contextlib
import logging
import sys

log = logging.getLogger("gpt")


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
            monitor_interval = 0  # no thread: there may be forks

        self.bar = Bar(
            total=total_steps,
            initial=step,
            file=sys.stdout,
            leave=False,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% {bar:10} {n_fmt}/{total_fmt} | {remaining} left{desc}",
        )
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
        self.bar.set_description_str(self.numbers + due, refresh=False)
        try:
            self.bar.update()
        except OSError:
            self.close()

    def write(self, text: str) -> None:
        """Writes above the line; the log's handlers take this for their stream."""
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
