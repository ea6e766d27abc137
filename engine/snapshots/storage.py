"""Snapshot storage: atomic writes, rotation, recovery; on a disk or in an object store.

The files of a run lie side by side: the latest (`gpt_snapshot.pt`), the one before it (`.prev`), the
one with the lowest held-out loss (`.best`) and the numbered ones (`.step00001000`). Every write goes to
a temporary name, is read back, and then replaces the old file in one operation.
"""

import contextlib
import itertools
import logging
import os
import re
import shutil

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from engine.errors import UserError, one_line
from engine.files import atomic_write, is_local
from engine.snapshots.snapshot import Snapshot, SnapshotError

log = logging.getLogger("gpt")
NUMBERED = r"\.step\d+"
PIECE = 2**18  # bytes read back at once; a piece stays in the processor's cache
KINDS = rf"|\.prev|\.best|{NUMBERED}"  # the first is the latest


def beside(path: str, kind: str) -> str:
    """The path of another kind of snapshot beside `path`: `run/gpt.best.pt` for `run/gpt.pt`, best."""
    root, extension = os.path.splitext(path)
    return f"{root}.{kind}{extension}"


def snapshot_path(path: str, run_dir: str) -> str:
    """`trainer.snapshot_path`, relative to `run_dir` unless it is absolute or a URL."""
    return os.path.join(run_dir, path).replace(os.sep, "/") if is_local(path) else path


def locate(path: str) -> tuple[AbstractFileSystem, str]:
    """The fsspec file system of a path or URL, and the file's name in it."""
    if is_local(path):  # url_to_fs would expand patterns
        return LocalFileSystem(), os.path.abspath(path).replace(os.sep, "/")
    return fsspec.core.url_to_fs(path)


@contextlib.contextmanager
def storage_errors(path: str, what: str = "reached"):
    """Turns the errors of any file system into a `UserError` that names `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # every file system has its own
        raise UserError(f"{path}: cannot be {what}: {one_line(error)}") from error


def exists(path: str) -> bool:
    """Whether there is a file at a path or URL. Raises `UserError` if the file system does not answer."""
    with storage_errors(path):
        file_system, inner = locate(path)
        file_system.invalidate_cache()  # a listing may be older than the file
        return file_system.exists(inner)


def read(path: str) -> bytes:
    """The bytes at a path or URL. Raises `SnapshotError` if there is no such file, and another `UserError` if it cannot
    be read, or not all of it.
    """
    with storage_errors(path):
        file_system, inner = locate(path)
        file_system.invalidate_cache()
        try:
            info = file_system.info(inner)
        except FileNotFoundError as error:  # fsspec raises it for any HTTP failure
            why = f": {one_line(error.__cause__)}" if error.__cause__ else ""
            raise SnapshotError(f"{path}: no such snapshot{why}") from error
        if info.get("type") == "other":  # a pipe, or a device without an end
            raise SnapshotError(f"{path}: no regular file")
        content = file_system.cat_file(inner)
        if info["size"] not in (None, len(content)):  # not every HTTP server sends it
            raise OSError(f"{len(content)} of {info['size']} bytes arrived")
    return content


def load(path: str) -> Snapshot:
    """The verified snapshot at a path or URL. Raises what `read` raises, or `SnapshotError`, naming it."""
    snapshot = Snapshot.from_bytes(read(path), path)
    for name, (size, _) in snapshot.shards.get("files", {}).items():
        file = os.path.join(shards_folder(path, snapshot.shards["folder"]), name)
        if not os.path.exists(file) or os.path.getsize(file) != size:
            raise SnapshotError(f"{path}: {file} is missing or cut off")
    return snapshot


def shards_folder(path: str, folder: str) -> str:
    """The path of a snapshot's shards `folder`, in the folder of the snapshots."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), folder)


def move(source: str, target: str) -> None:
    """Moves a file; in a store, copies and removes it. At every moment, `target` has its old or its new content."""
    if is_local(source):
        os.replace(source, target)
        return
    file_system, inner = locate(source)
    file_system.cp_file(inner, locate(target)[1])
    file_system.rm_file(inner)


