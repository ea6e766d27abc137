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
import pickletools
import re
import types
import typing
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from errors import UserError, one_line

FORMAT = 4
END_RECORD = b"PK\x05\x06"  # "end of central directory", 22 bytes when it has no comment
COMMENT = b"sha256:"
DIGEST_LENGTH = 64
# All that the pickle in a snapshot refers to; torch allows more, some of which takes memory.
REFERENCES = r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
# Where shards may lie: names below the snapshot's own folder, that lead nowhere else.
SHARDS_FOLDER, SHARDS_FILE = r"[^/\0]+\.shards/[\w-]+", r"\.?\w[\w.-]*"


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
        metrics_lines: lines of `metrics.jsonl` up to this step.
        processes: how many trained when it was taken.
        vocabulary: the distinct characters, their position being their id.
        text_digest: SHA-256 of the (truncated) text.
        choices: what every `auto` setting came to mean in this run.
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
        """The choices, or none where they were made for another kind of device."""
        return self.choices if self.choices.get("device", device_type) == device_type else {}

    @property
    def model_config(self) -> dict[str, Any]:
        """`config.model`, from which the model is built again. Raises `SnapshotError` where the
        trainer was given a model by another program, which kept no such thing.
        """
        if not self.config.get("model"):
            raise SnapshotError("the snapshot does not say of what size its model is")
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


def check_contents(content: bytes) -> None:
    """Raises ValueError for an archive or a pickle that is not as `torch.save` writes them.

    Reads names and sizes only. An entry that unpacks to more than the file holds, or a name that
    the unpickler would call to get memory, is found here, before it is acted on.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("an entry is compressed")
        if sum(entry.file_size for entry in entries) > len(content):
            raise ValueError("its entries declare more bytes than the file has")
        # Torch's reader looks at the archive by itself: it must not find another one.
        if not entries or min(entry.header_offset for entry in entries):
            raise ValueError("something stands before its first entry")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ValueError("two of its entries have the same name")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no pickle, or several")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if opcode.name == "GLOBAL":
                if not re.fullmatch(REFERENCES, str(argument)):
                    raise ValueError(f"it refers to {argument!r}, which no snapshot does")
            elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
                raise ValueError(f"it uses {opcode.name}, which no snapshot does")


def check_fields(cls: type, fields: dict[str, Any], size: int) -> None:
    """Raises ValueError unless `fields` are those of `cls`, each of its type, with tensors of no
    more than `size` bytes.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    if fields.keys() != kinds.keys():
        raise ValueError(f"its fields are {', '.join(map(str, fields))}")
    for name, kind in kinds.items():
        plain: Any = kind if isinstance(kind, types.UnionType) else typing.get_origin(kind) or kind
        if not isinstance(fields[name], plain):
            raise ValueError(f"{name} is of type {type(fields[name]).__name__}")
    if min(fields["step"], fields["windows_seen"]) < 0:
        raise ValueError(f"its step is {fields['step']}")
    for group in ("data", "model", "optimizer", "trainer"):
        if not isinstance(fields["config"].get(group, {}), dict):
            raise ValueError(f"config.{group} is {fields['config'][group]!r}")
    if fields["shards"]:
        check_shards_field(fields["shards"])
    left = size  # a value takes a byte of the file at least, and a tensor all of its own
    counted: set[tuple] = set()  # one of two names, as a tied head is, is in the file once

    def count(value: Any) -> None:
        nonlocal left
        left -= 1
        if isinstance(value, torch.Tensor):
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            left -= value.nbytes if same not in counted else 0
            counted.add(same)
        if left < 0:
            raise ValueError("its values declare more bytes than the file has")
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if isinstance(inner, list | tuple | set):
            for one in inner:
                count(one)

    count(fields)


def check_shards_field(shards: dict[str, Any]) -> None:
    """Raises ValueError unless `shards` is as `Snapshot` describes it, with names that stay in the
    snapshot's folder. The metadata, which is a pickle, must be among what has a digest.
    """
    folder, files = shards.get("folder"), shards.get("files")
    if not isinstance(folder, str) or not re.fullmatch(SHARDS_FOLDER, folder):
        raise ValueError(f"shards.folder is {folder!r}, not NAME.shards/NAME")
    if not isinstance(files, dict) or ".metadata" not in files:
        raise ValueError("shards.files does not name the shards and their .metadata")
    for name, about in files.items():
        if not isinstance(name, str) or not re.fullmatch(SHARDS_FILE, name):
            raise ValueError(f"shards.files has {name!r}, which is not the plain name of a file")
        if not isinstance(about, list) or [type(value) for value in about] != [int, str]:
            raise ValueError(f"shards.files has {about!r} for {name}, not its size and SHA-256")


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
    flat: dict[str, Any] = {}
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
            f"{path} belongs to another run: {'; '.join(changed)}. Undo the change, start another "
            "run with run_name=NEW_NAME, or set this one aside with trainer.resume=never"
        )
