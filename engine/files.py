"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def atomic_write(path: str, mode: str = "w") -> Iterator[Any]:
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
    except OSError as error:
        if error.errno is None or error.filename not in (None, temporary):  # another file's
            raise
        raise type(error)(error.errno, error.strerror, path) from error
    finally:
        with contextlib.suppress(OSError):  # it is in place, or never was there
            os.remove(temporary)