def rename(paths: list[str], word: str = "old") -> list[str]:
    """Renames files to `NAME.old1.pt`, with the first number that is free for all; returns the new names."""
    candidates = ([beside(path, f"{word}{n}") for path in paths] for n in itertools.count(1))
    names = next(names for names in candidates if not any(map(exists, names)))
    for old, new in zip(paths, names, strict=True):
        with storage_errors(old, "renamed"):
            move(old, new)
    return names


class SnapshotStorage:
    """The snapshot files of one run, the latest of which is at `path`, a path or URL.

    `keep` numbered snapshots are kept, the newest ones; None for none. Raises `UserError` for a URL that fsspec cannot
    open here.
    """

    def __init__(self, path: str, keep: int | None = None):
        self.path, self.keep = path, keep
        with storage_errors(f"trainer.snapshot_path={path}"):
            self.file_system, _ = locate(path)
        self.previous_path, self.best_path = beside(path, "prev"), beside(path, "best")
        self.temporary_path, self.new_best_path = f"{path}.tmp", f"{self.best_path}.new.tmp"

    def numbered_path(self, step: int) -> str:
        return beside(self.path, f"step{step:08d}")

    # --- writing ---

    def prepare(self) -> None:
        """Creates the folder of the snapshots, and removes the temporary files of a killed writer. Raises `UserError`
        if a file cannot be written or copied there; not every kind of store can copy.
        """
        with storage_errors(self.path, "written"):
            if is_local(self.path):
                os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            self._put(self.temporary_path, b"-")
            move(self.temporary_path, f"{self.path}.check.tmp")
            self._remove_temporary()

    def write(self, content: bytes | memoryview, step: int, is_best: bool, is_numbered: bool) -> None:
        """Atomic write: makes `content` the latest snapshot, and also the best or a numbered one. At every moment, each
        file has its old or its new content. Raises what the file system raises.
        """
        try:
            self._put(self.temporary_path, content)
            self._read_back(content)
            if is_numbered and self.keep:
                self._copy(self.temporary_path, self.numbered_path(step))
                for path in self.present(NUMBERED)[: -self.keep]:
                    self._remove(path)
            if is_best:  # copied before the latest is replaced: a full disk then changes nothing
                self._copy(self.temporary_path, self.new_best_path)
            if exists(self.path):
                self._keep_latest()
            move(self.temporary_path, self.path)
            if is_best:  # if a kill prevents it, `recover_best` copies the latest
                move(self.new_best_path, self.best_path)
        finally:
            with contextlib.suppress(Exception):  # the store is unreachable
                self._remove_temporary()

    def _put(self, path: str, content: bytes | memoryview) -> None:
        if not is_local(path):
            self.file_system.pipe_file(locate(path)[1], bytes(content))
            return
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _read_back(self, content: bytes | memoryview) -> None:
        """Raises OSError unless the temporary file has the `content`: a store or a network disk may lose some of it."""
        self.file_system.invalidate_cache()
        pieces = (content[first : first + PIECE] for first in range(0, len(content), PIECE))
        with self.file_system.open(locate(self.temporary_path)[1], "rb") as file:
            # Comparing a memoryview would take ten times as long.
            if any(file.read(len(piece)) != bytes(piece) for piece in pieces) or file.read(1):
                raise OSError(f"{self.temporary_path}: differs from what was written")

    def _copy(self, source: str, target: str) -> None:
        """Copies atomically: `target` keeps its content, or has all of the new one."""
        if not is_local(source):
            self.file_system.cp_file(locate(source)[1], locate(target)[1])
            return
        with atomic_write(target, "wb") as file, open(source, "rb") as original:
            shutil.copyfileobj(original, file)

    def _keep_latest(self) -> None:
        """Makes the latest snapshot, which is replaced next, also the one before it: by a hard link where possible."""
        link = f"{self.path}.link.tmp"
        if is_local(self.path):
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(self.path, link)
                os.replace(link, self.previous_path)
                return
        self._copy(self.path, self.previous_path)

    def _remove_temporary(self) -> None:
        for path in self.present(KINDS, r"(\.link|\.check|\.new)?(\.tmp)+"):
            self._remove(path)

    def _remove(self, path: str) -> None:
        self.file_system.rm_file(locate(path)[1])

    # --- finding ---

    def present(self, kind: str, suffix: str = "") -> list[str]:
        """The existing snapshots whose kind matches the regular expression `kind`, sorted. `suffix`: of their names."""
        name = os.path.basename(self.path)
        root, extension = os.path.splitext(name)
        pattern = re.compile(rf"{re.escape(root)}(?:{kind}){re.escape(extension)}{suffix}")
        with storage_errors(self.path):
            self.file_system.invalidate_cache()
            try:
                listing = self.file_system.ls(os.path.dirname(locate(self.path)[1]), detail=False)
            except FileNotFoundError:
                return []
        names = sorted(map(os.path.basename, listing))
        folder = self.path.removesuffix(name)
        return [folder + other for other in names if pattern.fullmatch(other)]

    def all(self) -> list[str]:
        """Every snapshot of the run, the latest first."""
        return sorted(self.present(KINDS), key=lambda path: path != self.path)

    def recover(self) -> tuple[Snapshot, str] | None:
        """The latest snapshot and its path, or those of the newest undamaged one, which becomes the latest;
        None without any. Damaged ones are renamed, with a warning. Raises `SnapshotError` if all are damaged, since
        training from scratch would hide the loss; another `UserError` if one that may be good cannot be read.
        """
        damaged: dict[str, str] = {}
        newest: tuple[Snapshot, str] | None = None
        for path in self.all():
            try:
                snapshot = load(path)
            except SnapshotError as error:
                damaged[path] = str(error)
                continue
            if newest is None or snapshot.step > newest[0].step:
                newest = (snapshot, path)
            if path == self.path:
                break
        if newest is None:
            if not damaged:
                return None
            raise SnapshotError(
                f"no undamaged snapshot left: {'; '.join(damaged.values())}; train from scratch with "
                "trainer.resume=never, which keeps the files, or set run_name=NEW_NAME"
            )
        snapshot, path = newest
        for why, moved in zip(damaged.values(), rename([*damaged], "damaged"), strict=True):
            log.warning("%s; renamed to %s; using %s instead", why, moved, path)
        if path != self.path:  # a finished run would not write it again
            with storage_errors(self.path, "written"):
                self._copy(path, self.path)
        return snapshot, path

    # --- after the user went back to an earlier snapshot, or a save was cut off ---

    def rename_later(self, step: int) -> None:
        """Renames the numbered snapshots of later steps than the latest one's, `step`."""
        if later := [path for path in self.present(NUMBERED) if path > self.numbered_path(step)]:
            moved = ", ".join(rename(later))
            log.warning("%s is of step %d: later ones are renamed to %s", self.path, step, moved)

    def recover_best(self, loss: float, step: int) -> bool:
        """Makes the best snapshot that of `loss` and `step` again, as recorded in the latest one. Returns False if none
        of the others is a copy.
        """
        copies = self.best_path, self.path, self.previous_path, self.numbered_path(step)
        found = next((path for path in copies if is_snapshot_of(path, loss, step)), None)
        if found == self.best_path:
            return True
        if exists(self.best_path):
            [moved] = rename([self.best_path])
            log.warning("%s is not that of step %d, the best of this run: renamed to %s", self.best_path, step, moved)
        if found:
            with storage_errors(self.best_path, "written"):
                self._copy(found, self.best_path)
        return found is not None


def is_snapshot_of(path: str, loss: float, step: int) -> bool:
    """Whether the snapshot at `path` is that of `step`, with the held-out `loss`; False if it is damaged or missing."""
    with contextlib.suppress(SnapshotError):
        snapshot = load(path)
        return (snapshot.loss, snapshot.loss_step, snapshot.step) == (loss, step, step)
    return False
