"""Snapshot manager: saves a run's state in the background, and restores it.

A save is one cycle: collect the tensors from all ranks, copy them, and let a thread of rank 0 write
the file while training continues. `wait` ends the cycle; every rank learns its result. All ranks call
every method at the same point of the run.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError, one_line
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World
from engine.snapshots.sharded import read_shards, remove_unused, save_shards
from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import SET_ASIDE, SnapshotStorage, snapshot_path

log = logging.getLogger("gpt")


class SnapshotManager:
    """The snapshots of the run in `run_dir`, the latest at `path` (relative to it, or a URL).

    Args:
        resume: auto, must or never, as `trainer.resume`.
        keep: number of numbered snapshots to keep; None for none.
        sharded: every rank writes its own part.
        max_failures: saves in a row that may fail before `wait` raises.

    Attributes:
        found: the snapshot to resume from, until it is restored; None to train from scratch.
        saved_step: step of the latest snapshot written or being written; None without one.
        best: (held-out loss, step) of the best snapshot written or being written; None without one.

    Raises `UserError` on every rank if the run cannot resume from the files that exist.
    """

    def __init__(
        self,
        path: str,
        run_dir: str,
        world: World,
        *,
        resume: str = "auto",
        keep: int | None = None,
        sharded: bool = False,
        max_failures: int = 3,
    ):
        self.run_dir, self.world, self.sharded = run_dir, world, sharded
        self.storage = SnapshotStorage(snapshot_path(path, run_dir), keep)
        self.max_failures, self.failures = max_failures, 0
        self.saved_step: int | None = None
        self.best: tuple[float, int] | None = None
        self._thread = ThreadPoolExecutor(1, "snapshot", lower_thread_priority)
        self._saving: int | None = None  # step of the save in progress
        self._before: tuple[int | None, tuple[float, int] | None]  # saved_step, best before it
        self._written: Future[None] | None = None  # on rank 0
        self._sets_aside = resume == "never" and not self._has_set_aside()
        self.found = None if self._sets_aside else self._find(resume == "must")

    @property
    def path(self) -> str:
        return self.storage.path

    # ----------------------------------------------------------------------------------------------
    # Before the first step

    def _has_set_aside(self) -> bool:
        """Whether this is a restart by torchrun, after which resume=never must not apply twice."""
        restart = distributed.is_restart(self.world)
        mark = os.path.join(self.run_dir, SET_ASIDE)

        def is_marked() -> bool:
            if not restart:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(mark)
            return os.path.exists(mark)

        return distributed.run_on_first(is_marked, self.world)

    def _find(self, must: bool) -> Snapshot | None:
        """The newest undamaged snapshot, read and verified by rank 0, sent to all."""

        def find() -> tuple[bytes, str] | None:
            found = self.storage.find()
            if found is None and must:
                raise UserError(f"trainer.resume=must: there is no snapshot at {self.path}")
            return found

        found = distributed.run_on_first(find, self.world)
        if found is None:
            return None
        snapshot = Snapshot.from_bytes(*found)
        log.info("resuming from %s, step %d", found[1], snapshot.step)
        return snapshot

    def open(self, others: tuple[str, ...] = ()) -> None:
        """On rank 0: checks that snapshots can be written. With resume=never, renames the old ones and
        the files `others` of the run directory.
        """
        os.makedirs(self.run_dir, exist_ok=True)
        self.storage.check_writable()
        if self._sets_aside:
            paths = [os.path.join(self.run_dir, name) for name in others]
            paths = [*self.storage.all(), *filter(os.path.exists, paths)]
            for moved in self.storage.set_aside(paths):
                log.info("trainer.resume=never: renamed to %s", moved)
            open(os.path.join(self.run_dir, SET_ASIDE), "w").close()
            self._sets_aside = False

    def restore(
        self, snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Loads the tensors of `snapshot` into the unwrapped `model` and its `optimizer`, sharded as
        these are. Raises `UserError` if they do not fit.
        """
        own = model.state_dict()
        model_state, optimizer_state = snapshot.model_state, snapshot.optimizer_state
        if snapshot.shards:

            def empty(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
                like = own.get(name)  # None if model.py has changed
                if like is None or like.shape != size:
                    return torch.empty(size, dtype=dtype)
                return torch.empty_like(like)

            model_state, optimizer_state = read_shards(
                self.path, snapshot.shards, empty, self.world
            )
        try:
            model.load_state_dict(
                {
                    name: sharding.shard_like(tensor, own[name]) if name in own else tensor
                    for name, tensor in model_state.items()
                }
            )
            state = {
                i: {key: sharding.shard_like(value, own[name]) for key, value in values.items()}
                for i, name in enumerate(parameter_names(model, optimizer))
                if (values := optimizer_state.get(name))
            }
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # subclasses of RuntimeError
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.path}: cannot be restored into this model; start another run with "
                "run_name=NEW_NAME, or set this one aside with trainer.resume=never: "
                f"{one_line(error)[:300]}"
            ) from error
        self.saved_step = snapshot.step
        if snapshot.best_loss is not None and snapshot.best_step is not None:
            self.best = (snapshot.best_loss, snapshot.best_step)
        self.found = None

    # ----------------------------------------------------------------------------------------------
    # Saving

    def save(self, snapshot: Snapshot, latest: bool, best: bool) -> None:
        """Starts to write `snapshot` as the latest one, the best one, or both, after the previous save has
        ended. Its tensors may be sharded, and may change as soon as this returns.

        A save that fails is logged, and counts in `failures`. Raises `UserError` on every rank after
        `max_failures` in a row.
        """
        self.wait()
        self._saving, self._before = snapshot.step, (self.saved_step, self.best)
        if latest:
            self.saved_step = snapshot.step
        if best:
            assert snapshot.best_loss is not None and snapshot.best_step is not None
            self.best = (snapshot.best_loss, snapshot.best_step)
        try:
            if self.sharded:
                distributed.run_on_first(lambda: remove_unused(self.storage), self.world)
                snapshot = save_shards(self.path, snapshot, self.world)
            else:
                snapshot = dataclasses.replace(
                    snapshot,
                    model_state=sharding.gather_on_first(snapshot.model_state, self.world),
                    optimizer_state=sharding.gather_on_first(snapshot.optimizer_state, self.world),
                )
        except (OSError, UserError) as error:  # of shards, raised on every rank
            self._finish_save(one_line(error))
            return
        if self.world.is_first:
            copied = snapshot.map_tensors(lambda tensor: tensor.detach().clone())
            ready = None
            if torch.cuda.is_initialized():
                ready = torch.cuda.current_stream().record_event()
            # In a list, to be taken out: the executor keeps arguments, and with them a GPU's memory.
            self._written = self._thread.submit(self._write, [copied], ready, latest, best)

    def _write(self, copied: list[Snapshot], ready: Any, latest: bool, best: bool) -> None:
        snapshot = copied.pop()
        if ready is not None:
            # On another stream, so that the copy to the host does not delay training.
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(ready)
                snapshot = snapshot.map_tensors(lambda tensor: tensor.cpu())
        self.storage.write(snapshot.to_bytes(), snapshot.step, latest, best)

    def wait(self) -> None:
        """Waits for the save in progress; every rank learns its result. Raises `UserError` on every rank
        after `max_failures` in a row.
        """
        if self._saving is not None:
            self._finish_save(distributed.run_on_first(self._result, self.world))

    def _result(self) -> str:
        """On rank 0: the error of the save in progress, empty if it succeeded."""
        written, self._written = self._written, None
        try:
            assert written is not None  # a save is in progress
            written.result()
        except Exception as error:  # every file system has its own
            return one_line(error)
        return ""

    def _finish_save(self, error: str) -> None:
        assert self._saving is not None
        step, self._saving = self._saving, None
        if not error:
            self.failures = 0
            return
        self.failures += 1
        self.saved_step, self.best = self._before
        log.warning(
            "step %d: the snapshot was not written to %s: %s; each existing file is still complete",
            step, self.path, error,
        )  # fmt: skip
        if self.failures >= self.max_failures:
            raise UserError(
                f"step {step}: {self.failures} snapshots in a row could not be written "
                f"(trainer.max_save_failures): {error}; once they can, the same command resumes from "
                "the newest one"
            )

    def finish(self, step: int) -> None:
        """Waits for the last save. Raises `UserError` on every rank if the latest snapshot is not that of
        `step`.
        """
        self.wait()
        if self.saved_step != step:
            raise UserError(f"{self.path}: the snapshot of step {step} was not written")
        distributed.run_on_first(lambda: remove_unused(self.storage), self.world)

    def close(self) -> None:
        """After an error: waits for the save in progress, on rank 0 alone, and ignores its result."""
        if self._written is not None:
            self._result()
        self._saving = None


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state of each parameter of the unwrapped `model` that has one, by name."""
    names = parameter_names(model, optimizer)
    return {names[i]: values for i, values in optimizer.state_dict()["state"].items()}


def lower_thread_priority() -> None:
    """Lowers the priority of the calling thread, on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it may be low enough already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
