"""Files that are whole or not there, and a terminal that shows what it can."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(path: str, mode: str = "w") -> Iterator[Any]:
    """A file to write that takes the place of `path` at the end of the block, at once and for good.

    It is `path` with `.tmp` after it until then. After an error it is gone, and what was at `path`
    is as it was. Text is UTF-8.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it is in place, or never was there
            os.remove(temporary)


def show_every_character() -> None:
    """Has a terminal that lacks a character show its number, rather than the program fail."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.isatty() and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")
