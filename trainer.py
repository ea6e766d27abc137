"""Trainer: optimizer steps, evaluation, snapshots and resuming, with DDP, FSDP2 and mixed precision.

    Trainer(config, model, optimizer, train_dataset, test_dataset).train()

It depends on neither GPT nor Hydra: `model(x, y)` returns `(anything, loss)` and ignores targets of -1; a dataset is a
`CharDataset`, or a map-style data set of `(x, y)`, whose items are stacked.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from char_dataset import CharDataset, MicroBatches, move_if_small
from engine.config.schema import OptimizerConfig, TrainerConfig, as_plain, defaults_of, flatten
from engine.errors import UserError
from engine.files import masked
from engine.generation import draw_samples
from engine.machine.hardware import count_flops
from engine.optim import optimizer_state, set_learning_rate
from engine.parallel import distributed, sharding
from engine.parallel.distributed import name_failed_ranks
from engine.precision import resolve
from engine.run import memory
from engine.run.cuda_graph import WARM_UP, CapturedStep, can_capture
from engine.run.dataset import Items, Windows, as_windows
from engine.run.directory import HISTORY
from engine.run.evaluation import Evaluation, evaluate
from engine.run.log import RunLog
from engine.run.plan import MicroBatch, Plan
from engine.run.progress import Clock, advance, change_time_limit, evaluation_is_due, expected_steps
from engine.run.requests import Requests
from engine.signals import SAVE, Stopped
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.snapshot import CHANGED, Snapshot, check_can_resume, has_changed, log_changes, probe_logits
from engine.snapshots.state import State
from engine.text.documents import separator_of

__all__ = ["Snapshot", "Trainer", "TrainerConfig"]

log = logging.getLogger("gpt")
T = TypeVar("T")
StepResult = tuple[torch.Tensor, torch.Tensor]  # loss and gradient norm, on the device
# Tries of the last save and seconds between them: at the end, and when stopped (torchrun kills 30 s after SIGTERM).
LAST_SAVE, STOP_SAVE = (120, 30.0), (2, 2.0)
HALF_CHECKED = 8  # micro-batches whose loss must be finite for a save in float16


class Trainer:
    """Trains `model` with `optimizer` on `train_dataset`; evaluates on `test_dataset`; saves; resumes.

    Args:
        model: bare, wrapped in DDP, or sharded (`sharding.build`); with several processes a bare one is wrapped in DDP.
        optimizer: over the model's parameters; a group's `initial_lr` (or else `lr`) is its peak learning rate.
        train_dataset: a small `CharDataset` is moved to the GPU in place, as is `test_dataset`.
        test_dataset: None for no evaluation.
        schedule: learning-rate multiplier, called with (step, total steps); constant by default.
        run_dir: where the files of the run go.
        run_config: settings to store in the snapshot and compare on resume, besides `config` and the dataclasses
            `config` of model and dataset, if any. `init_from`: also evaluate before the first step, as the initial
            weights may be the best. `samples`: draw texts for the metrics.
        snapshots: by default those in `run_dir`, which is ignored if they are given.

    Raises `UserError` for another type of dataset, a batch with fewer windows than ranks, or another run's snapshot.

    Attributes:
        state: what the run has done so far; snapshots hold a copy.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_dataset: Windows | Items,
        test_dataset: Windows | Items | None = None,
        *,
        schedule: Callable[[int, int], float] = lambda step, total_steps: 1.0,
        run_dir: str = ".",
        run_config: dict[str, Any] | None = None,
        snapshots: SnapshotManager | None = None,
    ):
        if config.patience is not None and test_dataset is None:
            raise UserError(f"trainer.patience={config.patience}: there is nothing to evaluate")
        distributed.init(config.device, config.threads, config.timeout_s)
        device = distributed.device()
        self.config, self.optimizer, self.schedule = config, optimizer, schedule
        self.train_dataset = train_dataset = as_windows(train_dataset)
        self.test_dataset = test_dataset = None if test_dataset is None else as_windows(test_dataset)
        self.model = sharding.wrap(model, config.strategy)
        self.bare = bare = distributed.unwrap(self.model)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        configs: dict[str, Any] = {"trainer": config, "optimizer": {"class": type(optimizer).__name__}}
        for group, part in (("model", bare), ("data", train_dataset)):
            if is_dataclass(own := getattr(part, "config", None)):
                configs[group] = own
        self.run_config = masked(as_plain(configs | (run_config or {})))
        self.snapshots = snapshots or SnapshotManager(config, run_dir)
        self.plan = Plan.make(config, len(train_dataset), train_dataset.block_size, distributed.size())
        self.state = State()
        earlier: dict[str, Any] = {}
        if found := self.snapshots.found:
            defaults = defaults_of(configs | {"optimizer": OptimizerConfig})
            changes = check_can_resume(found, self.snapshots.path, self.run_config, defaults, train_dataset.digest)
            log_changes(found, changes)
            self.state, earlier = found.state(), found.earlier_choices(device.type)
        change_time_limit(self.state, config.max_minutes)
        flops = self.plan.total_steps * self.plan.step_characters * count_flops(bare)
        self.precision = resolve(config, device, flops / (distributed.size() if device.type == "cuda" else 1), earlier)
        if self.precision.compile:
            torch.compiler.reset()  # otherwise a process compiles at most eight models
            bare.compile(dynamic=False)  # at the first step
        self.state.choices = asdict(self.precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision.amp_dtype == "float16")
        if device.type == "cuda" and config.data_loader_workers == 0:
            move_if_small([part for part in (train_dataset, test_dataset) if isinstance(part, CharDataset)], device)
        if config.micro_batch_size is None:
            is_known = found and (found.processes, found.choices.get("device")) == (distributed.size(), device.type)
            limit = self.state.micro_batch_size if is_known else None
            plan = self.plan.with_micro_batch(limit) if limit else self.plan
            with self.precision.eagerly():
                self.plan = memory.fit_micro_batch(plan, bare, train_dataset, self._training_loss)
            self.state.micro_batch_size = self.plan.micro_batch_size
        self.batches = MicroBatches(
            train_dataset, config.seed, self.plan, distributed.rank(), config.data_loader_workers, device
        )
        self.clock = Clock(self.state)
        self.requests = Requests(lambda: time.monotonic() >= self.snapshots.due_at, self.clock.read)
        self.log = RunLog(
            config,
            self.plan,
            self.state,
            flops_per_character=count_flops(bare),
            unit=getattr(train_dataset, "unit", "character"),
            scaler=self.scaler,
            sample=self._sample if self.run_config.get("samples") else None,
        )
        self.train_step = self._make_step()  # `_eager_step`, or its CUDA graph
        if found:  # only now: a capturable optimizer restores its state onto the GPU
            self.snapshots.restore(bare, optimizer)
            if found.scaler_state:
                self.scaler.load_state_dict(found.scaler_state)
            if has_changed(self._probe(), found.probe_logits):
                log.warning("%s: %s", self.snapshots.path, CHANGED)

    # --- the loop ---

    def train(self, deadline: float | None = None, on_start: Callable[[], None] = lambda: None) -> float | None:
        """Trains to the end of the run; returns the newest held-out loss, None if there is none. With a `deadline`, as
        `time.monotonic()` gives it, the run ends by then, even if not all steps are done; a run that resumes keeps its
        time limit. `on_start` writes further files of the run, on rank 0: once the others are open, and at a save
        if one is missing or it raised OSError. All ranks must call it.

        SIGTERM, SIGHUP, SIGUSR2 and SIGINT save, and raise `Stopped`. SIGUSR1 saves, and training continues. Raises
        `UserError` on every rank if a loss or gradient is not finite, or the last snapshot cannot be written. Earlier
        snapshots are kept.
        """
        state, minutes = self.state, self.config.max_minutes
        if deadline is None and minutes is not None:  # resumed before the clock had started
            deadline = time.monotonic() + 60 * minutes
        self.clock.deadline = deadline
        advance(state, self.plan.total_steps, self.requests.share)
        self.snapshots.recover_best(state)
        if self._is_over() and self.snapshots.saved_step == state.step and not self._evaluation_is_due(is_over=True):
            self.log.finished()
            return state.loss
        self.optimizer.zero_grad()
        self.model.train()
        with self._running(on_start):
            while True:
                is_evaluated = self._evaluation_is_due(self._is_over())
                if is_evaluated:
                    self._record_evaluation()
                is_over = self._is_over()  # also of patience
                self._save_if_due(is_over, is_evaluated)
                if is_over:
                    break
                loss, grad_norm, lr = self.step()
                advance(state, self.plan.total_steps, self.requests.share)
                self.log.step(loss, grad_norm, lr)
            self._save_last(*LAST_SAVE)
        self.log.ended()
        return state.loss

    def _is_over(self) -> bool:
        """Whether all steps are done, or the time is over, or no evaluation has a lower loss."""
        is_out_of_patience = self.state.since_best >= (self.config.patience or math.inf)
        return self.state.progress >= 1 or (self.state.is_evaluated and is_out_of_patience)

    @contextlib.contextmanager
    def _running(self, on_start: Callable[[], None]) -> Iterator[None]:
        """A context for the loop: opens and closes the files of the run, and serves requests to stop."""
        state, snapshots = self.state, self.snapshots

        def open_files() -> None:
            snapshots.open(state, HISTORY)
            self.log.open(snapshots.run_dir, flatten(self.run_config), on_start)

        with self.requests, memory.report_exhausted(self.plan), self.precision.determinism():
            try:
                with name_failed_ranks(lambda: f"after step {state.step}"):  # told before the files are closed
                    distributed.run_on_rank_0(open_files)
                    self.log.start(self.precision)
                    yield
            except Stopped as stopped:
                self._save_last(*STOP_SAVE)
                self.log.stopped(stopped.name, snapshots.path)
                raise
            finally:
                self.batches.close()
                snapshots.close()  # also after an error: finish a save in progress
                self.log.close()

    def _restore_missing_files(self) -> None:
        """Writes deleted files of the run again. Raises `UserError` on every rank if another run has started in its
        directory.
        """
        if not distributed.run_on_rank_0(lambda: self.snapshots.restore_missing_files() and self.log.is_recorded):
            distributed.run_on_rank_0(self.log.reopen)
            try:
                self.snapshots.recover_best(self.state)
            except UserError as error:  # a store that does not answer does not end the run here
                log.warning("%s", error)

    def close(self) -> None:
        """Ends the prefetch threads."""
        self.batches.close()

    # --- one step ---

    def step(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Runs one optimizer step, without evaluating, logging or saving. Returns (loss, gradient norm), on the device,
        and the learning rate: the mean of the ranks' losses is the batch's; the norm is over all ranks.
        """
        state = self.state
        lr = set_learning_rate(self.optimizer, self.schedule(state.step, expected_steps(state, self.plan.total_steps)))
        distributed.seed_step(self.config.seed, state.step)
        with self.precision.tf32():
            loss, norm = self.train_step(self._step_inputs())
        state.step += 1
        if not isinstance(self.train_step, CapturedStep) or self.train_step.calls > WARM_UP:
            self.clock.count_step()
        return loss, norm, lr

    def _eager_step(self, micro_batches: Iterable[MicroBatch]) -> StepResult:
        """Forward and backward passes, clipping and optimizer step; returns what `step` returns."""
        total = torch.zeros((), device=distributed.device())
        for i, (x, y, weight) in enumerate(micro_batches, 1):
            # DDP averages gradients over ranks once per step, with the last micro-batch; FSDP with each, as no
            # rank has the memory for all of them.
            if isinstance(self.model, DDP):
                self.model.require_backward_grad_sync = i == self.plan.accumulation
            loss = self._training_loss(self.model, x, y) * weight
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)  # clip the true gradients
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.grad_norm_clip or math.inf)
        norm = sharding.full_tensor(norm).to(distributed.device())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _training_loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, a mean over its targets; evaluation has its own. `model` may be unwrapped."""
        with self.precision.autocast():
            return model(x, y)[1]

    @torch.no_grad()
    def _loss(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """The loss that `_eager_step` would return, without training on the micro-batches."""
        with self.precision.eagerly():
            losses = [weight * self._training_loss(self.model, x, y) for x, y, weight in micro_batches]
        return torch.stack(losses).sum()

    def _make_step(self) -> Callable[[Iterable[MicroBatch]], StepResult]:
        """`_eager_step`, on one GPU as a CUDA graph."""
        may_capture = self.config.cuda_graph and distributed.size() == 1
        if may_capture and can_capture(self.optimizer) and not self.scaler.is_enabled():
            # Compiled code draws other dropout masks than `_loss`, which runs eagerly.
            tolerance = 0.2 if self.precision.compile else 0.02
            return CapturedStep(self._eager_step, self._loss, self.optimizer, tolerance)
        return self._eager_step

    def _step_inputs(self) -> Iterator[MicroBatch]:
        """The micro-batches of the next step. Checks requests before each."""
        first = self.state.step * self.plan.accumulation
        for i in range(first, first + self.plan.accumulation):
            self.requests.check()
            yield self.batches[i]

    # --- evaluation ---

    def _evaluation_is_due(self, is_over: bool) -> bool:
        """Whether this step must still be evaluated: at an interval or halfway, at the end, and before the first step
        of pretrained weights.
        """
        if self.test_dataset is None or self.state.is_evaluated:
            return False
        if self.state.step == 0:
            return self.run_config.get("init_from") is not None
        return is_over or evaluation_is_due(self.state, self.plan, self.config.eval_every_steps)

    def _record_evaluation(self) -> None:
        """Evaluates this step, logs the loss and records it in the state."""
        with self.log.paused():
            self.log.check_finite()
            self.snapshots.wait(self.state)  # the best is the lowest loss whose snapshot was written
            started = time.perf_counter()
            evaluation = self.evaluate()
            self.log.evaluation(evaluation, time.perf_counter() - started)
            self.state.record(evaluation.loss)

    def evaluate(self) -> Evaluation:
        """The exact loss on the `test_dataset`. Raises `UserError` without one."""
        if self.test_dataset is None:
            raise UserError("evaluate: the Trainer was given no test_dataset")
        with self.precision.eagerly(), self.precision.autocast():
            return evaluate(self.bare, self.test_dataset, self.requests.check, self.plan.max_eval_windows)

    def _sample(self) -> list[str]:
        vocabulary, data = self.train_dataset.vocabulary, self.run_config.get("data", {})
        encoding, separator = data.get("encoding", "utf-8"), separator_of(data, vocabulary)
        return self._call_eagerly(lambda: draw_samples(self.bare, vocabulary, encoding, separator))

    def _probe(self) -> torch.Tensor:
        return self._call_eagerly(lambda: probe_logits(self.bare, distributed.device()))

    def _call_eagerly(self, function: Callable[[], T]) -> T:
        """Calls `function`, which runs the model, without torch.compile, and under autocast if sharded."""
        context = self.precision.autocast() if sharding.is_sharded(self.bare) else contextlib.nullcontext()
        with self.precision.eagerly(), context:
            return function()

    # --- saving ---

    def _save_if_due(self, is_over: bool, is_evaluated: bool) -> None:
        """Saves this step at an interval, by request, or at the end; also if it `is_evaluated` just now with the lowest
        loss, or its snapshot lacks the evaluation. A save at an interval, by SIGUSR1 or at the end is also numbered.
        """
        state, config, requested = self.state, self.config, self.requests.save
        is_new = state.step > 0 and self.snapshots.saved_step != state.step
        is_interval = self.plan.is_due(state.step, config.save_every_steps, config.save_every)
        is_numbered = is_new and (is_over or requested == SAVE or is_interval)
        has_unsaved_evaluation = is_evaluated and (state.is_best or not is_new)
        if not (is_numbered or has_unsaved_evaluation or (is_new and requested)):
            return
        if requested == SAVE:
            log.info("SIGUSR1: saving after step %d of %d", state.step, self.plan.total_steps)
        self.requests.save = 0
        with self.log.paused():
            self.snapshots.wait(state)
            self._save(is_numbered)

    def _save(self, is_numbered: bool, is_last: bool = False) -> None:
        """Starts to save this step. Raises `UserError` if its weights, or the loss computed with them, are not finite;
        float16 skips steps that overflow: there, a loss is only a warning unless this save `is_last`. The loss is that
        of the evaluation or, without training on it, of the last micro-batch; in float16, where some losses overflow
        and others do not, always of the last `HALF_CHECKED` ones.
        """
        self._restore_missing_files()
        state = self.state
        loss, checked = state.loss, HALF_CHECKED if self.scaler.is_enabled() else 1
        if loss is None or not state.is_evaluated or checked > 1:
            end = max(state.step * self.plan.accumulation, 1)
            loss = self._loss(self.batches[i] for i in range(max(end - checked, 0), end)).item()
        bad = self.snapshots.save(self._snapshot(), is_numbered, loss)
        if bad == "loss" and self.scaler.is_enabled() and not is_last:
            log.warning("step %d: not saved, as its loss is not finite", state.step)
        elif bad:
            raise self.log.divergence(f"the {bad} to be saved: not finite")

    def _save_last(self, tries: int, pause_s: float) -> None:
        """Waits until this step is saved; tries again every `pause_s` until a signal gives up. Then writes it to the
        system's temporary folder, and raises `UserError`.
        """
        requests, snapshots = self.requests, self.snapshots
        requests.begin_last_save()
        save = functools.partial(self._save, is_numbered=True, is_last=True)
        if not snapshots.wait_until_saved(self.state, save, requests.gives_up, tries, pause_s):
            snapshots.rescue(self._snapshot())

    def _snapshot(self) -> Snapshot:
        """The state of the run after this step, with its tensors, which may be sharded."""
        state, plan = self.state, self.plan
        self.log.check_finite()
        if not sharding.is_sharded(self.bare):
            distributed.check_replicas(self.bare, state.step)
        self.log.sync()  # on disk before the snapshot that counts its lines
        best = {"best_loss": state.loss, "best_step": state.step} if state.is_best else {}
        return Snapshot(
            **vars(state) | best,
            model_state=self.bare.state_dict(),
            optimizer_state=optimizer_state(self.bare, self.optimizer),
            finished_epoch=plan.finished_epochs(state.step),
            windows_seen=plan.windows_seen(state.step),
            seed=self.config.seed,
            scaler_state=self.scaler.state_dict(),
            processes=distributed.size(),
            vocabulary=self.train_dataset.vocabulary,
            text_digest=self.train_dataset.digest,
            characters=sum(getattr(self.train_dataset, "parts", [])),
            config=self.run_config,
            probe_logits=self._probe(),
            parameters=[name for name, _ in self.bare.named_parameters()],
        )
