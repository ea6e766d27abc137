"""Local files: atomic writes; locks; recognizing the pages that this project wrote."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from engine import portable


def is_local(path: str) -> bool:
    """Whether `path` is not a URL."""
    return "://" not in path


@contextlib.contextmanager
def atomic_write(path: str, mode: str = "w") -> Iterator[Any]:
    """Atomic write: the block writes `path.tmp`, which is flushed to disk and then replaces `path`.

    After an error `path` is unchanged and the temporary file removed. Text is UTF-8. Raises OSError naming `path`.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, temporary):  # not about this file
            raise
        raise type(error)(error.errno, error.strerror, path) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            os.remove(temporary)


@contextlib.contextmanager
def file_lock(path: str) -> Iterator[None]:
    """File lock: one process at a time runs the block, even across hosts that share a disk. Raises OSError."""
    with open(path, "a") as file:
        portable.lock(file, wait=True)
        yield  # the file stays: others may wait for its lock


def is_page_of(path: str, program: str) -> bool:
    """Whether a file is a page that `program` (report.py or export.py) wrote, and may replace."""
    try:
        with open(path, encoding="utf-8") as file:
            return f"<!-- character-level GPT: written by {program} -->" in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False
