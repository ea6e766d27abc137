"""Snapshot: the state of a run as one verified file.

The file is written by `torch.save` and holds one dictionary, the fields of `Snapshot`. It ends with its
SHA-256, as the comment of the ZIP archive: `torch.load(path, weights_only=True)` ignores the comment, and
any flipped bit or truncation is detected.
"""

import copy
import hashlib
import io
import logging
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn

from engine.config.arguments import this_command
from engine.config.schema import GROUPS, DataConfig, GPTConfig, as_typed, flatten, is_fixed
from engine.errors import UserError, one_line
from engine.files import masked
from engine.parallel import distributed
from engine.parallel.sharding import is_dtensor
from engine.precision import evaluating
from engine.snapshots.state import State
from engine.text.documents import separator_of, unit_of

log = logging.getLogger("gpt")

FORMAT = 7
READABLE_FORMATS = range(4, FORMAT + 1)  # 4 has no probe_logits, 5 no parameters, 6 no characters
END_RECORD = b"PK\x05\x06"  # "end of central directory", 22 bytes when it has no comment
COMMENT = b"sha256:"
DIGEST_LENGTH = 64
PROBED = 16  # first and last characters of a context whose logits are kept
PROBE_TOLERANCE = 0.03  # of the largest logit; bfloat16 and other devices round by less
CHANGED = "model.py gives different outputs than when this snapshot was saved; was it edited?"


class SnapshotError(UserError):
    """A snapshot that is missing, damaged or incomplete."""


