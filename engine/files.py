"""Local files: atomic writes; locks; recognizing the pages that this project wrote."""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

from filelock import FileLock

log = logging.getLogger("gpt")

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # as of NFS on many clusters


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


def file_lock(path: str, wait: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Acquires a file lock, to be released by `with`: one process at a time holds it, even across hosts that share a
    disk; a process that dies releases it. On a file system without locks, only warns. Raises `filelock.Timeout` if it
    is held and `wait` is false, and OSError.
    """
    try:  # a soft lock would outlive a process that dies
        return FileLock(path, blocking=wait, fallback_to_soft=False, thread_local=False).acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: the file system has no locks; a second start would not be noticed", path)
        return contextlib.nullcontext()


def is_page_of(path: str, program: str) -> bool:
    """Whether a file is a page that `program` (report.py or export.py) wrote, and may replace."""
    try:
        with open(path, encoding="utf-8") as file:
            return f"<!-- character-level GPT: written by {program} -->" in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False
