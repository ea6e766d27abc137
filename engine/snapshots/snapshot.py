"""Snapshots: everything a run needs to go on, in one file that is verified when it is read.

A snapshot is a file of `torch.save` that holds one dictionary, the fields of `Snapshot`. The
SHA-256 of the file is kept in the file, as the comment that ends a ZIP archive: readers of ZIP skip
it, so `torch.load(path, weights_only=True)` reads the file as it is, while a flipped bit or a
missing end anywhere in it is found. Where snapshots lie and how they get there is in
`snapshot_files.py`.
"""

import dataclasses
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config.settings import differences, flatten, is_fixed
from engine.errors import UserError, one_line
from engine.snapshots.checks import check_contents, check_fields

FORMAT = 4
END_RECORD = b"PK\x05\x06"  # "end of central directory", 22 bytes when it has no comment
COMMENT = b"sha256:"
DIGEST_LENGTH = 64


class SnapshotError(UserError):
    """A file that is not a snapshot, or is not whole."""


@dataclass
class Snapshot:
    """The state of a run after `step` optimizer steps: tensors and plain types only.

    The first three fields are the tutorial's. No state of a random generator is in it: dropout is
    seeded anew at every step, from `trainer.seed`, the step and the rank, and the order of the
    windows is a function of the seed and the step. `seed` and `windows_seen` follow from the other
    fields, and are there for readers.

    Attributes:
        model_state: parameter name to tensor, names as in the model before it is wrapped.
        optimizer_state: parameter name to that parameter's optimizer state.
        finished_epoch: how many epochs are complete.
        step: optimizer steps taken.
        windows_seen: training windows taken, `step` times the batch.
        seed: `trainer.seed`.
        scaler_state: the `GradScaler`'s scale and counters; empty unless training in float16.
        best_loss, best_step: the lowest held-out loss so far, nats per character, and where it was.
        loss: the newest held-out loss, nats per character, and `loss_step` where it was taken.
        metrics_lines: lines of `metrics.jsonl` up to this step.
        processes: how many trained when it was taken.
        vocabulary: the distinct characters, their position being their id.
        text_digest: SHA-256 of the (truncated) text.
        choices: what was computed with: device, type, whether compiled and deterministic.
        config: the whole resolved configuration, plain types.
        shards: of a sharded snapshot, which leaves the first two fields empty, where the tensors
            are: `folder`, relative to that of the snapshot, and `files`, the name of each to its
            [size, SHA-256]; see `sharded_snapshot.py`.
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
    metrics_lines: int = 0
    processes: int = 1
    vocabulary: str = ""
    text_digest: str = ""
    choices: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> memoryview:
        """The file's content, digest included."""
        buffer = io.BytesIO()
        self.write(buffer)
        return buffer.getbuffer()

    def write(self, file: io.BytesIO | io.BufferedRandom) -> None:
        """Writes the same into an empty file that can be read, too."""
        torch.save({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, file)
        file.seek(-22, io.SEEK_END)
        if file.read(4) != END_RECORD:
            raise RuntimeError("torch.save no longer ends a file with a bare ZIP end record")
        file.seek(-2, io.SEEK_END)  # the length of the comment
        file.write((len(COMMENT) + DIGEST_LENGTH).to_bytes(2, "little") + COMMENT)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, io.SEEK_END)
        file.write(digest.encode())

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> "Snapshot":
        """The snapshot in `content`, the inverse of `to_bytes`, tensors on the CPU.

        Whoever made the file: no code in it is run, and it takes no more memory than its own size.
        Raises `SnapshotError`, calling it `name`, if it is damaged, of another format, or no
        snapshot at all.
        """
        verify(content, name)
        try:
            check_contents(content)
            fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if fields.get("format") == FORMAT:
                check_fields(cls, fields, len(content))
        except Exception as error:  # a file made by hand can be wrong in any way
            raise SnapshotError(
                f"{name}: not a snapshot of this application: {one_line(error)}"
            ) from error
        if fields.get("format") != FORMAT:
            raise SnapshotError(
                f"{name}: snapshot format {fields.get('format')}, this application reads {FORMAT}"
            )
        return cls(**fields)

    def choices_on(self, device_type: str) -> dict[str, Any]:
        """What the settings that were `auto` came to mean; nothing on another kind of device."""
        if self.choices.get("device", device_type) != device_type:
            return {}
        settings = self.config.get("trainer", {})
        asked = {name for name in self.choices if settings.get(name, "auto") != "auto"}
        if settings.get("use_amp") is False:
            asked.add("amp_dtype")
        return {name: choice for name, choice in self.choices.items() if name not in asked}

    def __str__(self) -> str:
        """Its step, and the newest held-out loss, with the step of that where it is another."""
        if self.loss is None:
            return f"step {self.step}"
        at = "" if self.loss_step == self.step else f" at step {self.loss_step}"
        return f"step {self.step}, held-out loss {self.loss:.4f}{at}"

    @property
    def model_config(self) -> dict[str, Any]:
        """`config.model`, from which the model is built again. Raises `SnapshotError` where the
        trainer was given a model by another program, which kept no such thing.
        """
        if not self.config.get("model"):
            raise SnapshotError(
                "the snapshot does not say of what size its model is: the Trainer was given a "
                "model without a config, and no run_config"
            )
        return self.config["model"]

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Snapshot":
        """A snapshot with `change(tensor)` for each tensor; what was one tensor stays one."""
        seen: dict[tuple, torch.Tensor] = {}

        def visit(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: visit(inner) for key, inner in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel() == 0 or same not in seen:
                seen[same] = change(value)
            return seen[same]

        values = {f.name: visit(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return Snapshot(**values)


def verify(content: bytes | memoryview, name: str) -> None:
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


def check_can_resume(
    snapshot: Snapshot, config: dict[str, Any], vocabulary: str, text_digest: str, path: str
) -> None:
    """Raises `UserError` if the run in `snapshot` cannot go on under `config` and this text, naming
    what differs.
    """
    known = flatten(snapshot.config)  # a program of its own may have kept less
    changed = [
        f"{key} was {was!r}, is {now!r}"
        for key, (was, now) in differences(snapshot.config, config).items()
        if is_fixed(key) and key in known
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
            f"{path} belongs to another run: {'; '.join(changed)}. Undo the change, start another "
            "run with run_name=NEW_NAME, or set this one aside with trainer.resume=never"
        )
