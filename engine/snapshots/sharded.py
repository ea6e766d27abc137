"""Sharded snapshots: every rank writes its own part, for models that do not fit on one host.

With `trainer.snapshot_format=sharded` the tensors lie in a folder beside the snapshot,
`gpt_snapshot.pt.shards/STEP-NAME/`, written and read by torch.distributed.checkpoint, which reshards
them for any number of ranks. The snapshot itself holds everything else and, in `shards`, the name of that
`folder` and of its `files`, each with its [size, SHA-256]. It is written last, so it is complete only if
they are. `python export.py snapshot=... out=single.pt` merges a sharded snapshot into one file.
"""

import contextlib
import dataclasses
import glob
import hashlib
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from engine.errors import UserError, one_line
from engine.parallel import distributed
from engine.parallel.distributed import all_gather, run_on_rank_0
from engine.snapshots.snapshot import Snapshot, SnapshotError, not_finite
from engine.snapshots.storage import SnapshotStorage, load, read, shards_folder

log = logging.getLogger("gpt")


@contextlib.contextmanager
def checkpoint_errors(folder: str) -> Iterator[None]:
    """Turns an error of torch.distributed.checkpoint, raised on every rank, into one line."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise SnapshotError(f"{folder}: rank {rank}: {one_line(cause)}") from error


def save_shards(path: str, snapshot: Snapshot) -> Snapshot:
    """Writes the tensors of `snapshot`, plain or sharded, beside the latest one, at `path`; all ranks take part.

    Returns the rest: `snapshot` with `shards` in place of tensors. Raises `UserError` on every rank if it fails.
    """
    from torch.distributed import checkpoint  # a second to import, for those who use it

    state = {f"model/{name}": value for name, value in snapshot.model_state.items()}
    for name, values in snapshot.optimizer_state.items():
        state |= {f"optimizer/{name}/{key}": value for key, value in values.items()}
    name = run_on_rank_0(lambda: f"{os.path.basename(path)}.shards/{snapshot.step:08d}-{uuid.uuid4().hex[:8]}")
    folder = shards_folder(path, name)
    with checkpoint_errors(folder):
        writer = checkpoint.FileSystemWriter(folder, sync_files=True)
        checkpoint.save(state, storage_writer=writer, no_dist=distributed.size() == 1)
    # Must not raise, as the other ranks wait in `all_gather`: `glob` finds nothing where a folder cannot be read.
    listings = all_gather(sorted(glob.glob("*", root_dir=folder, include_hidden=True)))
    files = digests(listings[0], folder)
    if not files or None in files.values() or any(names != listings[0] for names in listings):
        raise SnapshotError(f"{folder}: not every rank can read the same files there; it must be a shared disk")
    shards = {"folder": name, "files": files}
    return dataclasses.replace(snapshot, model_state={}, optimizer_state={}, shards=shards)


def read_shards(path: str, snapshot: Snapshot, model: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """(model state, optimizer state) in the shards of the `snapshot` at `path`; all ranks take part.

    The tensors of a parameter are sharded as it is in the state dict `model`; those of a parameter that
    is not in it are plain. Raises `SnapshotError` for a file that is damaged, or of a run that diverged.
    """
    from torch.distributed import checkpoint

    shards = snapshot.shards
    folder = shards_folder(path, shards["folder"])
    found = digests([*shards["files"]], folder)
    for name, expected in shards["files"].items():
        if found[name] != expected:
            raise SnapshotError(
                f"{os.path.join(folder, name)}: damaged: size or SHA-256 differs from when it was written; move the "
                f"snapshots of step {snapshot.step} away to resume from the one before"
            )
    reader = checkpoint.FileSystemReader(folder)
    state: dict[str, torch.Tensor] = {}
    model_state: dict[str, torch.Tensor] = {}
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for full_name, about in metadata.items():
        kind, name, *key = full_name.split("/")
        like = model.get(name)
        if like is not None and like.shape == about.size:
            tensor = torch.empty_like(like)
        else:
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
        state[full_name] = tensor
        if kind == "model":
            model_state[name] = tensor
        else:
            optimizer_state.setdefault(name, {})[key[0]] = tensor
    with checkpoint_errors(folder):
        checkpoint.load(state, storage_reader=reader, no_dist=distributed.size() == 1)
    if bad := next(filter(None, all_gather(not_finite(model_state, snapshot.parameters))), None):
        raise SnapshotError(f"{folder}: {bad} is not finite: the run diverged")
    return model_state, optimizer_state


def digests(names: list[str], folder: str) -> dict[str, list[int | str] | None]:
    """[size, SHA-256] of each file, None for one that cannot be read; the ranks share the work."""
    own: dict[str, list[int | str] | None] = {}
    for name in names[distributed.rank() :: distributed.size()]:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                own[name] = [file.tell(), digest]
        except OSError:
            own[name] = None
    return {name: found for part in all_gather(own) for name, found in part.items()}


def remove_unused_shards(storage: SnapshotStorage) -> None:
    """Removes the shards that no snapshot of the run refers to, including renamed ones. If one of these cannot be
    read, or the folder, nothing is removed, with a warning: any of the shards may belong to it.
    """
    name = f"{os.path.basename(storage.path)}.shards"
    parent = shards_folder(storage.path, name)
    if not os.path.isdir(parent):  # nor is one in an object store
        return
    try:
        paths = storage.present(r"(\.(?!tmp|shards)\w+)*")
        used = {Snapshot.from_bytes(read(path), path).shards.get("folder") for path in paths}
        unused = [shards for shards in os.listdir(parent) if f"{name}/{shards}" not in used]
    except (UserError, OSError) as error:
        log.warning("%s; shards in %s are kept until that file is moved away", one_line(error), parent)
        return
    for shards in unused:
        shutil.rmtree(os.path.join(parent, shards), ignore_errors=True)  # or at the next save


def load_full(path: str) -> Snapshot:
    """The snapshot at `path` with all tensors in it, merged if it is sharded. Raises `UserError`."""
    snapshot = load(path)
    if snapshot.shards:
        with distributed.alone():
            states = read_shards(path, snapshot, {})
        snapshot.model_state, snapshot.optimizer_state = states
        snapshot.shards = {}
    return snapshot
