"""Where a run's snapshots lie, and how they get there whole and stay good.

`SnapshotFiles` knows the files of one run: the latest at `path` (`gpt_snapshot.pt`, say), and
beside it the one before (`gpt_snapshot.prev.pt`), the best (`gpt_snapshot.best.pt`) and the
numbered ones (`gpt_snapshot.step00001000.pt`). `path` may be local or any fsspec URL; both are
written the same way: whole under another name, read back and compared, and only then put in place.
`BackgroundWriter` does that beside training.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from engine.errors import UserError, one_line
from engine.snapshots.snapshot import DIGEST_LENGTH, Snapshot, SnapshotError

log = logging.getLogger("gpt")


class Unreachable(SnapshotError):
    """A store that does not answer as it should: nothing is known of the snapshots in it."""


def beside(path: str, kind: str) -> str:
    """The path of the snapshot of another kind (prev, best, ...) that belongs to the latest at
    `path`.
    """
    root, extension = os.path.splitext(path)
    return f"{root}.{kind}{extension}"


def is_local(path: str) -> bool:
    return "://" not in path


def snapshot_path(path: str, run_dir: str) -> str:
    """Where the latest snapshot is: at `path` (`trainer.snapshot_path`), relative to `run_dir`
    unless absolute or a URL.
    """
    return os.path.join(run_dir, path) if is_local(path) else path


def locate(path: str) -> tuple[Any, str]:
    """The file system of `path`, local or a URL, and the name of the file in it."""
    if is_local(path):  # whatever is in its name
        return LocalFileSystem(), os.path.abspath(path)
    return fsspec.core.url_to_fs(path)


@contextlib.contextmanager
def reaching(path: str, what: str = "reached"):
    """Turns the errors of every kind of store into `Unreachable`, naming `path`."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:  # every file system has its own
        raise Unreachable(f"{path}: cannot be {what}: {one_line(error)}") from error


def exists(path: str) -> bool:
    """Whether there is a file at `path`, local or a URL; `Unreachable` if its store does not
    say.
    """
    with reaching(path):
        file_system, inner = locate(path)
        file_system.invalidate_cache()  # a listing may be older than the file
        return file_system.exists(inner)


