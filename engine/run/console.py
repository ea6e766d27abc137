"""Console: the log on rank 0's standard output, and errors as one line."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from engine import portable, signals
from engine.config.overrides import COMPOSING, explain
from engine.errors import UserError
from engine.files import masked
from engine.parallel import distributed
from engine.parallel.slurm import export_torchrun_env
from engine.run.directory import MaskedFormatter

log = logging.getLogger("gpt")


class LevelFormatter(MaskedFormatter):
    """Messages unchanged, with the level before warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return level + super().format(record)


def log_to_console() -> None:
    """Prints the log on rank 0 only, even if ranks are forks of this process."""
    if log.handlers:
        return
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stdout)
    # A closed pipe does not end the run, and prints no traceback for each line.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(LevelFormatter())
    handler.addFilter(lambda record: distributed.rank() == 0)
    log.addHandler(handler)


def fail(error: Exception | str, status: int = 1) -> NoReturn:
    """Ends the process with one line on standard error."""
    rank = f" (rank {distributed.rank()})" if distributed.size() > 1 else ""
    sys.stderr.write(masked(f"error{rank}: {error}\n"))  # in one call: the ranks share a terminal
    distributed.leave(status)


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """A process started from the command line: its signals, log and rank, and one line for an error that
    a user can correct. Others keep their traceback.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raises errors instead of printing them
    signals.interruptible()
    portable.replace_unprintable()
    log_to_console()
    try:
        export_torchrun_env()
        yield
    except COMPOSING as error:
        fail(explain(error))
    except UserError as error:
        fail(error)
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        fail("interrupted; the same command resumes from the last snapshot, if there is one", status)
