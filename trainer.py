"""Trainer: optimizer steps, evaluation, snapshots and resuming, with DDP, FSDP2 and mixed precision.

    Trainer(config, model, optimizer, train_dataset, test_dataset).train()

It knows nothing of GPT nor of Hydra: `model(x, y)` returns `(anything, loss)`, and a data set is a
`CharDataset` or has the same `len`, `batch`, `eval_windows`, `num_eval_windows`, `to`, `data`,
`block_size`, `vocabulary`, `vocab_size` and `digest`.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from char_dataset import MicroBatches, prefetch
from engine.config import auto
from engine.config.checks import check_option, check_range
from engine.errors import UserError
from engine.kernels.graph import CapturedStep
from engine.machine.hardware import flops_per_token, peak_flops
from engine.parallel import distributed, sharding
from engine.parallel.distributed import Agreement, World, report_unresponsive_ranks
from engine.run import trackers
from engine.run.directory import HISTORY
from engine.run.divergence import DivergenceCheck
from engine.run.evaluation import evaluate
from engine.run.plan import Plan
from engine.run.training_log import TrainingLog, announce
from engine.signals import Request, Requests, Stopped
from engine.snapshots.manager import SnapshotManager, optimizer_state
from engine.snapshots.probe import CHANGED, has_changed
from engine.snapshots.snapshot import Snapshot, check_can_resume
from engine.snapshots.storage import is_local

log = logging.getLogger("gpt")

OPTIONS = {
    "amp_dtype": ("auto", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "compile": ("auto", "true", "false"),
    "deterministic": ("auto", "true", "false"),
    "strategy": ("ddp", "fsdp"),
    "snapshot_format": ("single", "sharded"),
    "resume": ("auto", "must", "never"),
}
POSITIVE = (
    *("max_epochs", "max_steps", "batch_size", "micro_batch_size", "grad_norm_clip", "save_every"),
    *("save_every_steps", "keep_snapshots", "max_save_failures", "eval_every_steps"),
    *("log_every_steps", "threads", "timeout_s"),
)
RANGES = {
    "batch_size": (1, 2**20),
    "data_loader_workers": (0, 1024),
    "threads": (1, 1024),
    "timeout_s": (0, 1e6),
    "seed": (0, 2**63 - 1),
}


@dataclass
class TrainerConfig:
    """The training loop: length, batch, precision, evaluation, snapshots, processes."""

    # fmt: off
    max_epochs: int | None = 10  # epochs; null: no limit
    max_steps: int | None = None  # optimizer steps; null: no limit; if both are set, whichever is reached first
    batch_size: int = 64  # windows per optimizer step, over all processes together
    micro_batch_size: int | None = None  # windows per process and forward pass, at most; null: its whole share
    grad_norm_clip: float | None = 1.0  # maximum L2 norm of the gradient over all parameters; null: no clipping
    data_loader_workers: int = 0  # prefetch threads; 0: none, usually enough
    snapshot_path: str = "gpt_snapshot.pt"  # latest snapshot: a path, in run_dir unless absolute, or a URL
    save_every: int | None = 1  # epochs between snapshots; null: not by epochs; the last step always saves
    save_every_steps: int | None = None  # steps between snapshots; null: not by steps
    keep_snapshots: int | None = None  # numbered snapshots to keep; null: only latest, .prev and .best
    snapshot_format: str = "single"  # single: one file; sharded: one part per process, for models beyond one host
    max_save_failures: int = 3  # snapshots in a row that may fail to be written before the run ends
    eval_every_steps: int | None = None  # steps between evaluations; null: every epoch; the last step always evaluates
    log_every_steps: int = 10  # steps between progress lines
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])  # of tensorboard and wandb, if installed
    use_amp: bool = True  # automatic mixed precision; false: float32
    amp_dtype: str = "auto"  # bfloat16, float16 (with loss scaling) or auto: bfloat16 where the hardware has it
    seed: int = 1337  # of the weights, the order of the windows and dropout
    device: str = "auto"  # cpu, cuda or auto: cuda where there is a GPU
    threads: int | None = None  # CPU threads per process; null: the host's cores shared among its processes
    compile: str = "auto"  # torch.compile: true, false or auto: for runs long enough to gain from it
    deterministic: str = "auto"  # true, false or auto: equal bit for bit from run to run, on a CPU
    cuda_graph: bool = True  # replay each step as one CUDA graph, on a single GPU; not with float16
    strategy: str = "ddp"  # ddp: every process has the whole model; fsdp: its share of it (FSDP2)
    resume: str = "auto"  # auto: from snapshot_path if it exists; must; never: rename the old files, start from scratch
    timeout_s: float = 600.0  # seconds to wait for another process before giving up
    # fmt: on

    def __post_init__(self):
        # From Python as well as from YAML, where `true` needs no quotes.
        self.compile = str(self.compile).lower()
        self.deterministic = str(self.deterministic).lower()
        for protocol in ("file://", "local://"):  # fsspec's names for a local path
            self.snapshot_path = self.snapshot_path.removeprefix(protocol)
        for name, allowed in OPTIONS.items():
            check_option(f"trainer.{name}", getattr(self, name), allowed)
        for name in POSITIVE:
            check_range(f"trainer.{name}", getattr(self, name), above=0)
        for name, (low, high) in RANGES.items():
            check_range(f"trainer.{name}", getattr(self, name), low, high)
        if self.max_epochs is None and self.max_steps is None:
            raise UserError(
                "trainer.max_epochs and trainer.max_steps are both null: one must end the run"
            )
        if self.snapshot_format == "sharded" and not is_local(self.snapshot_path):
            raise UserError(
                f"trainer.snapshot_path={self.snapshot_path}: trainer.snapshot_format=sharded needs a "
                "folder that all hosts see, not a URL"
            )
        trackers.check(self.trackers)

    def check_world_size(self, size: int) -> None:
        """Raises `UserError` if `size` processes cannot share the batch equally."""
        if self.batch_size % size:
            nearest = self.batch_size // size * size or size, -(-self.batch_size // size) * size
            raise UserError(
                f"trainer.batch_size={self.batch_size}: must be divisible by the number of processes, "
                f"{size}; the nearest that are: {nearest[0]}, {nearest[1]}"
            )

    def resolve_amp_dtype(self, device: torch.device, earlier: dict[str, Any]) -> str:
        """The type to compute in; `earlier` are the choices of the snapshot to resume from."""
        return auto.resolve_amp_dtype(device, self.amp_dtype, self.use_amp, earlier)

    def open_snapshots(self, run_dir: str, world: World) -> SnapshotManager:
        """The snapshots of the run in `run_dir`, the newest one read. Raises `UserError`."""
        return SnapshotManager(
            self.snapshot_path,
            run_dir,
            world,
            resume=self.resume,
            keep=self.keep_snapshots,
            sharded=self.snapshot_format == "sharded",
            max_failures=self.max_save_failures,
        )


class _StopRequested(Exception):
    """All ranks agreed to stop, on the request in `args[0]`."""


class Trainer:
    """Trains `model` with `optimizer` on `train_dataset`; evaluates on `test_dataset`; saves; resumes.

    Args:
        model: bare, wrapped in DDP, or sharded (`sharding.build`); a bare one is wrapped in DDP if there
            are several processes.
        optimizer: over the model's parameters; a group's `initial_lr` (or else `lr`) is its peak
            learning rate.
        test_dataset: None for no evaluation.
        schedule: factor on the learning rate at (step, total steps); constant by default.
        sample: draws texts from the model for the metrics; called on every rank at the same steps; must
            leave the global random state alone.
        probe: logits of the model for one fixed input, kept in snapshots; called like `sample`.
        world: rank, world size and device; by default from the launcher's environment.
        run_dir: where the files of the run go; `snapshots`, if given, know it.
        run_config: settings to keep in the snapshot and to compare when resuming, beside what is known
            here: `trainer` and, where model and data set have a dataclass `config`, `model` and `data`.
        snapshots: the snapshots of the run; by default those in `run_dir`.
        on_start: called on rank 0 when training starts and the files of the run are open.

    Raises `UserError` for a data set of another kind, a batch that cannot be shared, or a snapshot that
    cannot be resumed.
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
        on_start: Callable[[], None] = lambda: None,
    ):
        if not hasattr(train_dataset, "batch"):
            raise UserError(
                f"train_dataset: a {type(train_dataset).__name__} has no batch(); split a text with "
                "CharDataset.split(), not with random_split"
            )
        self.config, self.optimizer, self.schedule = config, optimizer, schedule
        self.train_dataset, self.test_dataset = train_dataset, test_dataset
        self.sample, self.probe, self.on_start = sample, probe, on_start
        self.world = world or distributed.join_processes(
            config.device, config.threads, config.timeout_s
        )
        config.check_world_size(self.world.size)
        device, bare = self.world.device, distributed.unwrap(model)
        self.run_config = as_plain(describe(config, bare, train_dataset) | (run_config or {}))
        self.plan = Plan.make(
            len(train_dataset),
            train_dataset.block_size,
            config.batch_size,
            config.micro_batch_size,
            config.max_steps,
            config.max_epochs,
            self.world.size,
        )
        self.step = 0
        self.newest: tuple[float, int] | None = None  # held-out loss and its step
        self.snapshots = snapshots or config.open_snapshots(run_dir, self.world)
        found = self.snapshots.found
        if found:
            check_can_resume(
                found,
                self.run_config,
                vocabulary=train_dataset.vocabulary,
                text_digest=train_dataset.digest,
                processes=self.world.size,
                device=device.type,
                path=self.snapshots.path,
            )
        if not sharding.is_sharded(bare):  # whose parameters are on their device already
            bare.to(device)
        earlier = found.choices_on(device.type) if found else {}
        flops = self.plan.total_steps * self.plan.characters * flops_per_token(bare)
        self.choices = auto.resolve(
            device,
            config.resolve_amp_dtype(device, earlier),
            config.compile,
            config.deterministic,
            flops / self.world.size if device.type == "cuda" else flops,
            earlier,
        )
        auto.apply(self.choices, bare)
        self.amp_dtype = getattr(torch, self.choices["amp_dtype"])
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp_dtype is torch.float16)
        self.metrics_lines = 0
        if found:
            self._restore(found, bare)
        self.bare, self.model = bare, model
        if model is bare and config.strategy == "ddp":
            self.model = distributed.wrap(bare, self.world)
        elif model is bare and self.world.size > 1 and not sharding.is_sharded(bare):
            raise UserError(
                "trainer.strategy=fsdp: shard the model (sharding.build), then create its optimizer, "
                "before the Trainer"
            )
        if found and probe and has_changed(self._call_eagerly(probe), found.probe_logits):
            log.warning("%s: %s", self.snapshots.path, CHANGED)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.requests, self.agreement = Requests(), Agreement(self.world)
        self.update: Callable = self._update
        one_gpu = device.type == "cuda" and self.world.size == 1
        if config.cuda_graph and one_gpu and not self.scaler.is_enabled():
            for group in optimizer.param_groups:  # a graph repeats numbers, but reads tensors
                peak = group.setdefault("initial_lr", group["lr"])
                group["lr"] = torch.tensor(peak, device=device)
                if "capturable" in group:
                    group["capturable"] = True
            self.update = CapturedStep(self._update, self._loss)
        self.save_requested = False
        self.log = TrainingLog(
            self.world,
            self.plan,
            config.log_every_steps,
            flops_per_token(bare),
            peak_flops(device) if self.amp_dtype.itemsize == 2 else None,
        )
        if device.type == "cuda" and config.data_loader_workers == 0:
            datasets = [data for data in (train_dataset, test_dataset) if data is not None]
            memory = torch.cuda.get_device_properties(device).total_memory
            if sum(dataset.data.nbytes for dataset in datasets) <= memory / 10:
                for dataset in datasets:
                    dataset.to(device)

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest held-out loss that has a snapshot, and its step."""
        return self.snapshots.best

    # ----------------------------------------------------------------------------------------------
    # The loop

    def train(self) -> float | None:
        """Trains to the end of the plan; returns the held-out loss of the last step, nats per character.

        Raises `Stopped` if a signal asked for it, and `UserError` if the numbers stop being finite or
        snapshots cannot be written; the snapshots saved before stay.
        """
        if self._is_finished():
            return self.newest[0] if self.newest else None
        with self._running():
            try:
                self._evaluate_and_save()  # a stop may have come between a step and its evaluation
                while self.step < self.total_steps:
                    loss, grad_norm = self._train_step()
                    self.step += 1
                    self._log_step(loss, grad_norm)
                    self._evaluate_and_save()
                self.agreement.finish()
            except _StopRequested as stop:
                self._stop(*stop.args)
            self.snapshots.finish(self.step)
        return self.newest[0] if self.newest else None

    def _is_finished(self) -> bool:
        if self.step < self.total_steps or self._evaluation_is_due():
            return False
        if self.newest:
            log.info("held-out loss %.4f at step %d", *self.newest)
        log.info(
            "this run is finished: %d of %d steps; to train longer, raise trainer.max_steps or "
            "trainer.max_epochs", self.step, self.total_steps,
        )  # fmt: skip
        return True

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Everything that is open while the loop runs: files, signal handlers, threads, the log."""
        self.batches = self._batches()
        with (
            self.requests,
            report_unresponsive_ranks(self.world, lambda: f"after step {self.step}"),
        ):
            try:
                distributed.run_on_first(self._open_files, self.world)
                announce(self)
                self.agreement.finish()  # of an earlier call to `train`, which was stopped
                self.optimizer.zero_grad()
                self.divergence = DivergenceCheck(
                    self.world, self.scaler, self._learning_rate, self.log
                )
                self.log.start(self.step)
                self.model.train()
                yield
            finally:
                self.batches.close()
                self.snapshots.close()  # after an error, too, a save in progress is worth its time
                self.log.close()
                self.metrics_lines = self.log.lines

    def _batches(self) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches from the next step to the end of the run."""
        config, plan, world = self.config, self.plan, self.world
        return prefetch(
            MicroBatches(
                self.train_dataset, config.seed, config.batch_size, plan.accumulation,
                world.rank, world.size,
            ),
            self.step * plan.accumulation,
            plan.total_steps * plan.accumulation,
            config.data_loader_workers,
            pinned=world.device.type == "cuda" and config.data_loader_workers > 0,
        )  # fmt: skip

    def _open_files(self) -> None:
        self.snapshots.open(HISTORY)
        self.log.open(
            self.snapshots.run_dir,
            self.step,
            self.newest is not None and self.newest[1] == self.step,
            self.metrics_lines,
            self.config.trackers,
            self.run_config,
        )
        self.on_start()

    def _train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step. Returns this rank's mean loss and the gradient norm over all ranks, on the
        device.
        """
        seed_step(self.config.seed, self.step, self.world)
        factor = self.schedule(self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            rate = group.setdefault("initial_lr", group["lr"]) * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss, norm = self.update(self._micro_batches())
        self.divergence.note(self.step + 1, loss, norm)
        return loss, norm

    def _micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches of one step, on the device."""
        for _ in range(self.plan.accumulation):
            self._check_requests()
            x, y = next(self.batches)
            device = self.world.device
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def _update(
        self, micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward passes, clipping and the optimizer's update; returns as `_train_step`."""
        accumulation = self.plan.accumulation
        total = torch.zeros((), device=self.world.device)
        for i, (x, y) in enumerate(micro_batches, 1):
            # DDP sums gradients over ranks once a step, with the last micro-batch; FSDP with each, as no
            # rank has the memory for all of them.
            with (
                self.model.no_sync()
                if i < accumulation and isinstance(self.model, DDP)
                else contextlib.nullcontext()
            ):
                with self._autocast():
                    _, loss = self.model(x, y)
                self.scaler.scale(loss / accumulation).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)  # the clipping limit is for the true gradients
        if self.config.grad_norm_clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.config.grad_norm_clip)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = sharding.full_tensor(norm).to(self.world.device)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total / accumulation, norm

    @torch.no_grad()
    def _loss(self, micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The mean loss of a step's micro-batches, without training on them."""
        with self._eagerly(), self._autocast():
            return torch.stack([self.model(x, y)[1] for x, y in micro_batches]).mean()

    def _learning_rate(self, step: int) -> float:
        group = self.optimizer.param_groups[0]
        return group.get("initial_lr", group["lr"]) * self.schedule(step, self.total_steps)

    def _autocast(self):
        enabled = self.amp_dtype is not torch.float32
        return torch.autocast(
            self.world.device.type, dtype=self.amp_dtype if enabled else None, enabled=enabled
        )

    def _eagerly(self) -> contextlib.AbstractContextManager:
        """Disables torch.compile, which would compile evaluation, too, and cost more than it saves."""
        if self.choices["compile"]:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def _log_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Logs the step if a line is due."""
        self.log.count(self.step)
        if not self.log.is_due(self.step):
            return
        self.divergence.check(self.step)
        mean = distributed.sum_over_ranks(loss.double(), self.world).item() / self.world.size
        samples: list[str] = []
        if self.sample is not None and self.log.samples_are_due(self.step):
            with self.log.paused():
                samples = self._call_eagerly(self.sample)
        self.log.log_step(self.step, mean, self._learning_rate(self.step - 1), grad_norm, samples)

    def _call_eagerly(self, function: Callable[[], Any]) -> Any:
        """`function()`, which runs the model; a sharded one computes in the type it is gathered in."""
        sharded = sharding.is_sharded(self.bare)
        with self._eagerly(), self._autocast() if sharded else contextlib.nullcontext():
            return function()

    # ----------------------------------------------------------------------------------------------
    # Evaluating and saving

    def _evaluate_and_save(self) -> None:
        """Does what is due at this step and has not been done."""
        evaluates = self._evaluation_is_due()
        if not (evaluates or self._save_is_due()):
            return
        with self.log.paused():
            lacks_evaluation = evaluates and self.snapshots.saved_step == self.step
            is_best = evaluates and self._evaluate()
            latest = lacks_evaluation or self._save_is_due()
            if self.save_requested:
                log.info("SIGUSR1: saving after step %d of %d", self.step, self.total_steps)
                self.save_requested = False
            if latest or is_best:
                self._save(latest, is_best)

    def _evaluation_is_due(self) -> bool:
        if self.test_dataset is None or (self.newest is not None and self.newest[1] == self.step):
            return False
        every_steps = self.config.eval_every_steps
        return self.step > 0 and (
            self.step == self.total_steps
            or self.plan.is_due(self.step, every_steps, None if every_steps else 1)
        )

    def _save_is_due(self) -> bool:
        if self.step == 0 or self.snapshots.saved_step == self.step:
            return False
        return (
            self.save_requested
            or self.step == self.total_steps
            or self.plan.is_due(self.step, self.config.save_every_steps, self.config.save_every)
        )

    def _evaluate(self) -> bool:
        """Evaluates and logs; returns whether this is the lowest held-out loss so far."""
        self.divergence.check(self.step)
        started = time.perf_counter()
        loss, characters, rank_losses = self.evaluate()
        if not math.isfinite(loss):
            raise self.divergence.error(self.step, f"the held-out loss is {loss}")
        self.newest = (loss, self.step)
        self.snapshots.wait()  # the best is the lowest loss whose snapshot was written
        seconds = time.perf_counter() - started
        self.log.log_evaluation(self.step, loss, characters, rank_losses, seconds, self.best)
        return self.best is None or loss < self.best[0]

    def evaluate(self) -> tuple[float, int, list[float | None]]:
        """(nats per character, characters scored, each rank's loss) of the held-out text; see
        engine/run/evaluation.py. Raises `UserError` without a `test_dataset`.
        """
        if self.test_dataset is None:
            raise UserError("evaluate: the Trainer was given no test_dataset")
        with self._eagerly(), self._autocast():
            return evaluate(self.bare, self.test_dataset, self.world, self._check_requests)

    def _save(self, latest: bool, is_best: bool) -> None:
        self.divergence.check(self.step)
        newest, seen = self.newest or (None, None), self.plan.windows_seen(self.step)
        snapshot = Snapshot(
            model_state=self.bare.state_dict(),
            optimizer_state=optimizer_state(self.bare, self.optimizer),
            finished_epoch=self.plan.finished_epochs(self.step),
            step=self.step,
            windows_seen=seen,
            seed=self.config.seed,
            scaler_state=self.scaler.state_dict(),
            loss=newest[0],
            loss_step=newest[1],
            metrics_lines=self.log.sync(),  # first, as the snapshot vouches for these lines
            processes=self.world.size,
            vocabulary=self.train_dataset.vocabulary,
            text_digest=self.train_dataset.digest,
            choices=self.choices,
            config=self.run_config,
            probe_logits=self._call_eagerly(self.probe) if self.probe else torch.empty(0),
        )
        self.snapshots.save(snapshot, latest, is_best)

    # ----------------------------------------------------------------------------------------------
    # Resuming and stopping

    def _restore(self, snapshot: Snapshot, bare: nn.Module) -> None:
        self.snapshots.restore(snapshot, bare, self.optimizer)
        if self.scaler.is_enabled() and snapshot.scaler_state:
            self.scaler.load_state_dict(snapshot.scaler_state)
        self.step, self.metrics_lines = snapshot.step, snapshot.metrics_lines
        if snapshot.loss is not None and snapshot.loss_step is not None:
            self.newest = (snapshot.loss, snapshot.loss_step)

    def _check_requests(self) -> None:
        """Notes a request to save; raises `_StopRequested` on every rank at the same point of the run if
        one of them was asked to stop.
        """
        agreed = Request(self.agreement(self.requests.take()))
        if agreed > Request.SAVE:
            raise _StopRequested(agreed)
        self.save_requested = self.save_requested or agreed == Request.SAVE

    def _stop(self, request: Request) -> None:
        """Saves, logs how to resume, and raises `Stopped`."""
        self.agreement.finish()
        self.snapshots.wait()
        if self.snapshots.saved_step != self.step:
            self._save(latest=True, is_best=False)
        self.snapshots.finish(self.step)
        stopped = Stopped(request)
        log.info(
            "%s: stopped after step %d of %d; the same command%s resumes from %s",
            stopped.name, self.step, self.total_steps,
            ", without trainer.resume=never," if self.config.resume == "never" else "",
            self.snapshots.path,
        )  # fmt: skip
        raise stopped


def seed_step(seed: int, step: int, world: World) -> None:
    """Seeds everything random in one step of one rank, so that no generator needs saving."""
    digest = hashlib.blake2b(f"{seed} {step} {world.rank}".encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(own)  # torch.manual_seed takes a stack trace at each call
    if world.device.type == "cuda":
        torch.cuda.manual_seed(own)


def describe(config: TrainerConfig, model: nn.Module, dataset: Any) -> dict[str, Any]:
    """The settings of trainer, model and data set, where they have a dataclass `config`."""
    described: dict[str, Any] = {"trainer": dataclasses.asdict(config)}
    for name, part in (("model", model), ("data", dataset)):
        own: Any = getattr(part, "config", None)
        if dataclasses.is_dataclass(own) and not isinstance(own, type):
            described[name] = dataclasses.asdict(own)
    return described


def as_plain(config: dict[str, Any]) -> dict[str, Any]:
    """Plain types alone, as a snapshot holds them."""
    return json.loads(json.dumps(config, default=str))
