"""Trainer: optimizer steps, evaluation, snapshots and resuming, with DDP, FSDP2 and mixed precision.

    Trainer(config, model, optimizer, train_dataset, test_dataset).train()

It depends on neither GPT nor Hydra: `model(x, y)` returns `(anything, loss)` and ignores targets of -1; a dataset is a
`CharDataset` or has the same `len`, `batch`, `eval_windows`, `num_eval_windows`, `data`, `block_size`,
`vocabulary` and `digest`.
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from char_dataset import MicroBatches, move_if_small, prefetch
from engine.config import auto
from engine.config.settings import as_plain, defaults_of
from engine.errors import UserError, check_option, check_range
from engine.kernels import execution
from engine.kernels.graph import CapturedStep, MicroBatch, can_capture
from engine.machine.hardware import count_flops, is_out_of_memory
from engine.machine.threads import AdaptiveThreads, ignores_threads
from engine.optim import OptimizerConfig, set_learning_rate
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World, join_processes, report_unresponsive_ranks
from engine.run import memory, trackers
from engine.run.directory import HISTORY
from engine.run.evaluation import Evaluation, Evaluations, evaluate
from engine.run.plan import Deadline, Plan
from engine.run.requests import Requests
from engine.run.training_log import TrainingLog
from engine.signals import SAVE, Stopped
from engine.snapshots.manager import SnapshotManager, optimizer_state
from engine.snapshots.snapshot import CHANGED, Snapshot, check_can_resume, has_changed, log_changes
from engine.snapshots.storage import is_local

log = logging.getLogger("gpt")
StepResult = tuple[torch.Tensor, torch.Tensor]  # loss and gradient norm, on the device
# Tries of the last save and seconds between them: at the end, and when stopped (torchrun kills 30 s after SIGTERM).
LAST_SAVE, STOP_SAVE = (120, 30.0), (2, 2.0)
MIN_CHANGE = 0.05  # least share of the steps by which a plan changes


@dataclass
class TrainerConfig:
    """The training loop: length, batch, precision, evaluation, snapshots, processes."""

    # fmt: off
    max_epochs: int | None = 10  # epochs; one has a window for each position of the text; null: no limit
    max_steps: int | None = None  # optimizer steps; null: no limit; if both are set, whichever is reached first
    max_minutes: float | None = None  # time limit, minutes, from which main.py computes max_steps; null: no limit
    batch_size: int | None = 64  # global batch: windows per optimizer step, over all processes; null: chosen
    micro_batch_size: int | None = None  # windows per process and forward pass, at most; null: all, or what fits a GPU
    grad_norm_clip: float | None = 1.0  # maximum L2 norm of the gradient over all parameters; null: no clipping
    data_loader_workers: int = 0  # prefetch threads; 0: none, usually enough
    snapshot_path: str = "gpt_snapshot.pt"  # latest snapshot: a path, in run_dir unless absolute, or a URL
    save_every: int | None = 1  # epochs between snapshots; null: not by epochs; the last step always saves
    save_every_steps: int | None = None  # steps between snapshots; null: not by steps
    save_every_minutes: float | None = 5.0  # minutes without a snapshot after which one is saved; null: no limit
    keep_snapshots: int | None = None  # numbered snapshots to keep; null: only latest, .prev and .best
    snapshot_format: str = "single"  # single: one file; sharded: one part per process, for models beyond one host
    max_save_failures: int | None = None  # has no effect: failed saves are repeated
    eval_every_steps: int | None = None  # steps between evaluations; null: every epoch; at least halfway and at the end
    patience: int | None = None  # evaluations without a lower held-out loss after which the run ends; null: no limit
    log_every_steps: int = 10  # steps between progress lines
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])  # tensorboard (if installed), wandb, or both
    use_amp: bool = True  # automatic mixed precision; false: float32, on a GPU with TF32 matmuls in training steps
    amp_dtype: str = "auto"  # bfloat16, float16 (with loss scaling) or auto: bfloat16 where the hardware has it
    seed: int = 1337  # seed of the weights, the window order and dropout
    device: str = "auto"  # cpu, cuda, auto (cuda if there is a GPU), or another torch device: mps, xpu
    threads: int | None = None  # CPU threads per process; null: its share of the cores, fewer while others are busy
    compile: str = "auto"  # torch.compile: true, false or auto: for runs long enough to gain from it
    deterministic: str = "auto"  # deterministic algorithms: true, false or auto: on a CPU
    cuda_graph: bool = True  # replay each step as one CUDA graph, on a single GPU; not with float16
    strategy: str = "ddp"  # ddp: the whole model in every process; fsdp: sharded (FSDP2)
    resume: str = "auto"  # from snapshot_path: auto (if it exists), must (or fail), never (rename the old files)
    timeout_s: float = 600.0  # seconds to wait for another process before giving up
    # fmt: on

    def __post_init__(self):
        for protocol in ("file://", "local://"):  # fsspec's names for a local path
            self.snapshot_path = self.snapshot_path.removeprefix(protocol)
        self.snapshot_path = os.path.expanduser(self.snapshot_path)
        check_option("trainer.amp_dtype", self.amp_dtype, ("auto", "bfloat16", "float16"))
        for name in ("compile", "deterministic"):  # True, from Python and from YAML
            setattr(self, name, str(getattr(self, name)).lower())
            check_option(f"trainer.{name}", getattr(self, name), ("auto", "true", "false"))
        check_option("trainer.strategy", self.strategy, ("ddp", "fsdp"))
        check_option("trainer.snapshot_format", self.snapshot_format, ("single", "sharded"))
        check_option("trainer.resume", self.resume, ("auto", "must", "never"))
        for name in (
            "max_epochs", "max_steps", "micro_batch_size", "grad_norm_clip", "save_every", "save_every_steps",
            "save_every_minutes", "keep_snapshots", "eval_every_steps", "patience",
        ):  # fmt: skip
            check_range(f"trainer.{name}", getattr(self, name), above=0)
        check_range("trainer.log_every_steps", self.log_every_steps, above=0)
        check_range("trainer.batch_size", self.batch_size, 1, 2**20)
        check_range("trainer.data_loader_workers", self.data_loader_workers, 0, 1024)
        check_range("trainer.threads", self.threads, 1, 1024)
        check_range("trainer.timeout_s", self.timeout_s, above=0, high=1e6)
        check_range("trainer.seed", self.seed, 0, 2**63 - 1)
        check_range("trainer.max_minutes", self.max_minutes, above=0, high=1e6)
        if self.max_epochs is None and self.max_steps is None and self.max_minutes is None:
            raise UserError("trainer.max_epochs, max_steps and max_minutes are all null: one must end the run")
        if self.snapshot_format == "sharded" and not is_local(self.snapshot_path):
            raise UserError(
                f"trainer.snapshot_path={self.snapshot_path}: a sharded snapshot needs a folder that all hosts see"
            )
        trackers.check_installed(self.trackers)


class Trainer:
    """Trains `model` with `optimizer` on `train_dataset`; evaluates on `test_dataset`; saves; resumes.

    Args:
        model: bare, wrapped in DDP, or sharded (`sharding.build`); with several processes a bare one is wrapped in DDP.
        optimizer: over the model's parameters; a group's `initial_lr` (or else `lr`) is its peak learning rate.
        train_dataset: a small one is moved to the GPU in place, as is `test_dataset`.
        test_dataset: None for no evaluation.
        schedule: learning-rate multiplier, called with (step, total steps); constant by default.
        sample: draws texts for the metrics, on every rank at the same steps; must not change the global random state.
        probe: logits of the model for one fixed input, kept in snapshots; called like `sample`.
        world: rank, world size and device; by default from the launcher's environment.
        run_dir: where the files of the run go.
        run_config: settings to store in the snapshot and compare on resume, besides `config` and the dataclasses
            `config` of model and dataset, if any.
        snapshots: by default those in `run_dir`, which is ignored if they are given.
        is_pretrained: also evaluate before the first step: the initial weights may be the best.
        on_plan: called with this Trainer on rank 0 when the files of the run are open, and when the plan changes.
        deadline: the number of steps changes so that training ends by then.

    Raises `UserError` for another type of dataset, a batch with fewer windows than ranks, or another run's snapshot.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_dataset: Any,
        test_dataset: Any = None,
        *,
        schedule: Callable[[int, int], float] = lambda step, total_steps: 1.0,
        sample: Callable[[], list[str]] | None = None,
        probe: Callable[[], torch.Tensor] | None = None,
        world: World | None = None,
        run_dir: str = ".",
        run_config: dict[str, Any] | None = None,
        snapshots: SnapshotManager | None = None,
        is_pretrained: bool = False,
        on_plan: "Callable[[Trainer], None]" = lambda trainer: None,
        deadline: Deadline | None = None,
    ):
        if not hasattr(train_dataset, "batch"):
            raise UserError(
                f"train_dataset: a {type(train_dataset).__name__} has no batch(); split with CharDataset.split()"
            )
        self.config, self.optimizer, self.schedule = config, optimizer, schedule
        self.train_dataset, self.test_dataset, self.on_plan = train_dataset, test_dataset, on_plan
        self.deadline = deadline
        self.probe = probe and functools.partial(self._call_eagerly, probe)
        world = world or join_processes(config.device, config.threads, config.timeout_s)
        self.world, device = world, world.device
        self.model = sharding.wrap(model, world, config.strategy)
        self.bare = bare = distributed.unwrap(self.model)
        configs: dict[str, Any] = {"trainer": config, "optimizer": {"class": type(optimizer).__name__}}
        for group, part in (("model", bare), ("data", train_dataset)):
            if is_dataclass(getattr(part, "config", None)):
                configs[group] = part.config
        self.run_config = run_config = as_plain(configs | (run_config or {}))
        self.plan = Plan.make(config, len(train_dataset), train_dataset.block_size, world.size)
        self.step = 0
        self.is_updating = False  # the weights; a step that fails then cannot be repeated
        self.snapshots = snapshots or SnapshotManager(config, run_dir, world)
        found = self.snapshots.found
        if found:
            defaults = defaults_of(configs | {"optimizer": OptimizerConfig})
            changes = check_can_resume(found, self.snapshots.path, run_config, defaults, train_dataset)
            log_changes(found, changes, world)
        earlier = self.snapshots.earlier_choices()
        flops = self.plan.total_steps * self.plan.step_characters * count_flops(bare)
        flops /= world.size if device.type == "cuda" else 1
        self.choices = choices = auto.resolve(config, device, flops, earlier)
        execution.apply(choices, bare)
        self.scaler = torch.amp.GradScaler(device.type, enabled=choices["amp_dtype"] == "float16")
        if device.type == "cuda" and config.data_loader_workers == 0:
            move_if_small([part for part in (train_dataset, test_dataset) if part is not None], device)
        if config.micro_batch_size is None:
            known = earlier.get("micro_batch_size")
            self.plan = memory.fit_micro_batch(self.plan, known, bare, train_dataset, choices, world)
        self.evaluations = Evaluations(self.plan, config, test_dataset is not None, is_pretrained)
        self.training_log = TrainingLog(
            world,
            self.plan,
            every_steps=config.log_every_steps,
            flops_per_character=count_flops(bare),
            unit=getattr(train_dataset, "unit", "character"),
            scaler=self.scaler,
            learning_rate=self._learning_rate,
            sample=sample and functools.partial(self._call_eagerly, sample),
        )
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.requests = Requests(world, lambda: time.monotonic() >= self.snapshots.due_at)
        self.train_step = self._make_step()  # `_eager_step`, or its CUDA graph
        if found:  # only now: a capturable optimizer restores its state onto the GPU
            self._restore(found)

    def train(self) -> float | None:
        """Trains to the end of the plan; returns the held-out loss of the last step, nats per character.

        Raises `Stopped` after a signal, and `UserError` if the loss or gradient is not finite or snapshots cannot be
        written. Earlier snapshots are kept.
        """
        is_saved = self.snapshots.saved_step == self.step
        if self._is_over() and is_saved and not self.evaluations.is_due(self.step):
            self.training_log.log_finished(self.step, self.evaluations.last)
            return self.evaluations.last_loss
        self.first_step, steps = self.step, self.steps()
        with self.requests, report_unresponsive_ranks(self.world, lambda: f"after step {self.step}"):
            try:
                distributed.run_on_rank_0(self._open_files, self.world)
                self.snapshots.recover_best()
                self.training_log.start(self.step, self.choices)
                # Due here for pretrained weights, or if the run was stopped between a step and its evaluation.
                if self.evaluations.is_due(self.step):
                    self._evaluate_if_due()
                    self._save_if_due()
                while not self._is_over():
                    loss, grad_norm = next(steps)
                    self.training_log.log_step(self.step, loss, grad_norm)
                    self._confirm_save(loss)
                    self._evaluate_if_due()
                    self._adapt_plan()
                    self._save_if_due()
                self._save_last(*LAST_SAVE)
            except Stopped as stopped:
                self._stop(stopped)
            finally:
                steps.close()
                self.snapshots.close()  # also after an error: finish a save in progress
                self.training_log.close()
        if self.step < self.plan.total_steps:
            log.info("stopped by trainer.patience=%d: no lower held-out loss", self.config.patience)
        return self.evaluations.last_loss

    def steps(self) -> Generator[StepResult]:
        """Runs the remaining optimizer steps, one per iteration, without evaluating, logging or saving. Yields (loss,
        gradient norm), on the device: the mean of the ranks' losses is the batch's; the norm is over all ranks.
        """
        plan, micro_batches = self.plan, self._micro_batches()
        self.optimizer.zero_grad()
        self.model.train()
        is_alone_on_cpu = self.world.device.type == "cpu" and self.world.size == 1
        is_fixed = self.config.threads is not None or self.choices["compile"]
        threads = AdaptiveThreads(is_alone_on_cpu and not is_fixed, self._may_have_threads)
        try:
            while self.step < self.plan.total_steps:
                if self.plan is not plan:
                    micro_batches.close()
                    plan, micro_batches = self.plan, self._micro_batches()
                threads.adapt()
                distributed.seed_step(self.config.seed, self.step, self.world)
                set_learning_rate(self.optimizer, self.schedule(self.step, self.plan.total_steps))
                try:
                    with threads.step(), execution.tf32(self.choices):
                        loss, norm = self.train_step(self._step_inputs(micro_batches))
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._halve_micro_batch(error)
                    continue
                self.step += 1
                yield loss, norm
        finally:
            threads.close()
            micro_batches.close()

    def _eager_step(self, micro_batches: Iterable[MicroBatch]) -> StepResult:
        """Forward and backward passes, clipping and optimizer step; returns what `steps` yields."""
        total = torch.zeros((), device=self.world.device)
        for i, (x, y, weight) in enumerate(micro_batches, 1):
            # DDP averages gradients over ranks once per step, with the last micro-batch; FSDP with each, as no
            # rank has the memory for all of them.
            if isinstance(self.model, DDP):
                self.model.require_backward_grad_sync = i == self.plan.accumulation
            with execution.autocast(self.choices):
                _, loss = self.model(x, y)
            loss = loss * weight
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.is_updating = True
        self.scaler.unscale_(self.optimizer)  # clip the true gradients
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.grad_norm_clip or math.inf)
        norm = sharding.full_tensor(norm).to(self.world.device)
        self.scaler.step(self.optimizer)
        self.is_updating = False
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _may_have_threads(self, number: int) -> bool:
        """Whether the next step would have the same result, bit for bit, with this number of threads."""
        if not self.choices["deterministic"]:
            return True
        micro_batches = self._micro_batches()
        inputs = [next(micro_batches) for _ in range(self.plan.accumulation)]
        micro_batches.close()

        def step() -> list[torch.Tensor]:
            distributed.seed_step(self.config.seed, self.step, self.world)
            return [*self.train_step(inputs), *(p.detach().clone() for p in self.parameters)]

        is_same = ignores_threads(step, number, self.bare, self.optimizer, self.scaler)
        if not is_same:
            log.info(
                "threads     other processes are busy; fewer threads would be faster, but change the result: "
                "trainer.deterministic=false allows it"
            )
        return is_same

    def _halve_micro_batch(self, error: Exception) -> None:
        """Halves the micro-batch so that a step that ran out of memory can be repeated; see `memory.halved`."""
        may_repeat = self.world.size == 1 and not self.is_updating
        self.plan = memory.halved(self.plan, self.step + 1, may_repeat, error)
        self.choices["micro_batch_size"] = self.plan.micro_batch_size
        self.train_step = self._make_step()
        self.optimizer.zero_grad()

    def _step_inputs(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches of the next step. Checks requests before each."""
        for _ in range(self.plan.accumulation):
            self.requests.check()
            yield next(micro_batches)

    def _is_over(self) -> bool:
        return self.step >= self.plan.total_steps or self.evaluations.patience_is_over(self.step)

    def _micro_batches(self) -> Generator[MicroBatch]:
        """This rank's micro-batches from the next step on."""
        config, plan, world = self.config, self.plan, self.world
        micro_batches = MicroBatches(self.train_dataset, config.seed, plan, world.rank)
        return prefetch(micro_batches, self.step * plan.accumulation, config.data_loader_workers, world.device)

    def _open_files(self) -> None:
        self.snapshots.open(self.step, HISTORY)
        is_evaluated, run_dir = self.evaluations.is_done(self.step), self.snapshots.run_dir
        self.training_log.open(run_dir, self.step, is_evaluated, self.config.trackers, self.run_config)
        self.on_plan(self)

    @torch.no_grad()
    def _loss(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """The loss that `_eager_step` would return, without training on the micro-batches."""
        with execution.eagerly(self.choices), execution.autocast(self.choices):
            losses = [weight * self.model(x, y)[1] for x, y, weight in micro_batches]
        return torch.stack(losses).sum()

    def _learning_rate(self, step: int) -> float:
        group = self.optimizer.param_groups[0]
        return group.get("initial_lr", group["lr"]) * self.schedule(step, self.plan.total_steps)

    def _make_step(self) -> Callable:
        """`_eager_step`, on one GPU as a CUDA graph."""
        may_capture = self.config.cuda_graph and self.world.size == 1
        if may_capture and can_capture(self.optimizer) and not self.scaler.is_enabled():
            # Compiled code draws other dropout masks than `_loss`, which runs eagerly.
            tolerance = 0.2 if self.choices["compile"] else 0.02
            return CapturedStep(self._eager_step, self._loss, self.optimizer, tolerance)
        return self._eager_step

    def _call_eagerly(self, function: Callable[[], Any]) -> Any:
        """Calls `function`, which runs the model, without torch.compile, and under autocast if sharded."""
        sharded = sharding.is_sharded(self.bare)
        context = execution.autocast(self.choices) if sharded else contextlib.nullcontext()
        with execution.eagerly(self.choices), context:
            return function()

    def _evaluate_if_due(self) -> None:
        if not self.evaluations.is_due(self.step):
            return
        with self.training_log.paused():
            self.training_log.check_finite(self.step)
            self.snapshots.wait()  # the best is the lowest loss whose snapshot was written
            started = time.perf_counter()
            evaluation = self.evaluate()
            seconds = time.perf_counter() - started
            best = self.snapshots.best
            self.training_log.log_evaluation(self.step, evaluation, seconds, best)
            self.evaluations.record(self.step, evaluation.loss, best)

    def evaluate(self) -> Evaluation:
        """The exact loss on the `test_dataset`. Raises `UserError` without one."""
        if self.test_dataset is None:
            raise UserError("evaluate: the Trainer was given no test_dataset")
        with execution.eagerly(self.choices), execution.autocast(self.choices):
            return evaluate(self.bare, self.test_dataset, self.world, self.requests.check, self.max_eval_windows)

    @property
    def max_eval_windows(self) -> int | None:
        """Maximum windows per forward pass in evaluation: the micro-batch if memory limits it, or None."""
        return self.plan.micro_batch_size if self.plan.accumulation > 1 else None

    def _adapt_plan(self) -> None:
        """Changes the number of steps so that training ends at the deadline, by the measured time per step. Starts at a
        third of the plan; from half on, steps are only removed. Checks after logged steps and evaluations.
        """
        step, planned, deadline = self.step, self.plan.total_steps, self.deadline
        is_due = step % self.config.log_every_steps == 0 or self.evaluations.is_done(step)
        if deadline is None or not is_due or 3 * step < max(planned, 6) or self._is_over():
            return
        evaluations = -(-(planned - step) // self.evaluations.interval)  # the last step is always evaluated
        seconds = deadline.at - time.monotonic() - evaluations * deadline.evaluation_s
        step_s = self.training_log.seconds_per_step(step)
        least = step + max(planned // 10, 1)  # even if late: the learning rate has to fall
        most = deadline.most_steps if 2 * step < planned else planned
        total_steps = int(min(max(step + seconds // step_s, least), most))
        total_steps = distributed.all_gather(total_steps, self.world)[0]
        if abs(total_steps - planned) <= MIN_CHANGE * planned:
            return
        log.info(
            "plan        %d steps instead of %d, to end in time: a step takes %.3g s", total_steps, planned, step_s
        )
        self.run_config["trainer"] |= {"max_steps": total_steps, "max_minutes": deadline.minutes}
        self.plan = self.evaluations.plan = self.training_log.plan = replace(self.plan, total_steps=total_steps)
        try:
            distributed.run_on_rank_0(lambda: self.on_plan(self), self.world)
        except UserError as error:  # a full disk does not end the run
            log.warning("%s", error)

    def _save_if_due(self) -> None:
        """Saves a snapshot if one is due or requested, or if this step has the lowest loss."""
        is_best = self.evaluations.is_best(self.step)
        requested = self.requests.save if self.step > 0 else 0
        is_numbered = self.step > 0 and (
            requested == SAVE
            or self._is_over()
            or self.plan.is_due(self.step, self.config.save_every_steps, self.config.save_every)
            or self.snapshots.saved_step == self.step  # resumed: add the evaluation to it
        )
        if not (is_numbered or is_best or requested):
            return
        if requested == SAVE:
            log.info("SIGUSR1: saving after step %d of %d", self.step, self.plan.total_steps)
        with self.training_log.paused():
            self.snapshots.save(self._snapshot(), is_best, is_numbered)
        self.requests.save = 0
        if (loss := self.evaluations.last) and self.evaluations.is_done(self.step):
            self._confirm_save(loss[0])

    def _confirm_save(self, loss: float | torch.Tensor, is_last: bool = False) -> None:
        """Confirms a save with a `loss` computed with its weights. Raises `UserError` if the run has diverged: if the
        weights or, except in a step that float16 skips, the loss are not finite.
        """
        if not self.snapshots.is_unconfirmed:
            return
        bad = self.snapshots.confirm(float(loss))
        if bad == "weights" or (bad and (is_last or not self.scaler.is_enabled())):
            raise self.training_log.divergence(self.step, f"the {bad} to be saved: not finite")
        if bad:
            log.warning("step %d: the snapshot is dropped: its %s is not finite", self.step - 1, bad)

    def _save_last(self, tries: int, pause_s: float) -> None:
        """Waits until this step is saved; tries again every `pause_s` until a signal gives up. Then writes it to the
        system's temporary folder, and raises `UserError`.
        """
        self.requests.begin_last_save()
        snapshots, path = self.snapshots, self.snapshots.path
        for left in reversed(range(tries)):
            if self._save_this_step():
                snapshots.finish()
                return
            if left:
                log.warning("trying again in %g s; Ctrl-C or SIGTERM gives up", pause_s)
                if self.requests.gives_up(pause_s):
                    break
        failed = f"{path}: the snapshot of step {self.step} was not written: {snapshots.last_error}"
        try:
            rescued = snapshots.rescue(self._snapshot())
        except UserError as error:
            raise UserError(f"{failed}; nor to the system's temporary folder: {error}") from error
        raise UserError(
            f"{failed}; it is in {rescued}: to resume from it, make space, move it to {path}, and repeat the command"
        )

    def _save_this_step(self) -> bool:
        """Saves this step unless it is saved, and waits; returns whether it was written. Raises `UserError` if the
        weights have diverged.
        """
        snapshots, step = self.snapshots, self.step
        if not snapshots.is_unconfirmed:
            snapshots.wait()
            if snapshots.saved_step == step:
                return True
            snapshots.save(self._snapshot(), self.evaluations.is_best(step), is_numbered=True)
        loss: Any = self.evaluations.last_loss
        if not self.evaluations.is_done(step):
            micro_batches = MicroBatches(self.train_dataset, self.config.seed, self.plan, self.world.rank)
            x, y, weight = micro_batches[max(step * self.plan.accumulation - 1, 0)]
            loss = self._loss([(x.to(self.world.device), y.to(self.world.device), weight)]).item()
        self._confirm_save(loss, is_last=True)
        snapshots.wait()
        return snapshots.saved_step == step

    def _snapshot(self) -> Snapshot:
        """The state of the run after this step."""
        self.training_log.check_finite(self.step)
        if not sharding.is_sharded(self.bare):
            distributed.check_replicas(self.bare, self.step, self.world)
        loss, loss_step = self.evaluations.last or (None, None)
        return Snapshot(
            model_state=self.bare.state_dict(),
            optimizer_state=optimizer_state(self.bare, self.optimizer),
            finished_epoch=self.plan.finished_epochs(self.step),
            step=self.step,
            windows_seen=self.plan.windows_seen(self.step),
            seed=self.config.seed,
            scaler_state=self.scaler.state_dict(),
            loss=loss,
            loss_step=loss_step,
            since_best=self.evaluations.since_best,
            metrics_lines=self.training_log.sync(),  # on disk before the snapshot that counts them
            processes=self.world.size,
            vocabulary=self.train_dataset.vocabulary,
            text_digest=self.train_dataset.digest,
            parameters=[name for name, _ in self.bare.named_parameters()],
            choices=self.choices,
            config=self.run_config,
            probe_logits=self.probe() if self.probe else torch.empty(0),
        )

    def _restore(self, snapshot: Snapshot) -> None:
        self.snapshots.restore(snapshot, self.bare, self.optimizer)
        if snapshot.scaler_state:
            self.scaler.load_state_dict(snapshot.scaler_state)
        self.step, self.training_log.lines = snapshot.step, snapshot.metrics_lines
        if snapshot.loss is not None and snapshot.loss_step is not None:
            self.evaluations.last = (snapshot.loss, snapshot.loss_step)
            self.evaluations.since_best = snapshot.since_best
        if self.probe and has_changed(self.probe(), snapshot.probe_logits):
            log.warning("%s: %s", self.snapshots.path, CHANGED)

    def _stop(self, stopped: Stopped) -> None:
        """Saves, logs how to resume, and raises `stopped`."""
        self._save_last(*STOP_SAVE)
        self.training_log.log_stopped(self.step, stopped.name, self.snapshots.path, self.config.resume)
        raise stopped