def read(path: str) -> bytes:
    """The bytes at `path`.

    Raises `SnapshotError` if there is no such file or a local one cannot be read, `Unreachable` if
    a store does not hand out all of it.
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
            why = cause.__cause__  # where fsspec reports any failure of a server as this
            if isinstance(why, Exception) and not isinstance(why, FileNotFoundError):
                raise Unreachable(f"{path}: cannot be reached: {one_line(why)}") from error
            raise SnapshotError(f"{path}: no such snapshot") from error
        if is_local(path):
            raise SnapshotError(f"{path}: cannot be read: {one_line(cause)}") from error
        raise
    if len(content) != size and not is_local(path):
        raise Unreachable(f"{path}: cannot be reached: {len(content)} of {size} bytes came")
    return content


def load(path: str) -> Snapshot:
    """The verified snapshot at `path`, local or a URL; `SnapshotError` naming it if there is none
    or it is not good.
    """
    return Snapshot.from_bytes(read(path), path)


def shards_folder(path: str, folder: str) -> str:
    """Where the shards lie that the snapshot at `path` knows as `folder`; any of the run's
    snapshots will do, as they all lie side by side.
    """
    return os.path.join(os.path.dirname(os.path.abspath(path)), folder)


def check_shards(path: str, snapshot: Snapshot) -> None:
    """Raises `SnapshotError` if a file that a sharded snapshot refers to is missing or cut off."""
    for name, (size, _) in snapshot.shards.get("files", {}).items():
        file = os.path.join(shards_folder(path, snapshot.shards["folder"]), name)
        if not os.path.exists(file) or os.path.getsize(file) != size:
            raise SnapshotError(f"{path}: {file} is missing or cut off")


class SnapshotFiles:
    """The snapshots of one run, the latest of which is at `path`.

    `keep` numbered ones are kept, the newest; None for no numbered ones. Raises `UserError` for a
    URL that fsspec cannot use here.
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
        """Makes `content` the latest snapshot, the best, or both.

        The content is first written whole under a temporary name and read back; each snapshot is
        then replaced at once, so that at every moment each name holds what it held before or the
        new content. Raises whatever the file system does if that fails; what was there is then
        still there. On a disk, what is the same has several names (hard links), not copies.
        """
        try:
            self._put(self.temporary, content)
            self._check(self.temporary, content)
            if best:  # first: the latest says that this is the best, so it must be there
                self._copy(self.temporary, self.best)
            if latest:
                if exists(self.path):
                    self._copy(self.path, self.previous)
                self._move(self.temporary, self.path)
        finally:
            with contextlib.suppress(Exception):  # it may be gone, or the store out of reach
                self._remove(self.temporary)
        if latest and self.keep:
            try:
                self._copy(self.path, beside(self.path, f"step{step:08d}"))
                for path in self.numbered()[self.keep :]:
                    self._remove(path)
            except Exception as error:  # the latest is there, and that is what counts
                log.warning("%s: the numbered ones are not up to date: %s", self.path, error)

    def check_writable(self) -> None:
        """Makes the folder of the snapshots. Raises `Unreachable` if nothing can be written there,
        or copied, which not every kind of store can do.
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
            self.file_system.pipe_file(self._inner(path), bytes(content))
            return
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _check(self, path: str, content: bytes | memoryview) -> None:
        """Reads back what was written: its SHA-256 must be the one that ends `content`."""
        self.file_system.invalidate_cache()
        digest, left = hashlib.sha256(), len(content) - DIGEST_LENGTH
        with self.file_system.open(self._inner(path), "rb") as file:
            while left > 0 and (piece := file.read(min(left, 1 << 22))):
                digest.update(piece)
                left -= len(piece)
            end = file.read()
        if not digest.hexdigest().encode() == end == content[-DIGEST_LENGTH:]:
            raise OSError(f"{path}: what was written is not what is there")

    def _copy(self, source: str, target: str) -> None:
        if not is_local(source):
            self.file_system.cp_file(self._inner(source), self._inner(target))
            return
        temporary = beside(target, "tmp")
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        try:
            try:
                os.link(source, temporary)  # a second name: no bytes are copied
            except OSError:  # a file system without hard links
                shutil.copyfile(source, temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:  # also after a success: rename(2) leaves both names of one file
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)

    def _move(self, source: str, target: str) -> None:
        if not is_local(source):  # `mv` would take a name for a pattern
            self.file_system.cp_file(self._inner(source), self._inner(target))
            with contextlib.suppress(Exception):  # what counts is done; `find` removes it, too
                self._remove(source)
            return
        os.replace(source, target)
        with contextlib.suppress(OSError):  # not every file system knows this
            folder = os.open(os.path.dirname(os.path.abspath(target)), os.O_RDONLY)
            try:
                os.fsync(folder)  # or a power cut could undo what was renamed
            finally:
                os.close(folder)

    def _remove(self, path: str) -> None:
        self.file_system.rm_file(self._inner(path))

    def _inner(self, path: str) -> str:
        return locate(path)[1]

    # ----------------------------------------------------------------------------------------------
    # Finding

    def present(self, kind: str) -> list[str]:
        """The existing paths of snapshots whose kind matches the pattern `kind`, in order."""
        folder, _, name = self.path.rpartition("/")
        root, extension = os.path.splitext(name)
        pattern = re.compile(rf"{re.escape(root)}(?:{kind}){re.escape(extension)}")
        inner = self._inner(self.path).rpartition("/")[0]
        with reaching(self.path):
            self.file_system.invalidate_cache()
            try:
                listing = self.file_system.ls(inner, detail=False)
            except FileNotFoundError:
                return []
        names = sorted(path.rpartition("/")[2] for path in listing)
        prefix = f"{folder}/" if folder else ""
        return [prefix + name for name in names if pattern.fullmatch(name)]

    def numbered(self) -> list[str]:
        """The numbered snapshots that exist, newest first."""
        return self.present(r"\.step\d+")[::-1]

    def all(self) -> list[str]:
        """Every snapshot of the run that exists, the latest first."""
        single = [path for path in (self.path, self.previous) if exists(path)]
        return single + self.numbered() + ([self.best] if exists(self.best) else [])

    def find(self, warn: Callable[[str], None]) -> tuple[bytes, str] | None:
        """The content of the newest good snapshot and its path; None if there is no snapshot.

        What a killed writer left is removed. A damaged snapshot is renamed, and reported through
        `warn(message)`. Raises `SnapshotError` if snapshots exist but none is good, because
        starting from zero would hide the loss, and `Unreachable` if that is not known.
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
                step = snapshot.step
            except Unreachable:
                raise
            except SnapshotError as error:
                damaged[path] = str(error)
                continue
            if path == self.path:
                return content, path
            if newest is None or step > newest[0]:
                newest = (step, content, path)
        if newest is None:
            raise SnapshotError(
                f"no good snapshot left: {'; '.join(damaged.values())}; start from "
                "scratch with trainer.resume=never, which keeps them, or set run_name=NEW_NAME"
            )
        _, content, path = newest
        for why, moved in zip(damaged.values(), self.set_aside([*damaged], "damaged"), strict=True):
            warn(f"{why}; it is now {moved}; using {path} instead")
        with reaching(self.path, "written"):
            self._put(self.temporary, content)  # a copy: a second name would share its damages
            self._move(self.temporary, self.path)
        return content, path

    def set_aside(self, paths: list[str], word: str = "old") -> list[str]:
        """Renames `paths` to the first number free for all (`NAME.old1.pt`).

        Returns the new names.
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


def lower_thread_priority() -> None:
    """Lowers the priority of the calling thread, where the system knows priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it may be low enough already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class BackgroundWriter:
    """Writes snapshots in a thread of its own, one at a time.

    Training waits only for a copy of the tensors on their device, and for the save before, where
    saves are closer together than a save takes. A save that fails is logged; `failures` counts
    those in a row, `error` is the newest. A best snapshot is kept, as `unwritten_best`, until it
    could be written.
    """

    def __init__(self, files: SnapshotFiles):
        self.files = files
        self.failures, self.error = 0, ""
        self.unwritten_best: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "snapshot", lower_thread_priority)
        self._pending: Future[None] | None = None
        self._step = 0

    def write(
        self,
        snapshot: Snapshot,
        latest: bool,
        best: bool,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to write the latest snapshot, the best, or both; `snapshot` may change after.

        `first()` is done before, in the same thread; the save fails with it.
        """
        self.wait()
        copied = snapshot.map_tensors(lambda tensor: tensor.detach().clone())
        ready = None
        if torch.cuda.is_initialized():
            ready = torch.cuda.current_stream().record_event()
        self._step = snapshot.step
        # In a list, to be taken out: the executor keeps arguments, and with them a GPU's memory.
        self._pending = self._thread.submit(self._write, [copied], ready, latest, best, first)

    def _write(self, copied: list[Snapshot], ready, latest: bool, best: bool, first) -> None:
        snapshot = copied.pop()
        if ready is not None:
            # Beside the stream that trains, so that the copy to the host does not hold it up.
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(ready)
                snapshot = snapshot.map_tensors(lambda tensor: tensor.cpu())
        if best:
            self.unwritten_best = snapshot
        first()
        if self.unwritten_best is not None and self.unwritten_best is not snapshot:
            self._write_files(self.unwritten_best, latest=False, best=True)
        self._write_files(snapshot, latest, best)

    def _write_files(self, snapshot: Snapshot, latest: bool, best: bool) -> None:
        self.files.write(snapshot.to_bytes(), snapshot.step, latest, best)
        if best:
            self.unwritten_best = None

    def failed(self, step: int, error: Exception) -> None:
        """Takes note of a save that could not be written."""
        self.failures, self.error = self.failures + 1, one_line(error)
        log.warning(
            "the snapshot of step %d was not written to %s: %s; what was there is as it was",
            step, self.files.path, self.error,
        )  # fmt: skip

    def poll(self) -> None:
        """Takes note of a save that has ended."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save under way, and takes note of how it ended."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception as error:  # every file system has its own
            self.failed(self._step, error)
        else:
            self.failures, self.error = 0, ""