@dataclass
class Snapshot(State):
    """The state of a run after `step` optimizer steps, with its tensors: tensors and plain types only.

    The first three arguments are those of PyTorch's minGPT-DDP tutorial. No random generator is stored:
    dropout is seeded at every step from `trainer.seed`, the step and the rank, and the order of the
    windows is a function of the seed and the position.
    """

    # fmt: off
    model_state: dict[str, torch.Tensor]  # by parameter name, as in the unwrapped model
    optimizer_state: dict[str, dict[str, Any]]  # of each parameter that has one, by parameter name
    finished_epoch: int = 0  # complete epochs
    windows_seen: int = 0  # training windows taken: `step` times the batch size
    seed: int = 0  # `trainer.seed`
    scaler_state: dict[str, Any] = field(default_factory=dict)  # of the `GradScaler`; empty unless in float16
    processes: int = 1  # ranks when it was taken
    vocabulary: str = ""  # the distinct characters; a character's position is its id
    text_digest: str = ""  # SHA-256 of the (truncated) text
    characters: int = 0  # of that text, held-out parts included; 0: not known
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration, plain types
    probe_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # see `probe_logits`; may be empty
    parameters: list[str] = field(default_factory=list)  # names in `model_state`; the others are buffers
    shards: dict[str, Any] = field(default_factory=dict)  # the files of the tensors; see sharded.py
    format: int = FORMAT  # version of this layout
    # fmt: on

    def to_bytes(self) -> memoryview:
        """The content of the file, digest included."""
        buffer = io.BytesIO()  # torch.save into a file would hide why that cannot be written
        torch.save(vars(self), buffer)
        buffer.seek(-22, io.SEEK_END)
        if buffer.read(4) != END_RECORD:
            raise RuntimeError("torch.save no longer ends a file with a bare ZIP end record")
        buffer.seek(-2, io.SEEK_END)  # the length of the comment
        buffer.write((len(COMMENT) + DIGEST_LENGTH).to_bytes(2, "little") + COMMENT)
        buffer.write(hashlib.sha256(buffer.getbuffer()).hexdigest().encode())
        return buffer.getbuffer()

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> "Snapshot":
        """The inverse of `to_bytes`, tensors on the CPU.

        Runs no code in the file. Raises `SnapshotError`, naming it `name`, if it is damaged or of a run that diverged,
        and another `UserError` if it has another format or is no snapshot.
        """
        verify(content, name)
        try:
            entries = zipfile.ZipFile(io.BytesIO(content)).infolist()
            if sum(entry.file_size for entry in entries) > len(content):
                raise ValueError("its entries declare more bytes than the file has")
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            snapshot = cls(**upgraded(loaded)) if loaded.get("format") in READABLE_FORMATS else None
            if snapshot:
                check_types(snapshot)
        except Exception as error:  # a crafted file can raise anything
            raise UserError(f"{name}: not a snapshot of this application: {one_line(error)}") from error
        if snapshot is None:
            readable = ", ".join(map(str, READABLE_FORMATS))
            raise UserError(f"{name}: snapshot format {loaded.get('format')}; this application reads {readable}")
        if bad := not_finite(snapshot.model_state, snapshot.parameters):
            raise SnapshotError(f"{name}: {bad} is not finite: the run diverged")
        return snapshot

    def __str__(self) -> str:
        if self.loss is None:
            return f"step {self.step}"
        at = "" if self.loss_step == self.step else f" at step {self.loss_step}"
        return f"step {self.step}, held-out loss {self.loss:.4f}{at}"

    def state(self) -> State:
        """A copy of the run's state, without the tensors."""
        return State(**{f.name: copy.copy(getattr(self, f.name)) for f in fields(State)})

    def earlier_choices(self, device_type: str) -> dict[str, Any]:
        """What this run's `auto` settings became; empty on another type of device."""
        if self.choices.get("device", device_type) != device_type:
            return {}
        settings = self.config.get("trainer", {})
        return {name: choice for name, choice in self.choices.items() if settings.get(name) in ("auto", None)}

    @property
    def model_config(self) -> dict[str, Any]:
        """`config["model"]`, from which the model is rebuilt. Raises `SnapshotError` if another program saved none, or
        if it declares other sizes than the weights have: to build such a model could take hours.
        """
        if not self.config.get("model"):
            raise SnapshotError(
                "the snapshot does not record the size of its model: the Trainer was given a model "
                "without a config, and no run_config"
            )
        model, weights = self.config["model"], self.model_state
        layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        found = {"n_layer": len(layers)} if layers else {}
        for name, sizes in (("tok_emb.weight", ("vocab_size", "n_embd")), ("pos_emb.weight", ("block_size",))):
            if name in weights:
                found |= zip(sizes, weights[name].shape, strict=False)
        if weights:  # of a sharded snapshot, they are elsewhere
            found["ngram_rows"] = len(weights.get("ngrams.weight", ())) // 2
        for name, size in found.items():
            if model.get(name) not in (None, size):
                raise SnapshotError(f"the snapshot declares model.{name}={model[name]}, but its weights have {size}")
        return model

    @property
    def encoding(self) -> str:
        """What the model predicts: "utf-8" for characters, however the text was encoded, or "bytes"."""
        return "bytes" if self.config.get("data", {}).get("encoding") == "bytes" else "utf-8"

    def data_config(self, **changes: Any) -> DataConfig:
        """The settings of the run's text, with `changes`, such as another `path` that is to be read alike."""
        known = {field.name for field in fields(DataConfig)}  # an older run may have others
        recorded = {name: value for name, value in self.config.get("data", {}).items() if name in known}
        try:
            return DataConfig(**recorded | changes)
        except TypeError as error:
            raise SnapshotError(f"the snapshot declares invalid settings of its text: {error}") from error

    @property
    def separator(self) -> str:
        """What separates the documents of the text; empty for none, or one that does not occur."""
        return separator_of(self.config.get("data", {}), self.vocabulary)

    @property
    def unit(self) -> str:
        """What one id of the model stands for."""
        return unit_of(self.encoding)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Snapshot":
        """A snapshot with `change(tensor)` for each tensor; tied tensors stay tied, unless they are sharded."""
        seen: dict[Any, torch.Tensor] = {}

        def visit(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: visit(inner) for key, inner in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            # An empty shard has no address.
            key = id(value) if is_dtensor(value) else (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if key not in seen:
                seen[key] = change(value)
            return seen[key]

        return Snapshot(**visit(vars(self)))


def check_types(snapshot: Snapshot) -> None:
    """Raises TypeError if a field, or one of its parts that others rely on, is of another type than declared."""
    for name, hint in get_type_hints(Snapshot).items():
        kind = get_origin(hint) if get_origin(hint) in (dict, list) else hint
        value = getattr(snapshot, name)
        if not isinstance(value, kind) and not (isinstance(value, int) and float in (*get_args(hint), hint)):
            raise TypeError(f"{name} is of type {type(value).__name__}")
    for name, tensor in snapshot.model_state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"the weight {name} is of type {type(tensor).__name__}")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise TypeError(f"{name} has no plain values")
    snapshot.separator  # noqa: B018  # of an odd type
    files = snapshot.shards.get("files", {})
    groups = {group.rstrip("."): snapshot.config.get(group.rstrip("."), {}) for group in GROUPS if group}
    for name, part in {**groups, **snapshot.optimizer_state, "files": files}.items():
        if not isinstance(part, dict):
            raise TypeError(f"{name} is of type {type(part).__name__}")
    if snapshot.shards and not isinstance(snapshot.shards["folder"], str):
        raise TypeError("the folder of the shards is no text")
    for size, digest in files.values():
        if not (isinstance(size, int) and isinstance(digest, str)):
            raise TypeError("the files of the shards are not [size, SHA-256] each")


def upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a snapshot of any readable format as those of this one."""
    if fields["format"] < 6 and "micro_batch_size" in fields["choices"]:
        fields["micro_batch_size"] = fields["choices"].pop("micro_batch_size")
    if "data" in fields["config"]:  # older runs separated no documents, and kept CRLF
        fields["config"]["data"] = {"separator": "none", "newlines": "keep"} | fields["config"]["data"]
    trainer = fields["config"].get("trainer", {})
    if trainer.get("use_amp") is False:
        trainer["amp_dtype"] = "float32"
    for name in {"use_amp", "max_save_failures"} & trainer.keys():  # null in a `TrainerConfig`
        trainer[name] = None
    return fields


def verify(content: bytes | memoryview, name: str) -> None:
    """Raises `SnapshotError`, naming the content `name`, unless its SHA-256 is right."""
    if content[-DIGEST_LENGTH - len(COMMENT) : -DIGEST_LENGTH] != COMMENT:
        raise SnapshotError(f"{name}: not a complete snapshot of this application (its closing digest is missing)")
    digest = hashlib.sha256(memoryview(content)[:-DIGEST_LENGTH]).hexdigest()
    if digest.encode() != content[-DIGEST_LENGTH:]:
        raise SnapshotError(f"{name}: damaged: its SHA-256 differs from when it was written")


def not_finite(model_state: dict[str, torch.Tensor], parameters: list[str]) -> str | None:
    """The first of `parameters` of which this rank's part is not finite. A buffer, such as a mask, may be infinite;
    without `parameters`, in older snapshots, it is the first tensor with a nan.
    """
    for name in parameters or model_state:
        value = model_state.get(name)
        value = value.to_local() if is_dtensor(value) else value
        if isinstance(value, torch.Tensor) and not (value.isfinite() if parameters else ~value.isnan()).all():
            return name
    return None


def check_can_resume(
    snapshot: Snapshot, path: str, config: dict[str, Any], defaults: dict[str, Any], digest: str
) -> dict[str, tuple[Any, Any]]:
    """Raises `UserError`, naming the differences, if the run in `snapshot`, at `path`, cannot resume with these
    settings and a text of this `digest`. Returns all other changes: before and now, by dotted key. Settings that the
    snapshot lacks have their `defaults` (dotted keys). What may be secret in a URL is not compared.
    """
    old, new = masked(defaults | flatten(snapshot.config)), masked(flatten(config))
    common = sorted(old.keys() & new.keys())  # either may know fewer settings
    changes = {key: (old[key], new[key]) for key in common if old[key] != new[key]}
    was, now = snapshot.text_digest, digest
    held_out = [key for key in ("data.val_path", "data.test_path") if was != now and (old.get(key) or new.get(key))]
    if was != now:
        changes.pop("model.vocab_size", None)  # follows from the text
    if "data.val_path" in held_out:
        changes.pop("data.train_split", None)  # as well
    fixed = {key: values for key, values in changes.items() if is_fixed(key)}
    shown = fixed | {key: changes[key] for key in held_out if key in changes}
    refused = [f"{key} was {as_typed(before)}, is {as_typed(after)}" for key, (before, after) in shown.items()]
    if was != now:
        before, after = changes.pop("data.path", (" and ".join(["the text", *held_out]), "now it"))
        refused.append(f"{before} had SHA-256 {was[:12]}, {after} has {now[:12]}")
    if refused:
        name = "run_name" if new.get("run_dir") == f"runs/{new.get('run_name')}" else "run_dir"
        tuned = ""
        if was != now and not fixed and "run_dir" in new:
            source = new["run_dir"] if path.startswith(f"{new['run_dir']}/") else path
            other = (f"init_from={source}", f"{name}={str(new.get(name)).rstrip('/')}-2")
            command = this_command(*other, without=("model.", "run_", "trainer.resume"))
            tuned = f"; to fine-tune this model on the changed text: {command}"
        raise UserError(
            f"{path} belongs to another run: {'; '.join(refused)}. Undo the change, start another run "
            f"with run_name=NEW_NAME, or rename this one's snapshots with trainer.resume=never{tuned}"
        )
    return changes


def log_changes(snapshot: Snapshot, changes: dict[str, tuple[Any, Any]]) -> None:
    """Logs the changes that `check_can_resume` returned, and those of the hardware."""
    changes["processes"] = (snapshot.processes, distributed.size())
    changes["device"] = (snapshot.choices.get("device", distributed.device().type), distributed.device().type)
    for key, (was, now) in changes.items():
        # The minutes follow from the steps: see engine/sizing/choose.py.
        if was != now and key not in ("trainer.resume", "trainer.max_minutes"):
            was, now = as_typed(was), as_typed(now)
            log.info("changed since the snapshot: %s was %s, is %s", key, was, now)


def probe_ids(vocab_size: int, block_size: int) -> torch.Tensor:
    """The ids 0, 1, 2, ..., (T,): a whole context, as an edit of the model may affect its end only."""
    return torch.arange(block_size) % vocab_size


@torch.no_grad()
def probe_logits(model: nn.Module, device: torch.device | str) -> torch.Tensor:
    """Probe: the logits (T, V) of `model`, in evaluation mode, at the beginning and the end of `probe_ids`; float32 on
    the CPU. A snapshot holds weights, not code: loading computes the probe again, and different logits mean that the
    model's code has changed. Empty for a model without a `GPTConfig`.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, GPTConfig):
        return torch.empty(0)
    sizes = config.complete()
    ids = probe_ids(sizes.vocab_size, sizes.block_size).to(device)
    with evaluating(model):
        logits = model(ids[None])[0][0].float().cpu()
    return torch.cat((logits[:PROBED], logits[PROBED:][-PROBED:]))


def has_changed(logits: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Whether `logits` differ from those `recorded` in a snapshot; False if it has none."""
    if recorded.numel() == 0:
        return False
    logits = logits[: len(recorded)]  # older snapshots have only the first ones
    if logits.shape != recorded.shape:
        return True
    limit = PROBE_TOLERANCE * recorded.abs().max().clamp(min=1.0)
    return not bool((logits - recorded).abs().max() <= limit)
