"""How a run's state gets into its snapshots and back, with every process taking part.

`Saver` joins what a snapshot is (`snapshot.py`), where it lies (`snapshot_files.py`), and how its
tensors are put together or written in shards (`sharding.py`, `sharded_snapshot.py`). What else is
in a snapshot is the trainer's.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError, one_line
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World
from engine.run.directory import METRICS, SET_ASIDE
from engine.snapshots import sharded as sharded_snapshot
from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import BackgroundWriter, SnapshotFiles, snapshot_path
from trainer_config import TrainerConfig

log = logging.getLogger("gpt")


class Saver:
    """The snapshots of the run in `run_dir`. All ranks have one, to save and restore together; rank
    0 writes. Raises `UserError` on every rank where the run cannot go on from what is there.

    Attributes:
        found: what to resume from, until it is restored; None to start anew, as with
            `resume=never`, where what is there is set aside when training begins.
        files: where they are.
        writer: writes them, on rank 0; on the others it has nothing to do.
        saved_step: that of the latest snapshot; None where it could not be written.
    """

    def __init__(self, config: TrainerConfig, run_dir: str, world: World):
        self.config, self.run_dir, self.world = config, run_dir, world
        path = snapshot_path(config.snapshot_path, run_dir)
        self.files = SnapshotFiles(path, config.keep_snapshots)
        self.writer = BackgroundWriter(self.files)
        self.saved_step: int | None = None
        self._owed_best: Snapshot | None = None  # whose shards could not be written
        self._sets_aside = config.resume == "never" and not self._has_set_aside()
        self.found = None if self._sets_aside else self._find()

    def _has_set_aside(self) -> bool:
        """Whether torchrun has started this very run again, after it renamed what it found."""
        restart = distributed.is_restart(self.world)
        mark = os.path.join(self.run_dir, SET_ASIDE)

        def is_marked() -> bool:
            if not restart:
                with contextlib.suppress(FileNotFoundError):  # of another start
                    os.remove(mark)
            return os.path.exists(mark)

        return distributed.run_on_first(is_marked, self.world)

    def _find(self) -> Snapshot | None:
        """The newest good snapshot, read and verified by rank 0, handed to all; None without any.

        Raises `UserError` on every rank if snapshots exist but none is good, or if there is none
        and `resume=must`.
        """

        def find() -> tuple[bytes, str] | None:
            found = self.files.find(log.warning)
            if found is None and self.config.resume == "must":
                raise UserError(f"trainer.resume=must: there is no snapshot at {self.files.path}")
            return found

        found = distributed.run_on_first(find, self.world)
        if found is None:
            return None
        snapshot = Snapshot.from_bytes(*found)
        log.info("resuming from %s, step %d", found[1], snapshot.step)
        return snapshot

    def open(self) -> None:
        """Makes sure, on rank 0, that all can be written, and renames what is to be set aside."""
        os.makedirs(self.run_dir, exist_ok=True)
        self.files.check_writable()
        if self._sets_aside:
            others = (os.path.join(self.run_dir, name) for name in (METRICS, "tensorboard"))
            paths = [*self.files.all(), *filter(os.path.exists, others)]
            for moved in self.files.set_aside(paths):
                log.info("trainer.resume=never: what was there is now %s", moved)
            open(os.path.join(self.run_dir, SET_ASIDE), "w").close()
            self._sets_aside = False

    def restore(
        self, snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Gives the tensors of `snapshot` to the bare `model` and its `optimizer`, sharded as
        these are. Raises `UserError` where they do not fit.
        """
        own = model.state_dict()
        model_state, optimizer_state = snapshot.model_state, snapshot.optimizer_state
        if snapshot.shards:

            def empty(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
                like = own.get(name)  # none where model.py has changed
                if like is None or like.shape != size:
                    return torch.empty(size, dtype=dtype)
                return torch.empty_like(like)

            model_state, optimizer_state = sharded_snapshot.read(
                self.files.path, snapshot.shards, empty, self.world
            )
        try:
            model.load_state_dict(
                {
                    name: sharding.shard_like(tensor, own[name]) if name in own else tensor
                    for name, tensor in model_state.items()
                }
            )
            groups = optimizer.state_dict()["param_groups"]
            state = {
                i: {key: sharding.shard_like(value, own[name]) for key, value in state_of.items()}
                for i, name in enumerate(_names(model, optimizer))
                if (state_of := optimizer_state.get(name))
            }
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # these are RuntimeErrors, too
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.files.path}: cannot be restored into this model; start another run with "
                "run_name=NEW_NAME, or set this one aside with trainer.resume=never: "
                f"{one_line(error)[:300]}"
            ) from error
        self.saved_step = snapshot.step
        self.found = None

    def save(self, snapshot: Snapshot, latest: bool, best: bool, first: Callable[[], None]) -> None:
        """Begins to write the latest snapshot, the best one, or both; `first()` is done before.

        The tensors of `snapshot` are as they are on each rank, and may be sharded. A save that
        fails is logged; a best one is written with the next save.
        """
        if latest:
            self.saved_step = snapshot.step
        try:
            if self._owed_best is not None and not best:
                self._write(self._owed_best, False, True, first)
            self._owed_best = None
            self._write(snapshot, latest, best, first)
        except (OSError, UserError) as error:  # of shards, on every rank
            self.saved_step = None
            if best:
                self._owed_best = _with_states(snapshot, sharding.copy_to_host)
            if self.world.is_first:
                self.writer.failed(snapshot.step, error)

    def _write(self, snapshot: Snapshot, latest: bool, best: bool, first) -> None:
        """Begins to write a snapshot, or first everyone's part of it; OSError or `UserError` on
        every rank if these cannot be written.
        """
        world = self.world
        if self.config.snapshot_format == "sharded":
            distributed.run_on_first(lambda: sharded_snapshot.remove_unused(self.writer), world)
            snapshot = sharded_snapshot.save(self.files.path, snapshot, world)
        else:
            snapshot = _with_states(snapshot, lambda state: sharding.gather_on_first(state, world))
        if world.is_first:
            self.writer.write(snapshot, latest, best, first)

    def gives_up(self) -> bool:
        """Whether this rank has seen as many saves in a row fail as may."""
        self.writer.poll()
        return self.writer.failures >= self.config.max_save_failures

    def why(self) -> str:
        """What the newest failure was, as far as this rank knows."""
        return self.writer.error if self.world.is_first else "see the error of rank 0"

    def has_saved(self, step: int) -> bool:
        """Waits for the save under way; whether, on rank 0, the latest snapshot is of `step`."""
        self.writer.wait()
        return self.saved_step == step and not self.writer.error

    def finish(self, step: int) -> None:
        """Waits until the last snapshot is written; `UserError` on rank 0 if it could not be."""
        self.writer.wait()
        if self.writer.error:
            raise UserError(
                f"{self.files.path}: the snapshot of step {step} was not written: "
                f"{self.writer.error}"
            )
        if self.world.is_first:
            sharded_snapshot.remove_unused(self.writer)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state of each parameter of the bare `model` that has one, by its name."""
    names = _names(model, optimizer)
    return {names[i]: values for i, values in optimizer.state_dict()["state"].items()}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _with_states(snapshot: Snapshot, change: Callable[[dict], dict]) -> Snapshot:
    """`snapshot` with `change` of the states of model and optimizer."""
    return dataclasses.replace(
        snapshot,
        model_state=change(snapshot.model_state),
        optimizer_state=change(snapshot.optimizer_state),
    )
