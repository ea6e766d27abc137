"""Snapshots: everything a run needs to go on, written whole or not at all, and verified when read.

A snapshot is a file of `torch.save` that holds one dictionary, the fields of `Snapshot`. The
SHA-256 of the file is kept in the file, as the comment that ends a ZIP archive: readers of ZIP skip
it, so `torch.load(path, weights_only=True)` reads the file as it is, while a flipped bit or a
missing end anywhere in it is found.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec
import torch

from errors import UserError

FORMAT = 1
END_RECORD = b"PK\x05\x06"  # "end of central directory", 22 bytes when it has no comment
COMMENT = b"sha256:"
DIGEST_LENGTH = 64


class SnapshotError(UserError):
    """A file that is not a snapshot, or is not whole."""


@dataclass
class Snapshot:
    """The state of a run after `step` optimizer steps: tensors and plain types only.

    The first three fields are the tutorial's. The random state is (`seed`, `step`): dropout is
    seeded anew at every step from them and the rank, and so is the data order from `seed` and
    `windows_seen`.

    Attributes:
        model_state: parameter name to tensor, names as in the model before it is wrapped.
        optimizer_state: parameter name to that parameter's optimizer state.
        finished_epoch: how many epochs are complete.
        step: optimizer steps taken.
        windows_seen: position in the endless stream of training windows.
        seed: `trainer.seed`.
        scaler_state: the `GradScaler`'s scale and counters; empty unless training in float16.
        best_loss, best_step: the lowest held-out loss so far, nats per character, and where it was.
        loss: the newest held-out loss, nats per character, and `loss_step` where it was taken.
        vocabulary: the distinct characters, their position being their id.
        text_digest: SHA-256 of the (truncated) text.
        choices: what every `auto` setting came to mean in this run.
        config: the whole resolved configuration, plain types.
        format: the version of this layout.
    """

    model_state: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, Any]]
    finished_epoch: int = 0
    step: int = 0
    windows_seen: int = 0
    seed: int = 0
    scaler_state: dict[str, Any] = field(default_factory=dict)
    best_loss: float | None = None
    best_step: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    vocabulary: str = ""
    text_digest: str = ""
    choices: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def save(self, path: str) -> None:
        """Writes the snapshot to `path` (local or any fsspec URL), whole or not at all."""
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytearray:
        """The file's content, digest included."""
        buffer = io.BytesIO()
        torch.save({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, buffer)
        content = bytearray(buffer.getbuffer())
        comment_length = len(COMMENT) + DIGEST_LENGTH
        if content[-22:-18] != END_RECORD:
            raise RuntimeError("torch.save no longer ends a file with a bare ZIP end record")
        content[-2:] = comment_length.to_bytes(2, "little")
        content += COMMENT
        content += hashlib.sha256(content).hexdigest().encode()
        return content

    @classmethod
    def load(cls, path: str) -> "Snapshot":
        """Reads and verifies the snapshot at `path`, tensors on the CPU.

        Raises `SnapshotError` naming the file if it is missing, damaged, of another format, or no
        snapshot at all.
        """
        return cls.from_bytes(read(path), path)

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> "Snapshot":
        """The snapshot in `content`, the inverse of `to_bytes`; errors call it `name`."""
        verify(content, name)
        fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if fields.get("format") != FORMAT:
            raise SnapshotError(
                f"{name}: snapshot format {fields.get('format')}, this application reads {FORMAT}"
            )
        return cls(**fields)


def read(path: str) -> bytes:
    """The bytes at `path`; `SnapshotError` if there are none to be had."""
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise SnapshotError(f"{path}: no such snapshot") from error
    except Exception as error:  # every file system has its own errors
        raise SnapshotError(f"{path}: cannot be read: {one_line(error)}") from error


def verify(content: bytes, name: str) -> None:
    """Raises `SnapshotError`, calling the content `name`, unless it ends with the digest of all
    that stands before.
    """
    if content[-DIGEST_LENGTH - len(COMMENT) : -DIGEST_LENGTH] != COMMENT:
        raise SnapshotError(
            f"{name}: not a whole snapshot of this application (its closing digest is missing)"
        )
    digest = hashlib.sha256(memoryview(content)[:-DIGEST_LENGTH]).hexdigest()
    if digest.encode() != content[-DIGEST_LENGTH:]:
        raise SnapshotError(
            f"{name}: damaged: its content does not have the SHA-256 it was written with"
        )


def beside(path: str, kind: str) -> str:
    """The path of the `prev` or `best` snapshot that belongs to the latest one at `path`."""
    root, extension = os.path.splitext(path)
    return f"{root}.{kind}{extension}"


def exists(path: str) -> bool:
    """Whether there is a file at `path`; `SnapshotError` if its file system cannot be asked."""
    try:
        file_system, inner = fsspec.core.url_to_fs(path)
        return file_system.exists(inner)
    except Exception as error:  # every file system has its own errors
        raise SnapshotError(f"{path}: cannot be reached: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_local(path: str) -> bool:
    return "://" not in path


def write_whole(path: str, content: bytes | bytearray) -> None:
    """Puts `content` at `path` so that a reader finds the old file or the new one, and nothing in
    between.

    A local file is written beside its final place, flushed to the disk, and renamed; an object
    store takes an object whole. OSError if it could not be written: what was at `path` is then
    still there.
    """
    if not is_local(path):
        file_system, inner = fsspec.core.url_to_fs(path)
        file_system.pipe_file(inner, bytes(content))
        return
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_folder(folder: str) -> None:
    """Makes renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_latest(path: str, content: bytes | bytearray) -> None:
    """Makes `content` the snapshot at `path`, keeping the one that was there as `prev`.

    At every moment `path` holds a whole snapshot, the old one or the new.
    """
    previous = beside(path, "prev")
    if is_local(path):
        if os.path.exists(path):
            link = f"{previous}.tmp"
            with contextlib.suppress(FileNotFoundError):
                os.remove(link)
            os.link(path, link)
            os.replace(link, previous)
    elif exists(path):
        file_system, inner = fsspec.core.url_to_fs(path)
        file_system.copy(inner, fsspec.core.url_to_fs(previous)[1])
    write_whole(path, content)


def find(path: str, warn: Callable[[str], None]) -> tuple[bytes, str] | None:
    """The content of a run's newest good snapshot and where it was; None if there is no snapshot at
    all.

    Looks at the latest (`path`), then at the one before it. A bad one is reported through
    `warn(message)`. Raises `SnapshotError` if snapshots exist but none is good: starting from zero
    would hide the loss.
    """
    problems = []
    for candidate in (path, beside(path, "prev")):
        if not exists(candidate):
            continue
        try:
            content = read(candidate)
            verify(content, candidate)
        except SnapshotError as error:
            problems.append(str(error))
            continue
        if problems:  # out of the way, or the next save would keep it in place of the good one
            moved = set_aside([path], "damaged")
            warn(f"{problems[0]}; it is now {moved[0]}; going on from the one before, {candidate}")
        return content, candidate
    if problems:
        raise SnapshotError(
            f"no good snapshot left: {'; '.join(problems)}; move them away to start anew, or set "
            "run_name=NEW_NAME"
        )
    return None


def family(path: str) -> list[str]:
    """The latest snapshot of a run, which is at `path`, and those that lie beside it."""
    return [path, beside(path, "prev"), beside(path, "best")]


def set_aside(paths: list[str], word: str = "old") -> list[str]:
    """Renames those of `paths` that exist to the first number free for all (`NAME.old1.pt`, ...).

    Returns the new names.
    """
    present = [path for path in paths if exists(path)]
    number = 1
    while any(exists(beside(path, f"{word}{number}")) for path in present):
        number += 1
    moved = []
    for old in present:
        new = beside(old, f"{word}{number}")
        file_system, inner = fsspec.core.url_to_fs(old)
        file_system.mv(inner, fsspec.core.url_to_fs(new)[1])
        moved.append(new)
    return moved


# What a run may not change when it goes on: the result would be neither the old run's nor the new
# one's. The text is compared by its content, not by where it came from.
FIXED = [
    "model.arch",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.vocab_size",
    "model.block_size",
    "model.embd_pdrop",
    "model.resid_pdrop",
    "model.attn_pdrop",
    "model.bias",
    "model.tie_weights",
    "data.train_split",
    "data.truncate",
    "optimizer.name",
    "optimizer.decay_embeddings",
    "trainer.seed",
    "trainer.batch_size",
]


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ between two resolved configurations, with (old, new)."""
    old, new = flatten(old), flatten(new)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_can_resume(
    snapshot: Snapshot, config: dict[str, Any], vocabulary: str, text_digest: str, path: str
) -> None:
    """Raises `UserError` if the run in `snapshot` cannot go on under `config` and this text, naming
    what differs.
    """
    changed = [
        f"{key} was {was!r}, is {now!r}"
        for key, (was, now) in differences(snapshot.config, config).items()
        if key in FIXED
    ]
    if snapshot.text_digest != text_digest:
        changed.append(
            f"the text has SHA-256 {text_digest[:12]}..., was {snapshot.text_digest[:12]}..."
        )
    if snapshot.vocabulary != vocabulary:
        changed.append(
            f"the vocabulary has {len(vocabulary)} characters, had {len(snapshot.vocabulary)}"
        )
    if changed:
        raise UserError(
            f"{path} is of another run: {'; '.join(changed)}. Undo the change, start another run "
            "with "
            "run_name=NEW_NAME, or set this one aside with trainer.resume=never"
        )
