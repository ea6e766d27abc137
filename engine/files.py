"""Paths without their secrets; local files: atomic writes, locks, recognizing the pages that this project wrote."""

import contextlib
import errno
import functools
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from filelock import FileLock
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.errors import UserError, one_line

log = logging.getLogger("gpt")

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # as of NFS on many clusters


def is_local(path: str) -> bool:
    """Whether `path` is not a URL."""
    return "://" not in path


def masked(value: Any) -> Any:
    """`value`, a text or nested settings, with *** for what may be secret in a URL: the user, and the query, which may
    have a signature. A part with `${oc.env:NAME}` stays: it shows no secret.
    """
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [*map(masked, value)]
    if not isinstance(value, str) or is_local(value):
        return value

    def mask(match: re.Match[str]) -> str:
        return match[1] + (match[2] if "${oc.env:" in match[2] else "***")

    value = re.sub(r"(://)([^\s/?#]+)(?=@)", mask, value)
    value = re.sub(r"([\"' ])([^\s/?#\"']+:[^\s/?#\"']+)(?=@)", mask, value)  # as a library's error has it
    # Without what follows a URL in a list, quotes or a sentence.
    return re.sub(r"(://[^?\n]*\?)((?:(?!,\w+:/)\S)*[^\s'\".,:;)\]])", mask, value)


def usable(path: Any, setting: str) -> Any:
    """A path, or several, that a run recorded, with the values of `${oc.env:NAME}`. Raises `UserError` for a variable
    that is not set, and for a masked path; `setting` can then give the path.
    """
    if "***" in str(path):
        raise UserError(f"{path}: the run recorded this without what may be secret; give {setting}=")
    if "${oc.env:" not in str(path):
        return path
    try:
        found: Any = OmegaConf.to_object(OmegaConf.create({"path": path}))
        return found["path"]
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from error


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
def writes(setting: str, path: str) -> Iterator[None]:
    """Turns an `OSError` of the block, which writes `path`, into a `UserError` that names the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be written: {error.strerror or one_line(error)}") from error


def file_lock(path: str, wait: bool = True) -> contextlib.AbstractContextManager[object]:
    """Acquires a file lock, to be released by `with`: one process at a time holds it, even across hosts that share a
    disk; a process that dies releases it. On a file system without locks, only warns. Raises `filelock.Timeout` if it
    is held and `wait` is false, and OSError.
    """
    try:  # a soft lock would outlive a process that dies
        return FileLock(path, blocking=wait, fallback_to_soft=False, thread_local=False).acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn_without_locks(os.path.dirname(path))
        return contextlib.nullcontext()


@functools.cache  # once for a folder, where a run has two locks
def warn_without_locks(folder: str) -> None:
    log.warning("%s: the file system has no locks; a second start would not be noticed", folder)


def is_page_of(path: str, program: str) -> bool:
    """Whether a file is a page that `program` (report.py or export.py) wrote, and may replace."""
    try:
        with open(path, encoding="utf-8") as file:
            return f"<!-- character-level GPT: written by {program} -->" in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False
