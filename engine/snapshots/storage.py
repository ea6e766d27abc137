"""Snapshot storage: atomic writes, rotation, recovery; on a disk or in an object store.

The files of a run lie side by side: the latest (`gpt_snapshot.pt`), the one before it (`.prev`), the
one with the lowest held-out loss (`.best`) and the numbered ones (`.step00001000`). Every write goes to
a temporary name, is read back against its SHA-256, and then replaces the old file in one operation.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from engine.errors import UserError, one_line
from engine.snapshots.snapshot import DIGEST_LENGTH, Snapshot, SnapshotError

log = logging.getLogger("gpt")
SET_ASIDE = ".set_aside"  # in the run directory: trainer.resume=never has renamed the earlier files


class Unreachable(SnapshotError):
    """A store that does not answer; nothing is known about the snapshots in it."""


def is_local(path: str) -> bool:
    return "://" not in path


def beside(path: str, kind: str) -> str:
    """The path of another kind of snapshot beside `path`: `run/gpt.best.pt` for `run/gpt.pt`, best."""
    root, extension = os.path.splitext(path)
    return f"{root}.{kind}{extension}"


def snapshot_path(path: str, run_dir: str) -> str:
    """`trainer.snapshot_path`, relative to `run_dir` unless it is absolute or a URL."""
    return os.path.join(run_dir, path) if is_local(path) else path


def locate(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the file's name in it."""
    if is_local(path):  # url_to_fs would read patterns into a name
        return LocalFileSystem(), os.path.abspath(path)
    return fsspec.core.url_to_fs(path)


