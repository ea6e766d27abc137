"""Snapshot manager: saves a run's state in the background, and restores it.

A save is one cycle. `save` collects the tensors from all ranks and copies them to rank 0's memory, where a thread
writes the file while training continues. `wait` ends the cycle: every rank learns the result, and only then does the
snapshot count as saved. All ranks call every method at the same point of the run.
"""

import contextlib
import dataclasses
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import torch
import torch.nn as nn

from engine.config.schema import TrainerConfig
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.machine.hardware import is_out_of_memory
from engine.optim import numbered, parameter_names
from engine.parallel import distributed, sharding
from engine.snapshots.sharded import read_shards, remove_unused_shards, save_shards
from engine.snapshots.snapshot import Snapshot, not_finite
from engine.snapshots.state import State
from engine.snapshots.storage import SnapshotStorage, exists, rename, snapshot_path

log = logging.getLogger("gpt")
RETRY_S = 30.0  # seconds after which a failed save is tried again


def error_of(save: Future[None]) -> str:
    """Waits for the end of a save; its error, empty if it succeeded."""
    error = save.exception()
    return one_line(error) if error else ""


class SnapshotManager:
    """The snapshots of the run in `run_dir`, with the settings of a `TrainerConfig`. `restore_missing_files`, for rank
    0 before each save, returns whether the other files of the run were there. Raises `UserError` on every rank if the
    run cannot resume from the files that exist.

    Attributes:
        found: the snapshot to resume from, until it is restored; None for a new run. On ranks other than 0, its tensors
            are on the meta device.
        saved_step: of the latest snapshot that was written, or restored.
        last_error: of the last save, if that failed.
        due_at: on rank 0, when the clock asks for a save, as `time.monotonic()` gives it.
    """

    def __init__(self, config: TrainerConfig, run_dir: str, restore_missing_files: Callable[[], bool] = lambda: True):
        self.config, self.run_dir, self.restore_missing_files = config, run_dir, restore_missing_files
        self.path = snapshot_path(config.snapshot_path, run_dir)
        self.storage = SnapshotStorage(self.path, config.keep_snapshots)
        minutes = config.save_every_minutes
        self.interval_s = math.inf if minutes is None else 60 * minutes
        self.due_at = math.inf
        self.last_error = ""
        self.saved_step: int | None = None
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._saving: tuple[State, Future[None]] | None = None  # between `save` and `wait`
        self.found: Snapshot | None = None
        # A restart by torchrun or SLURM resumes, even with resume=never.
        if config.resume != "never" or distributed.is_restart():
            self.found = read_on_rank_0(self._find)

    # --- before the first step ---

    def _find(self) -> Snapshot | None:
        """The newest undamaged snapshot. Raises `UserError` if there must be one."""
        if found := self.storage.recover():
            log.info("resuming from %s, step %d", found[1], found[0].step)
            return found[0]
        if self.config.resume == "must":
            raise UserError(f"trainer.resume=must: there is no snapshot at {self.path}")
        return None

    def open(self, state: State, history: tuple[str, ...]) -> None:
        """On rank 0: checks that snapshots can be written. If the run starts from scratch, at step 0, renames the
        snapshots and the files `history` of an earlier run, and else numbered snapshots of later steps.
        """
        self.storage.prepare()
        self._set_due(self.interval_s)
        if self.saved_step is not None or state.step > 0:
            self.storage.rename_later(state.step)
            return
        is_asked = self.config.resume == "never"
        why = "trainer.resume=never" if is_asked else f"there is no snapshot at {self.path}"
        files = [os.path.join(self.run_dir, name) for name in history]
        if earlier := [*self.storage.all(), *filter(os.path.exists, files)]:
            moved = ", ".join(rename(earlier))
            log.warning("%s: training from scratch; earlier files are renamed to %s", why, moved)

    def recover_best(self, state: State) -> None:
        """Makes the best snapshot that of this run: see the storage's. Without a copy, the next evaluation counts as
        the best.
        """
        loss, step = state.best_loss, state.best_step
        if loss is None or step is None:
            return
        if not distributed.run_on_rank_0(lambda: self.storage.recover_best(loss, step)):
            state.best_loss = state.best_step = None

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Moves the tensors of `found` into the unwrapped `model` and its `optimizer`, sharded as these are. Raises
        `UserError` if they do not fit.

        Every rank receives one tensor after another, in the order of the snapshot, and keeps its shard alone.
        """
        snapshot, self.found = self.found, None
        assert snapshot is not None
        current = model.state_dict()
        model_state, optimizer_state = snapshot.model_state, snapshot.optimizer_state
        if snapshot.shards:
            model_state, optimizer_state = read_shards(self.path, snapshot, current)
        snapshot.model_state, snapshot.optimizer_state = {}, {}  # others may still hold the snapshot

        def receive(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            full = value if snapshot.shards else distributed.broadcast(value)
            # A tensor that the model does not have stays as it is: `load_state_dict` names it.
            return sharding.shard_like(full, current.get(name, full))

        model_state = {name: receive(name, value) for name, value in model_state.items()}
        for name, values in optimizer_state.items():
            values.update({key: receive(name, value) for key, value in values.items()})
        try:
            model.load_state_dict(model_state)
            optimizer.load_state_dict(numbered(parameter_names(model, optimizer), optimizer, optimizer_state))
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            raise UserError(
                f"{self.path}: cannot be restored into this model; start another run with "
                "run_name=NEW_NAME, or rename this one's snapshots with trainer.resume=never: "
                f"{one_line(error)[:300]}"
            ) from error
        self.saved_step = snapshot.step

    # --- saving ---

    def save(self, snapshot: Snapshot, is_numbered: bool, loss: float) -> str | None:
        """Starts to save `snapshot` as the latest one and, if it has the lowest held-out loss, as the best; also as a
        numbered one if so chosen. Its tensors may be sharded, and may change as soon as this returns. Whether the file
        was written is known at the next `wait`.

        Does nothing unless the weights and `loss`, computed with them, are finite on every rank; returns which of both
        is not: "weights", "loss" or None.
        """
        bad = not_finite(snapshot.model_state, snapshot.parameters)
        finite = distributed.all_gather((bad is None, math.isfinite(loss)))
        if not all(map(all, finite)):
            self._set_due(RETRY_S)
            return "loss" if all(weights for weights, _ in finite) else "weights"
        state, written = snapshot.state(), Future[None]()
        self.due_at = math.inf
        try:
            if self.config.snapshot_format == "sharded":  # each rank writes its own tensors
                snapshot = save_shards(self.path, snapshot)
            snapshot = snapshot.map_tensors(self._to_host)
        except (OSError, UserError) as error:  # of shards, raised on every rank
            written.set_exception(error)
        else:
            if distributed.is_rank_0():
                written = self._thread.submit(
                    lambda: self.storage.write(snapshot.to_bytes(), state.step, state.is_best, is_numbered)
                )
        written.add_done_callback(lambda done: self._set_due(RETRY_S if done.exception() else self.interval_s))
        self._saving = state, written
        return None

    def _set_due(self, seconds: float) -> None:
        self.due_at = time.monotonic() + seconds

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """On rank 0, a full copy in host memory; on others, `tensor`. All ranks must call it for a sharded tensor."""
        full = sharding.full_tensor(tensor.detach())
        return full.to("cpu", copy=True) if distributed.is_rank_0() else tensor

    def wait(self, state: State) -> None:
        """Waits for the save in progress; every rank learns its result. A failure is logged. If it was written and is
        the best, it becomes that of `state`.
        """
        if self._saving is None:
            return
        (saved, written), self._saving = self._saving, None

        def finish() -> str:
            error = error_of(written)
            remove_unused_shards(self.storage)
            return error

        self.last_error = distributed.run_on_rank_0(finish)
        if self.last_error:
            self._log_failure(saved.step, self.last_error)
            return
        self.saved_step = saved.step
        if saved.is_best:
            state.best_loss, state.best_step = saved.loss, saved.step

    def wait_until_saved(
        self, state: State, save: Callable[[], None], gives_up: Callable[[float], bool], tries: int, pause_s: float
    ) -> bool:
        """Waits until the step of `state` is saved, which `save()` starts unless that is in progress; tries again every
        `pause_s` seconds, unless `gives_up(pause_s)`. Returns whether it was written.
        """
        for left in reversed(range(tries)):
            was_saving = self._saving is not None and self._saving[0].step == state.step
            self.wait(state)
            if self.saved_step != state.step and not was_saving:
                save()
                self.wait(state)
            if self.saved_step == state.step:
                return True
            if left:
                log.warning("trying again in %g s; Ctrl-C or SIGTERM gives up", pause_s)
                if gives_up(pause_s):
                    break
        return False

    def rescue(self, snapshot: Snapshot) -> NoReturn:
        """Writes `snapshot`, whose save failed, as one file to the system's temporary folder. Raises `UserError` on
        every rank, which says how to resume from it.
        """
        failed = f"{self.path}: the snapshot of step {snapshot.step} was not written: {self.last_error}"
        copied = snapshot.map_tensors(self._to_host)

        def write() -> str:
            path = os.path.join(tempfile.mkdtemp(prefix="gpt_snapshot."), "gpt_snapshot.pt")
            with atomic_write(path, "wb") as file:
                file.write(copied.to_bytes())
            return path

        try:
            rescued = distributed.run_on_rank_0(write)
        except UserError as error:
            raise UserError(f"{failed}; nor to the system's temporary folder: {error}") from error
        raise UserError(
            f"{failed}; it is in {rescued}: to resume from it, make space, move it to {self.path}, and repeat the "
            "command"
        )

    def close(self) -> None:
        """After an error: waits for the save in progress, on rank 0 alone, and logs its failure."""
        saving, self._saving = self._saving, None
        if saving is not None and distributed.is_rank_0() and (error := error_of(saving[1])):
            self._log_failure(saving[0].step, error)

    def _log_failure(self, step: int, error: str) -> None:
        intact = ""
        with contextlib.suppress(UserError):  # a store that does not answer
            if self.saved_step is not None and exists(self.path):
                intact = "; the snapshots saved before are intact"
        log.warning("step %d: the snapshot was not written to %s: %s%s", step, self.path, error, intact)


def read_on_rank_0(read: Callable[[], Snapshot | None]) -> Snapshot | None:
    """The snapshot that `read()` gives on rank 0. Other ranks have its tensors on the meta device, to be filled by
    `distributed.broadcast`. Raises as `run_on_rank_0`.
    """
    found: Snapshot | None = None

    def read_plain() -> Snapshot | None:
        nonlocal found
        found = read()
        if found is None:
            return None
        plain = found.map_tensors(lambda tensor: tensor.to("meta"))
        return dataclasses.replace(plain, probe_logits=found.probe_logits)

    plain = distributed.run_on_rank_0(read_plain)
    return found or plain
