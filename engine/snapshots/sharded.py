"""Sharded snapshots: every process writes its own part, for models that fit no single host.

    python -m engine.snapshots.sharded snapshot=runs/NAME/gpt_snapshot.pt out=single.pt

With `trainer.snapshot_format=sharded` the tensors lie in a folder beside the snapshot,
`gpt_snapshot.pt.shards/STEP-NAME/`, written and read by torch.distributed.checkpoint, which deals
them out anew to however many processes read them. The snapshot itself holds all the rest, where
that folder is, and for each file in it its size and its SHA-256. It is written last, so it is whole
only if they are; everything that is true of snapshots (`snapshot_files.py`) stays true. The command
above puts a sharded snapshot together into one file.
"""

import dataclasses
import functools
import hashlib
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import torch

from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.parallel.distributed import World, gather, run_on_first
from engine.snapshots.snapshot import Snapshot, SnapshotError
from engine.snapshots.storage import BackgroundWriter, is_local, load, shards_folder

warn_once = functools.cache(logging.getLogger("gpt").warning)


def run_folder(path: str) -> str:
    """The name of the folder for all shards of the run whose latest snapshot is at `path`."""
    return f"{os.path.basename(path)}.shards"  # the whole name: of a.1.pt and a.2.pt each its own


def save(path: str, snapshot: Snapshot, world: World) -> Snapshot:
    """Writes the tensors of `snapshot`, plain or sharded, beside the latest one, at `path`; all
    ranks take part.

    Returns what is left to write: `snapshot` with shards. Raises OSError on every rank if it fails.
    """
    from torch.distributed import checkpoint  # takes a second; only for those who use it

    state = {f"model/{name}": value for name, value in snapshot.model_state.items()}
    for name, values in snapshot.optimizer_state.items():
        state |= {f"optimizer/{name}/{key}": value for key, value in values.items()}
    own = f"{snapshot.step:08d}-{uuid.uuid4().hex[:8]}"
    name = run_on_first(lambda: f"{run_folder(path)}/{own}", world)
    folder = shards_folder(path, name)
    writer = checkpoint.FileSystemWriter(folder, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.save(state, storage_writer=writer, no_dist=world.size == 1)
    except checkpoint.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {one_line(cause)}") from error
    listings = gather(sorted(os.listdir(folder)), world)
    if any(listing != listings[0] for listing in listings):
        raise OSError(
            f"{folder}: the processes see different files there: it must be a shared disk"
        )
    files = _checked(listings[0], folder, world)
    if [None, None] in files.values():
        raise OSError(f"{folder}: what was written cannot be read")
    shards = {"folder": name, "files": files}
    return dataclasses.replace(snapshot, model_state={}, optimizer_state={}, shards=shards)


def read(
    path: str,
    shards: dict[str, Any],
    empty: Callable[[str, torch.Size, torch.dtype], torch.Tensor],
    world: World,
) -> tuple[dict, dict]:
    """The states of the model and of the optimizer in the shards of the snapshot at `path`; all
    ranks take part.

    `empty(name, size, type)` makes each tensor, sharded as it is to be here, of or for the
    parameter `name`. Raises `UserError` for a file that is damaged.
    """
    from torch.distributed import checkpoint

    folder = shards_folder(path, shards["folder"])
    found = _checked([*shards["files"]], folder, world)
    for name, expected in shards["files"].items():
        if found[name] != expected:
            raise UserError(
                f"{os.path.join(folder, name)}: damaged: not the size and SHA-256 it was written "
                f"with; move {path} away to resume from the snapshot before it"
            )
    reader = checkpoint.FileSystemReader(folder)
    state: dict[str, torch.Tensor] = {}
    model_state: dict[str, torch.Tensor] = {}
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
    described: dict[str, Any] = reader.read_metadata().state_dict_metadata  # of tensors alone
    for full, about in described.items():
        kind, name, *key = full.split("/")
        state[full] = tensor = empty(name, about.size, about.properties.dtype)
        if kind == "model":
            model_state[name] = tensor
        else:
            optimizer_state.setdefault(name, {})[key[0]] = tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, rightly
        try:
            checkpoint.load(state, storage_reader=reader, no_dist=world.size == 1)
        except checkpoint.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise UserError(f"{folder}: cannot be read: rank {rank}: {one_line(cause)}") from error
    return model_state, optimizer_state


def remove_unused(writer: BackgroundWriter) -> None:
    """Removes the shards that no snapshot refers to, neither those set aside nor one that `writer`
    has yet to write. While one cannot be read, any of them may be its own: none are removed.
    """
    writer.wait()  # the snapshot before is there now, or is not
    files, unwritten = writer.files, writer.unwritten_best
    name = run_folder(files.path)
    parent = shards_folder(files.path, name)
    if not is_local(files.path) or not os.path.isdir(parent):
        return
    used = {unwritten.shards.get("folder")} if unwritten else set()
    for path in files.present(r"(\.(?!tmp|check)\w+)*"):
        if os.path.abspath(path) == parent:  # matches where the snapshot's name has no extension
            continue
        try:
            used.add(load(path).shards.get("folder"))
        except SnapshotError as error:
            warn_once(f"{error}; until it is moved away, no shards are removed from {parent}")
            return
    for shards in os.listdir(parent):
        if f"{name}/{shards}" not in used:
            shutil.rmtree(os.path.join(parent, shards), ignore_errors=True)  # or at the next save


def load_full(path: str) -> Snapshot:
    """The snapshot at `path`, put together where it is sharded. Raises `UserError`."""
    snapshot = load(path)
    return put_together(path, snapshot) if snapshot.shards else snapshot


def put_together(path: str, snapshot: Snapshot) -> Snapshot:
    """The sharded `snapshot`, read from `path`, with its tensors in itself."""
    alone = World(0, 1, 0, 1, torch.device("cpu"))
    snapshot.model_state, snapshot.optimizer_state = read(
        path, snapshot.shards, lambda _, size, dtype: torch.empty(size, dtype=dtype), alone
    )
    snapshot.shards = {}
    return snapshot


def _checked(names: list[str], folder: str, world: World) -> dict[str, list[Any]]:
    """[size, SHA-256] of each file, null for one that cannot be read; the ranks share the work."""
    own: dict[str, list[Any]] = {}
    for name in names[world.rank :: world.size]:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                own[name] = [file.tell(), digest]
        except OSError:
            own[name] = [None, None]
    found = {name: value for part in gather(own, world) for name, value in part.items()}
    return {name: found[name] for name in names}


@dataclasses.dataclass
class PutTogetherConfig:
    """What to put together; every field is an argument, `name=value`."""

    snapshot: str  # the sharded one
    out: str  # the file to write


def main(arguments: list[str]) -> None:
    config = parse(PutTogetherConfig, arguments)
    if not is_local(config.out):
        raise UserError(f"out={config.out}: must be a local file")
    if os.path.exists(config.out):
        raise UserError(f"out={config.out}: already exists")
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(config.out))):
        raise UserError(f"out={config.out}: there is no directory {folder}")
    snapshot = load(config.snapshot)
    if not snapshot.shards:
        raise UserError(f"{config.snapshot}: is not sharded; it is a single file already")
    content = put_together(config.snapshot, snapshot)
    with atomic_write(config.out, "w+b") as file:  # whose bytes in memory would be all of it again
        content.write(file)
    print(f"{config.out}: step {content.step}, {len(content.model_state)} tensors")


if __name__ == "__main__":
    run_program(main)
