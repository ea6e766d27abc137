"""Snapshot: the state of a run as one verified file.

The file is written by `torch.save` and holds one dictionary, the fields of `Snapshot`. The SHA-256 of
the file stands in the file, as the comment that ends a ZIP archive: readers of ZIP skip it, so
`torch.load(path, weights_only=True)` reads the file unchanged, and a flipped bit or a missing end
anywhere in it is detected.
"""

import dataclasses
import hashlib
import io
import logging
import pickletools
import re
import typing
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config.settings import differences, flatten, is_fixed
from engine.errors import UserError, one_line

log = logging.getLogger("gpt")

FORMAT = 5
READABLE_FORMATS = (4, 5)  # 4 has no probe_logits
END_RECORD = b"PK\x05\x06"  # "end of central directory", 22 bytes when it has no comment
COMMENT = b"sha256:"
DIGEST_LENGTH = 64
# Globals allowed in the pickle.
PICKLED = r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict"


class SnapshotError(UserError):
    """A file that is not a snapshot, or is damaged."""


@dataclass
class Snapshot:
    """The state of a run after `step` optimizer steps: tensors and plain types only.

    The first three fields are the tutorial's. No random generator is stored: dropout is seeded at every
    step from `trainer.seed`, the step and the rank, and the order of the windows is a function of the
    seed and the position.

    Attributes:
        model_state: parameter name to tensor, names as in the unwrapped model.
        optimizer_state: parameter name to that parameter's optimizer state.
        finished_epoch: number of complete epochs.
        step: optimizer steps taken.
        windows_seen: training windows taken, `step` times the batch size.
        seed: `trainer.seed`.
        scaler_state: scale and counters of the `GradScaler`; empty unless training in float16.
        best_loss, best_step: lowest held-out loss so far, nats per character, and its step.
        loss, loss_step: newest held-out loss, nats per character, and its step.
        metrics_lines: lines of `metrics.jsonl` up to this step.
        processes: world size when it was taken.
        vocabulary: the distinct characters; a character's position is its id.
        text_digest: SHA-256 of the (truncated) text.
        choices: resolved `auto` settings: device, dtype, whether compiled and deterministic.
        config: the resolved configuration, plain types.
        probe_logits: logits for one fixed input, which show whether the model's code has changed;
            empty if the trainer was given no `probe`.
        shards: for a sharded snapshot, whose first two fields are empty: `folder`, relative to the
            snapshot's, and `files`, file name to [size, SHA-256]; see `sharded.py`.
        format: version of this layout.
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
    probe_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    shards: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> memoryview:
        """The content of the file, digest included."""
        buffer = io.BytesIO()
        self.write(buffer)
        return buffer.getbuffer()

    def write(self, file: io.BytesIO | io.BufferedRandom) -> None:
        """Writes the content into an empty file that is open for reading, too."""
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
        """The inverse of `to_bytes`, tensors on the CPU.

        No code in the file is run, and reading takes no more memory than the file's size, whoever made
        it. Raises `SnapshotError`, calling the content `name`, if it is damaged, of another format, or
        no snapshot.
        """
        verify(content, name)
        try:
            check_archive(content)
            fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if fields.get("format") in READABLE_FORMATS:
                check_types(cls, fields)
                return cls(**fields)
        except Exception as error:  # a file made by hand can be wrong in any way
            raise SnapshotError(
                f"{name}: not a snapshot of this application: {one_line(error)}"
            ) from error
        raise SnapshotError(
            f"{name}: snapshot format {fields.get('format')}; this application reads "
            f"{' and '.join(map(str, READABLE_FORMATS))}"
        )

    def choices_on(self, device_type: str) -> dict[str, Any]:
        """What the settings that were `auto` resolved to; empty on another kind of device."""
        if self.choices.get("device", device_type) != device_type:
            return {}
        settings = self.config.get("trainer", {})
        explicit = {name for name in self.choices if settings.get(name, "auto") != "auto"}
        if settings.get("use_amp") is False:
            explicit.add("amp_dtype")
        return {name: choice for name, choice in self.choices.items() if name not in explicit}

    def __str__(self) -> str:
        if self.loss is None:
            return f"step {self.step}"
        at = "" if self.loss_step == self.step else f" at step {self.loss_step}"
        return f"step {self.step}, held-out loss {self.loss:.4f}{at}"

    @property
    def model_config(self) -> dict[str, Any]:
        """`config["model"]`, from which the model is rebuilt. Raises `SnapshotError` if another program
        saved none.
        """
        if not self.config.get("model"):
            raise SnapshotError(
                "the snapshot does not record the size of its model: the Trainer was given a model "
                "without a config, and no run_config"
            )
        return self.config["model"]

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Snapshot":
        """A snapshot with `change(tensor)` for each tensor; tied tensors stay tied."""
        seen: dict[tuple, torch.Tensor] = {}

        def visit(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: visit(inner) for key, inner in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel() == 0 or key not in seen:
                seen[key] = change(value)
            return seen[key]

        values = {f.name: visit(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return Snapshot(**values)


def verify(content: bytes | memoryview, name: str) -> None:
    """Raises `SnapshotError`, calling the content `name`, unless its trailing SHA-256 is right."""
    if content[-DIGEST_LENGTH - len(COMMENT) : -DIGEST_LENGTH] != COMMENT:
        raise SnapshotError(
            f"{name}: not a complete snapshot of this application (its closing digest is missing)"
        )
    digest = hashlib.sha256(memoryview(content)[:-DIGEST_LENGTH]).hexdigest()
    if digest.encode() != content[-DIGEST_LENGTH:]:
        raise SnapshotError(f"{name}: damaged: its SHA-256 differs from when it was written")


def check_archive(content: bytes) -> None:
    """Raises ValueError for an archive that would take more memory than its size: a compressed entry,
    or a pickle with a global such as bytearray.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("an entry is compressed")
        if sum(entry.file_size for entry in entries) > len(content):
            raise ValueError("its entries declare more bytes than the file has")
        [pickled] = [entry for entry in entries if entry.filename.lower().endswith("data.pkl")]
        for opcode, argument, _ in pickletools.genops(archive.read(pickled)):
            # Other opcodes that name a global are unknown to `torch.load`.
            if "GLOBAL" in opcode.name and not re.fullmatch(PICKLED, str(argument)):
                raise ValueError(f"it refers to {argument!r}")


