"""Portability: signals, standard streams, a check of argparse."""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]


def is_installed(package: str) -> bool:
    """Whether a package is installed. A namespace package, as W&B's folder looks like, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def available_signals(*names: str) -> list[signal.Signals]:
    """Signals of `names` that this system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def open_closed_streams() -> None:
    """Opens standard streams that the caller has closed (`>&-`), as /dev/null: files would get their numbers."""
    for name in ("stdin", "stdout", "stderr"):  # by number; `open` takes the lowest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def restore_sigpipe() -> None:
    """Ends the process silently when its output pipe is closed, as in `--help | head`."""
    for number in available_signals("SIGPIPE"):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """A context for printing, which ends when all is written. Raises OSError naming standard output if that fails: at
    the interpreter's end it would be a traceback.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no other try at the end
        raise OSError(error.errno, error.strerror, "standard output") from error


def replace_unprintable() -> None:
    """Prints ? for characters that the terminal's encoding does not have, instead of raising UnicodeEncodeError."""
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure"):  # others, as a notebook's, have every character
        stdout.reconfigure(errors="replace")


def patch_argparse() -> None:
    """Disables Python 3.14's check of help texts, which refuses one of Hydra 1.3 that is not a string."""
    if hasattr(argparse.ArgumentParser, "_check_help"):
        argparse.ArgumentParser._check_help = lambda parser, action: None