@contextlib.contextmanager
def reaching(path: str, what: str = "reached"):
    """Turns the errors of any file system into `Unreachable`, naming `path`."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:  # every file system has its own
        raise Unreachable(f"{path}: cannot be {what}: {one_line(error)}") from error


def exists(path: str) -> bool:
    """Whether there is a file at a path or URL. Raises `Unreachable`."""
    with reaching(path):
        file_system, inner = locate(path)
        file_system.invalidate_cache()  # a listing may be older than the file
        return file_system.exists(inner)


def read(path: str) -> bytes:
    """The bytes at a path or URL. Raises `SnapshotError` if there is no such file or it cannot be read,
    `Unreachable` if a store does not deliver all of it.
    """
    try:
        with reaching(path):
            file_system, inner = locate(path)
            file_system.invalidate_cache()
            size = file_system.info(inner)["size"]
            content = file_system.cat_file(inner)
    except Unreachable as error:
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError):
            inner_cause = cause.__cause__  # fsspec reports any failure of a server as this error
            if isinstance(inner_cause, Exception) and not isinstance(
                inner_cause, FileNotFoundError
            ):
                raise Unreachable(f"{path}: cannot be reached: {one_line(inner_cause)}") from error
            raise SnapshotError(f"{path}: no such snapshot") from error
        if is_local(path):
            raise SnapshotError(f"{path}: cannot be read: {one_line(cause)}") from error
        raise
    if len(content) != size and not is_local(path):
        raise Unreachable(f"{path}: cannot be reached: {len(content)} of {size} bytes arrived")
    return content


def load(path: str) -> Snapshot:
    """The verified snapshot at a path or URL. Raises `SnapshotError`, naming it."""
    return Snapshot.from_bytes(read(path), path)


class SnapshotStorage:
    """The snapshot files of one run, the latest of which is at `path`, a path or URL.

    `keep` numbered snapshots are kept, the newest ones; None for none. Raises `UserError` for a URL
    that fsspec cannot open here.
    """

    def __init__(self, path: str, keep: int | None = None):
        self.path, self.keep = path, keep
        try:
            self.file_system, _ = locate(path)
        except (ImportError, ValueError) as error:
            raise UserError(f"trainer.snapshot_path={path}: {one_line(error)}") from error
        self.previous, self.best = beside(path, "prev"), beside(path, "best")
        self.temporary = beside(path, "tmp")

    # ----------------------------------------------------------------------------------------------
    # Writing

    def write(self, content: bytes | memoryview, step: int, latest: bool, best: bool) -> None:
        """Atomic write: makes `content` the latest snapshot, the best, or both.

        At every moment each name holds what it held before, or the new content. Raises whatever the
        file system raises. On a disk, files with the same content are hard links.
        """
        try:
            self._put(self.temporary, content)
            self._verify_written(self.temporary, content)
            if best:  # before the latest, which records that this is the best
                self._copy(self.temporary, self.best)
            if latest:
                if exists(self.path):
                    self._copy(self.path, self.previous)
                self._move(self.temporary, self.path)
        finally:
            with contextlib.suppress(Exception):  # moved already, or the store is unreachable
                self._remove(self.temporary)
        if latest and self.keep:
            try:
                self._copy(self.path, beside(self.path, f"step{step:08d}"))
                for path in self.numbered()[self.keep :]:
                    self._remove(path)
            except Exception as error:  # the latest is written, and that is what counts
                log.warning("%s: cannot update the numbered snapshots: %s", self.path, error)

    def check_writable(self) -> None:
        """Creates the folder of the snapshots. Raises `Unreachable` if a file cannot be written or
        copied there; not every kind of store can copy.
        """
        copy = beside(self.path, "check")
        with reaching(self.path, "written"):
            if is_local(self.path):
                os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            self._put(self.temporary, b"-")
            self._copy(self.temporary, copy)
            self._remove(copy)
            self._remove(self.temporary)

    def _put(self, path: str, content: bytes | memoryview) -> None:
        if not is_local(path):
            self.file_system.pipe_file(locate(path)[1], bytes(content))
            return
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _verify_written(self, path: str, content: bytes | memoryview) -> None:
        """Reads a file back; its SHA-256 must be the one that ends `content`."""
        self.file_system.invalidate_cache()
        digest, left = hashlib.sha256(), len(content) - DIGEST_LENGTH
        with self.file_system.open(locate(path)[1], "rb") as file:
            while left > 0 and (piece := file.read(min(left, 1 << 22))):
                digest.update(piece)
                left -= len(piece)
            end = file.read()
        if not digest.hexdigest().encode() == end == content[-DIGEST_LENGTH:]:
            raise OSError(f"{path}: reads back different from what was written")

    def _copy(self, source: str, target: str) -> None:
        if not is_local(source):
            self.file_system.cp_file(locate(source)[1], locate(target)[1])
            return
        temporary = beside(target, "tmp")
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        try:
            try:
                os.link(source, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:  # after a success, too: rename(2) keeps both names of one file
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)

    def _move(self, source: str, target: str) -> None:
        if not is_local(source):  # fsspec's `mv` would expand patterns in a name
            self.file_system.cp_file(locate(source)[1], locate(target)[1])
            with contextlib.suppress(Exception):  # `find` removes it as well
                self._remove(source)
            return
        os.replace(source, target)
        with contextlib.suppress(OSError):  # not every file system can sync a folder
            folder = os.open(os.path.dirname(os.path.abspath(target)), os.O_RDONLY)
            try:
                os.fsync(folder)  # or a power cut could undo the rename
            finally:
                os.close(folder)

    def _remove(self, path: str) -> None:
        self.file_system.rm_file(locate(path)[1])

    # ----------------------------------------------------------------------------------------------
    # Finding

    def present(self, kind: str) -> list[str]:
        """The existing snapshots whose kind matches the regular expression `kind`, sorted."""
        folder, _, name = self.path.rpartition("/")
        root, extension = os.path.splitext(name)
        pattern = re.compile(rf"{re.escape(root)}(?:{kind}){re.escape(extension)}")
        with reaching(self.path):
            self.file_system.invalidate_cache()
            try:
                parent = locate(self.path)[1].rpartition("/")[0]
                listing = self.file_system.ls(parent, detail=False)
            except FileNotFoundError:
                return []
        names = sorted(path.rpartition("/")[2] for path in listing)
        prefix = f"{folder}/" if folder else ""
        return [prefix + name for name in names if pattern.fullmatch(name)]

    def numbered(self) -> list[str]:
        """The numbered snapshots, newest first."""
        return self.present(r"\.step\d+")[::-1]

    def all(self) -> list[str]:
        """Every snapshot of the run, the latest first."""
        single = [path for path in (self.path, self.previous) if exists(path)]
        return single + self.numbered() + ([self.best] if exists(self.best) else [])

    def find(self) -> tuple[bytes, str] | None:
        """Recovery: content and path of the newest undamaged snapshot; None if there is no snapshot.

        Removes temporary files of a killed writer. Damaged snapshots are renamed, with a warning.
        Raises `SnapshotError` if there are snapshots and all are damaged, since training from scratch
        would hide the loss, and `Unreachable` if the store does not answer.
        """
        with reaching(self.path, "written"):
            for leftover in self.present(r"(\.\w+)?\.tmp|\.check"):
                self._remove(leftover)
        paths = self.all()
        if not paths:
            return None
        damaged: dict[str, str] = {}
        newest: tuple[int, bytes, str] | None = None
        for path in paths:
            try:
                content = read(path)
                snapshot = Snapshot.from_bytes(content, path)
                check_shards(path, snapshot)
            except Unreachable:
                raise
            except SnapshotError as error:
                damaged[path] = str(error)
                continue
            if path == self.path:
                return content, path
            if newest is None or snapshot.step > newest[0]:
                newest = (snapshot.step, content, path)
        if newest is None:
            raise SnapshotError(
                f"no undamaged snapshot left: {'; '.join(damaged.values())}; train from scratch with "
                "trainer.resume=never, which keeps the files, or set run_name=NEW_NAME"
            )
        _, content, path = newest
        for why, moved in zip(damaged.values(), self.set_aside([*damaged], "damaged"), strict=True):
            log.warning("%s; renamed to %s; using %s instead", why, moved, path)
        with reaching(self.path, "written"):
            self._put(self.temporary, content)  # a copy: a hard link would share later damage
            self._move(self.temporary, self.path)
        return content, path

    def set_aside(self, paths: list[str], word: str = "old") -> list[str]:
        """Renames `paths` to `NAME.old1.pt`, with the first number that is free for all; returns the
        new names.
        """
        number = 1
        while any(exists(beside(path, f"{word}{number}")) for path in paths):
            number += 1
        moved = []
        for old in paths:
            new = beside(old, f"{word}{number}")
            with reaching(old):
                file_system, inner = locate(old)
                if is_local(old):
                    os.rename(old, new)
                else:
                    file_system.cp_file(inner, locate(new)[1])
                    file_system.rm_file(inner)
            moved.append(new)
        return moved


# --------------------------------------------------------------------------------------------------
# Where the files of a sharded snapshot lie


def shards_folder(path: str, folder: str) -> str:
    """The folder `folder` of a snapshot's shards, which lies beside every snapshot of the run."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), folder)


def check_shards(path: str, snapshot: Snapshot) -> None:
    """Raises `SnapshotError` if a file that a sharded snapshot refers to is missing or cut off, or
    lies outside the snapshot's own folder.
    """
    if not snapshot.shards:
        return
    folder, files = snapshot.shards["folder"], snapshot.shards["files"]
    if {"", ".", ".."} & {*folder.split("/"), *files} or "/" in "".join(files):
        raise SnapshotError(f"{path}: a file of {folder} is outside the snapshot's folder")
    for name, (size, _) in files.items():
        file = os.path.join(shards_folder(path, folder), name)
        if not os.path.exists(file) or os.path.getsize(file) != size:
            raise SnapshotError(f"{path}: {file} is missing or cut off")