def check_types(cls: type, fields: dict[str, Any]) -> None:
    """Raises ValueError for a field that is not of the type that the dataclass `cls` declares."""
    for f in dataclasses.fields(cls):
        declared: Any = dict if typing.get_origin(f.type) is dict else f.type
        if f.name in fields and not isinstance(fields[f.name], declared):
            raise ValueError(f"{f.name} is of type {type(fields[f.name]).__name__}")
    if fields.get("step", 0) < 0:
        raise ValueError(f"its step is {fields['step']}")
    for group in ("data", "model", "optimizer", "trainer"):
        if not isinstance(fields.get("config", {}).get(group, {}), dict):
            raise ValueError(f"config.{group} is {fields['config'][group]!r}")


def check_can_resume(
    snapshot: Snapshot,
    config: dict[str, Any],
    *,
    vocabulary: str,
    text_digest: str,
    processes: int,
    device: str,
    path: str,
) -> None:
    """Raises `UserError` if the run in `snapshot`, at `path`, cannot resume with these settings and this
    text, naming what differs. Logs what has changed otherwise.
    """
    recorded, current = flatten(snapshot.config), flatten(config)  # either may know fewer settings
    changes = {
        key: values
        for key, values in differences(snapshot.config, config).items()
        if key in recorded and key in current
    }
    refused = [
        f"{key} was {was!r}, is {now!r}" for key, (was, now) in changes.items() if is_fixed(key)
    ]
    if snapshot.text_digest != text_digest:
        refused.append(
            f"the text has SHA-256 {text_digest[:12]}..., was {snapshot.text_digest[:12]}..."
        )
    if snapshot.vocabulary != vocabulary:
        refused.append(
            f"the vocabulary has {len(vocabulary)} characters, had {len(snapshot.vocabulary)}"
        )
    if refused:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(refused)}. Undo the change, start another run "
            "with run_name=NEW_NAME, or set this one aside with trainer.resume=never"
        )
    changes["processes"] = (snapshot.processes, processes)
    changes["device"] = (snapshot.choices.get("device", device), device)
    for key, (was, now) in changes.items():
        if was != now and key != "trainer.resume":
            log.info("changed since the snapshot: %s was %s, is %s", key, was, now)
