"""The trainer: steps, accumulation, mixed precision, evaluation, snapshots; nothing of GPT.

    Trainer(config, model, optimizer, train_dataset, test_dataset).train()

`model(x, y)` returns `(anything, loss)`. A data set is a `CharDataset` or has what is used of one
here: `len`, `batch`, `eval_windows`, `num_eval_windows`, `to`, `data`, `block_size`, `vocabulary`, `vocab_size`
and `digest`; with `data_loader_workers`, several threads call `batch` at once. A bare model is
wrapped in `DistributedDataParallel` where there are several processes.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from batches import MicroBatches, prefetch
from engine.config.settings import differences, flatten
from engine.errors import UserError
from engine.machine import choices
from engine.machine.hardware import peak_flops, peak_memory
from engine.parallel import distributed, sharding
from engine.parallel.distributed import Agreement, World, report_unresponsive_ranks
from engine.run.metrics import Metrics
from engine.run.progress import Progress, Stopwatch, duration, flops_per_token, format_loss
from engine.run.signals import Request, Requests, Stopped
from engine.snapshots.saver import Saver, optimizer_state
from engine.snapshots.snapshot import Snapshot, check_can_resume
from evaluation import evaluate
from trainer_config import TrainerConfig, planned_steps

log = logging.getLogger("gpt")

MAX_SKIPPED_STEPS = 25  # steps in a row after which the run counts as diverged
SMALLEST_SCALE = 2.0**-20  # a GradScaler halves its scale at each overflow


class _StopRequested(Exception):
    """All ranks have agreed to stop, for the reason given."""

    def __init__(self, request: Request):
        self.request = request


class Trainer:
    """Trains `model` with `optimizer` on `train_dataset`; evaluates on `test_dataset`; snapshots;
    resumes.

    Args:
        config: see `TrainerConfig`.
        model: bare, or already wrapped or sharded (`sharding.build`). `model.compile` and, if
            there is one, `model.flops_per_token()` are used.
        optimizer: made over the model's parameters; a group's `initial_lr` (or else `lr`) is its
            peak learning rate.
        train_dataset, test_dataset: as this module's first lines say; no evaluation where the
            second is None.
        schedule: the factor on the learning rate at (step, total steps); constant by default.
        sample: draws texts from the model, kept in the metrics so that one sees it learn; called
            on every rank at the same steps, must not touch the global random state.
        world: this process among all; found out, and the process group joined, if not given.
        run_dir: where the files of the run go; that of the `saver`, if there is one.
        run_config: what to keep of the configuration in the snapshot, and to compare when resuming,
            beside or in place of what is known here: `trainer` and, where the model and
            `train_dataset` have a dataclass `config`, `model` and `data`.
        saver: the snapshots of the run, with the one to resume from; made if not given.

    Raises `UserError` for a data set of another kind, where the batch cannot be shared, or the
    snapshot cannot be resumed.
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
        world: World | None = None,
        run_dir: str = ".",
        run_config: dict[str, Any] | None = None,
        saver: Saver | None = None,
    ):
        self.config, self.optimizer, self.schedule = config, optimizer, schedule
        self.sample = sample
        self.train_dataset, self.test_dataset = train_dataset, test_dataset
        if not hasattr(train_dataset, "batch"):
            raise UserError(
                f"train_dataset: a {type(train_dataset).__name__} has no batch(); split a text "
                "with CharDataset.split(), not with random_split"
            )
        self.world = world or distributed.join_processes(
            config.device, config.threads, config.timeout_s
        )
        config.check_world_size(self.world.size)
        bare = distributed.unwrap(model)
        # As plain types: a snapshot holds nothing else.
        given = described(config, bare, train_dataset) | (run_config or {})
        self.run_config = json.loads(json.dumps(given, default=str))
        self.saver = saver or Saver(config, run_dir, self.world)
        self.run_dir = self.saver.run_dir
        self.files = self.saver.files
        self.requests, self.agreement = Requests(), Agreement(self.world)
        self.save_asked = False

        share = config.batch_size // self.world.size
        limit = min(config.micro_batch_size or share, share)
        self.micro_batch_size = next(size for size in range(limit, 0, -1) if share % size == 0)
        self.accumulation = share // self.micro_batch_size
        self.total_steps = planned_steps(config, len(train_dataset))

        self.step = 0
        self.best: tuple[float, int] | None = None  # held-out loss and its step
        self.newest: tuple[float, int] | None = None
        self.metrics_lines = 0
        self.skipped = 0  # steps in a row whose numbers were not finite
        found = self.saver.found
        if found:
            self._check(found)
        if not sharding.is_sharded(bare):  # whose parameters are on their device already
            bare.to(self.world.device)
        device = self.world.device
        characters = self.total_steps * config.batch_size * train_dataset.block_size
        flops = characters * flops_per_token(bare)
        if device.type == "cuda":
            flops /= self.world.size
        earlier = found.choices_on(device.type) if found else {}
        self.choices = choices.choose(config, device, flops, earlier)
        choices.apply(self.choices, bare)
        self.amp_dtype = getattr(torch, self.choices["amp_dtype"])
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp_dtype is torch.float16)
        if found:
            self._restore(found, bare)
        self.bare = self.model = bare
        if model is not bare:
            self.model = model
        elif config.strategy == "ddp":
            self.model = distributed.wrap(bare, self.world)
        elif self.world.size > 1 and not sharding.is_sharded(bare):
            raise UserError(
                "trainer.strategy=fsdp: shard the model (sharding.build), then create its "
                "optimizer, before the Trainer"
            )
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if device.type == "cuda" and config.data_loader_workers == 0:
            datasets = [data for data in (train_dataset, test_dataset) if data is not None]
            memory = torch.cuda.get_device_properties(device).total_memory
            if sum(dataset.data.nbytes for dataset in datasets) <= memory / 10:
                for dataset in datasets:
                    dataset.to(device)

    # ----------------------------------------------------------------------------------------------
    # Snapshots

    def _check(self, snapshot: Snapshot) -> None:
        dataset, path = self.train_dataset, self.files.path
        check_can_resume(snapshot, self.run_config, dataset.vocabulary, dataset.digest, path)
        both = flatten(snapshot.config).keys() & flatten(self.run_config)
        changes = differences(snapshot.config, self.run_config)
        changes = {key: values for key, values in changes.items() if key in both}
        changes["processes"] = (snapshot.processes, self.world.size)
        device = self.world.device.type
        changes["device"] = (snapshot.choices.get("device", device), device)
        for key, (was, now) in changes.items():
            if was != now:
                log.info("changed since the snapshot: %s was %s, is %s", key, was, now)

    def _restore(self, snapshot: Snapshot, bare: nn.Module) -> None:
        self.saver.restore(snapshot, bare, self.optimizer)
        if self.scaler.is_enabled() and snapshot.scaler_state:
            self.scaler.load_state_dict(snapshot.scaler_state)
        self.step = snapshot.step
        self.metrics_lines = snapshot.metrics_lines
        if snapshot.best_loss is not None and snapshot.best_step is not None:
            self.best = (snapshot.best_loss, snapshot.best_step)
        if snapshot.loss is not None and snapshot.loss_step is not None:
            self.newest = (snapshot.loss, snapshot.loss_step)

    def _capture(self) -> Snapshot:
        """The state of the run, its tensors as they are: this rank's, and maybe sharded."""
        best, newest = self.best or (None, None), self.newest or (None, None)
        return Snapshot(
            model_state=self.bare.state_dict(),
            optimizer_state=optimizer_state(self.bare, self.optimizer),
            finished_epoch=self.windows_seen // len(self.train_dataset),
            step=self.step,
            windows_seen=self.windows_seen,
            seed=self.config.seed,
            scaler_state=self.scaler.state_dict(),
            best_loss=best[0],
            best_step=best[1],
            loss=newest[0],
            loss_step=newest[1],
            metrics_lines=self.metrics.lines if self.metrics else 0,
            processes=self.world.size,
            vocabulary=self.train_dataset.vocabulary,
            text_digest=self.train_dataset.digest,
            choices=self.choices,
            config=self.run_config,
        )

    def _save(self, latest: bool, best: bool) -> None:
        """Begins to write the latest snapshot, the best one, or both; every rank calls it."""
        if latest or best:
            self._check_finite()
            # A snapshot vouches for the lines of the steps before it, so they go first.
            first = self.metrics.sync if self.metrics else lambda: None
            self.saver.save(self._capture(), latest, best, first)

    def _poll(self) -> None:
        """Notes a request to save; raises `_StopRequested` on every rank at the same point of the
        run if one of them was asked to stop, or cannot write its snapshots.
        """
        request = self.requests.take()
        if self.saver.gives_up():
            request = Request.GIVE_UP
        agreed = Request(self.agreement(request))
        if agreed > Request.SAVE:
            raise _StopRequested(agreed)
        self.save_asked = self.save_asked or agreed == Request.SAVE

    def _stop(self, request: Request) -> None:
        """Saves, says how to go on, and raises `Stopped`."""
        if request == Request.GIVE_UP:
            raise UserError(
                f"step {self.step}: {self.config.max_save_failures} snapshots in a row could not "
                f"be written (trainer.max_save_failures): {self.saver.why()}; once they can, the "
                "same command resumes from the newest that was"
            )
        if not distributed.run_on_first(lambda: self.saver.has_saved(self.step), self.world):
            self._save(latest=True, best=False)
        distributed.run_on_first(lambda: self.saver.finish(self.step), self.world)
        stopped = Stopped(request)
        log.info(
            "%s: stopped after step %d of %d; the same command%s resumes from %s",
            stopped.name, self.step, self.total_steps,
            ", without trainer.resume=never," if self.config.resume == "never" else "",
            self.files.path,
        )  # fmt: skip
        raise stopped

    # ----------------------------------------------------------------------------------------------
    # Training

    @property
    def windows_seen(self) -> int:
        return self.step * self.config.batch_size

    @property
    def epoch(self) -> float:
        return self.windows_seen / len(self.train_dataset)

    def train(self) -> float | None:
        """Trains to the end of the plan; returns the held-out loss of the last step, nats per
        character.

        Raises `UserError` if the numbers stop being finite or a snapshot cannot be written; the
        last good snapshot then stays as it was.
        """
        if self.step > self.total_steps or (
            self.step == self.total_steps and not self._evaluation_is_due()
        ):
            if self.newest:
                log.info("held-out loss %.4f at step %d", *self.newest)
            log.info(
                "this run is %s: %d of %d steps; to train on, raise trainer.max_steps or "
                "trainer.max_epochs",
                "finished" if self.step == self.total_steps else "past its end",
                self.step,
                self.total_steps,
            )
            return self.newest[0] if self.newest else None
        self.metrics: Metrics | None = None
        self.progress: Progress | None = None
        self.batches = self._batches()

        with self.requests:
            try:
                with report_unresponsive_ranks(self.world, lambda: f"after step {self.step}"):
                    distributed.run_on_first(self._open_files, self.world)
                    self._announce()
                    try:
                        self._train()
                        self.agreement.finish()
                    except _StopRequested as stop:
                        self._stop(stop.request)
                self.saver.finish(self.step)
            finally:
                self.batches.close()
                self.saver.writer.wait()  # after an error, too: what was good then is worth having
                if self.progress:
                    self.progress.close()
                if self.metrics:
                    self.metrics.close()
                    self.metrics_lines = self.metrics.lines
        return self.newest[0] if self.newest else None

    def _open_files(self) -> None:
        self.saver.open()
        evaluated = self.newest is not None and self.newest[1] == self.step
        self.metrics = Metrics(
            self.run_dir,
            self.step,
            evaluated,
            self.metrics_lines,
            self.config.trackers,
            self.run_config,
        )

    def _train(self) -> None:
        self.agreement.finish()  # of a call to `train` before, which was stopped
        self.optimizer.zero_grad()
        # Step, loss and gradient norm of this rank's first step that was not finite.
        self.first_bad = torch.full((3,), -1.0, dtype=torch.float64, device=self.world.device)
        self.stopwatch = Stopwatch(self.step, self.world.device)
        self.progress = Progress(self.step, self.total_steps, shown=self.world.is_first)
        self.model.train()
        if self.step and self._evaluation_is_due():  # a stop came before it
            self.saver.saved_step = None
            self._evaluate_and_save()
        first = self.step + 1
        while self.step < self.total_steps:
            loss, norm = self._train_step()
            self.step += 1
            self.progress.step(self._next_evaluation())
            if self.step == self.total_steps or self.step % self.config.log_every_steps == 0:
                self._log_step(loss, norm)
            if self.step == first:  # which compiles, and says nothing of the others' time
                self.stopwatch = Stopwatch(self.step, self.world.device)
            self._evaluate_and_save()

    def _evaluate_and_save(self) -> None:
        """Does what is due at this step and has not been done."""
        if not (self.save_asked or self._evaluation_is_due() or self._save_is_due()):
            return
        with self.stopwatch.paused():
            better = self._evaluation_is_due() and self._log_evaluation()
            if self.save_asked:
                log.info("SIGUSR1: saving after step %d of %d", self.step, self.total_steps)
            self._save(latest=self._save_is_due(), best=better)
            self.save_asked = False

    def _epochs_ended(self) -> range:
        """The epochs, counted from 1, that the newest step completed."""
        windows = len(self.train_dataset)
        before = (self.windows_seen - self.config.batch_size) // windows
        return range(before + 1, self.windows_seen // windows + 1)

    def _evaluation_is_due(self) -> bool:
        done = self.newest is not None and self.newest[1] == self.step
        return not done and self.step == self._next_evaluation()

    def _next_evaluation(self) -> int | None:
        """The first step from this one on that ends with an evaluation."""
        if self.test_dataset is None:
            return None
        before = max(self.step - 1, 0)
        if every := self.config.eval_every_steps:
            step = (before // every + 1) * every
        else:
            windows, batch = len(self.train_dataset), self.config.batch_size
            step = -(-(before * batch // windows + 1) * windows // batch)
        return min(step, self.total_steps)

    def _save_is_due(self) -> bool:
        if self.saver.saved_step == self.step:
            return False
        epochs, steps = self.config.save_every, self.config.save_every_steps
        if self.save_asked or self.step == self.total_steps:
            return True
        if self.skipped:
            return False  # the run may be past help: the snapshot from before stays
        return bool(
            (steps and self.step % steps == 0)
            or (epochs and any(epoch % epochs == 0 for epoch in self._epochs_ended()))
        )

    def _batches(self) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches from the next step to the end of the run."""
        config = self.config
        return prefetch(
            MicroBatches(
                self.train_dataset, config.seed, config.batch_size, self.accumulation, self.world
            ),
            self.step * self.accumulation,
            self.total_steps * self.accumulation,
            config.data_loader_workers,
            pinned=self.world.device.type == "cuda" and config.data_loader_workers > 0,
        )

    def _train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step. Returns this rank's mean loss and the gradient norm of all, on the
        device.
        """
        config, device = self.config, self.world.device
        self._seed(step_seed(config.seed, self.step, self.world.rank))
        factor = self.schedule(self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        total = torch.zeros((), device=device)
        for i in range(self.accumulation):
            self._poll()
            x, y = (z.to(device, non_blocking=True) for z in next(self.batches))
            # DDP sums gradients over processes once a step, with the last micro-batch. FSDP does
            # with each: no process has the memory for all of them.
            with (
                self.model.no_sync()
                if i + 1 < self.accumulation and isinstance(self.model, DDP)
                else contextlib.nullcontext()
            ):
                with self._autocast():
                    _, loss = self.model(x, y)
                self.scaler.scale(loss / self.accumulation).backward()
            total += loss.detach()
        # Before clipping: the limit is meant for the true gradients.
        self.scaler.unscale_(self.optimizer)
        if config.grad_norm_clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, config.grad_norm_clip)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = sharding.full_tensor(norm).to(device)
        if config.on_nonfinite == "skip" and not self.scaler.is_enabled() and not norm.isfinite():
            self._skip(norm)
        else:
            self.skipped = 0
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        loss = total / self.accumulation
        now = torch.stack((torch.full_like(loss, self.step + 1), loss, norm)).double()
        bad = ~now.isfinite().all() & (self.first_bad[0] < 0)
        self.first_bad = torch.where(bad, now, self.first_bad)
        return loss, norm

    def _skip(self, norm: torch.Tensor) -> None:
        """Notes that a step was left out; the norm, and so the decision, is that of all ranks."""
        self.skipped += 1
        log.warning("step %d: gradient norm %g: no update", self.step + 1, norm)
        if self.skipped >= MAX_SKIPPED_STEPS:
            why = f"the gradient norm was not finite {MAX_SKIPPED_STEPS} times in a row"
            raise self._diverged(self.step + 1, why)

    def _learning_rate(self, step: int) -> float:
        """That of the first parameter group at `step`."""
        return self.optimizer.param_groups[0]["initial_lr"] * self.schedule(step, self.total_steps)

    def _seed(self, seed: int) -> None:
        # torch.manual_seed would do, but takes a stack trace each time where there is no GPU.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _check_finite(self) -> None:
        """Raises `UserError` on every rank if a loss or gradient norm was not finite. Waits for the
        device.
        """
        if self.scaler.is_enabled():
            if self.scaler.get_scale() < SMALLEST_SCALE:
                why = "float16 gradients overflow at any scale"
                raise self._diverged(self.step, why)
            return  # the scaler skips such steps and lowers its scale: that is its work
        if self.config.on_nonfinite == "skip":
            return
        any_bad = distributed.sum_over_ranks((self.first_bad[0] >= 0).long(), self.world)
        if any_bad.item():
            firsts = distributed.gather(self.first_bad.tolist(), self.world)
            step, loss, norm = min(
                (first for first in firsts if first[0] >= 0),
                key=lambda first: (first[0], math.isfinite(first[1])),
            )
            lr = self._learning_rate(int(step) - 1)
            raise self._diverged(
                int(step),
                f"loss {loss:g}, gradient norm {norm:g} at learning rate {lr:.3g}",
                ", raise optimizer.warmup_steps, or skip such steps (trainer.on_nonfinite=skip)",
                loss,
                norm,
            )

    def _diverged(
        self,
        step: int,
        what: str,
        more: str = "",
        loss: float = math.nan,
        norm: float = math.nan,
    ) -> UserError:
        """The error of a run whose numbers are past help, and the ways out; `more` of them. Whoever
        reads the run's metrics is told, too.
        """
        if self.metrics:
            epoch = step * self.config.batch_size / len(self.train_dataset)
            self.metrics.log(step, epoch, "train", loss, grad_norm=norm, diverged=what)
        return UserError(
            f"step {step}: {what}: training has diverged; lower optimizer.learning_rate{more}; "
            "what snapshots there are stay as they were"
        )

    def _log_step(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        self._check_finite()
        mean = distributed.sum_over_ranks(loss.double(), self.world).item() / self.world.size
        samples = self._draw_samples()
        if not self.metrics:
            return
        assert self.progress is not None  # since `_train` began
        seconds_per_step = self.stopwatch.lap(self.step)
        rate = self.config.batch_size * self.train_dataset.block_size / seconds_per_step
        peak = peak_flops(self.world.device) if self.amp_dtype.itemsize == 2 else None
        mfu = rate * flops_per_token(self.bare) / (peak * self.world.size) if peak else None
        lr = self.optimizer.param_groups[0]["lr"]
        self.metrics.log(
            self.step,
            self.epoch,
            "train",
            mean,
            lr=lr,
            grad_norm=norm.item(),
            tokens_per_s=rate,
            mfu=mfu,
            memory=peak_memory(self.world.device),
            **samples,
        )
        self.progress.log(mean, rate)
        left = duration(seconds_per_step * (self.total_steps - self.step))
        log.info(
            "step %*d/%d | epoch %.3f | loss %.4f | lr %.2e | norm %.2f | %s characters/s%s | %s "
            "left",
            len(str(self.total_steps)), self.step, self.total_steps, self.epoch, mean, lr,
            norm.item(),
            f"{rate:,.0f}", f" | MFU {mfu:.0%}" if mfu is not None else "", left,
        )  # fmt: skip

    def _draw_samples(self) -> dict[str, list[str]]:
        """Samples for the lines 1, 4, 16, ... and the last of those that log a step: a handful a
        run, the same ones after a resume.
        """
        line = self.step // self.config.log_every_steps
        due = line.bit_count() == 1 and line.bit_length() % 2 == 1  # a power of 4
        if self.sample is None or not (due or self.step == self.total_steps):
            return {}
        # A model that is sharded computes in the type that its blocks are gathered in.
        sharded = sharding.is_sharded(self.bare)
        precision = self._autocast() if sharded else contextlib.nullcontext()
        with self.stopwatch.paused(), self._eagerly(), precision:
            return {"samples": self.sample()}

    # ----------------------------------------------------------------------------------------------
    # Evaluation

    def _log_evaluation(self) -> bool:
        """Evaluates; returns whether this is the lowest held-out loss so far."""
        self._check_finite()
        started = time.perf_counter()
        loss, scored, rank_losses = self.evaluate()
        if not math.isfinite(loss):
            lr = self._learning_rate(self.step - 1)
            why = f"the held-out loss is {loss} at learning rate {lr:.3g}"
            raise self._diverged(self.step, why)
        self.newest = (loss, self.step)
        best = min(self.best or self.newest, self.newest)  # the first of equals
        better, self.best = best is self.newest, best
        if self.metrics:
            self.metrics.log(
                self.step, self.epoch, "val", loss, tokens=scored, rank_losses=rank_losses
            )
            per_rank = (
                f" | by rank {' '.join(format_loss(x) for x in rank_losses)}"
                if self.world.size > 1
                else ""
            )
            log.info(
                "step %*d/%d | held-out loss %.4f (%.4f bits per character)%s | %s characters in "
                "%.1f s%s",
                len(str(self.total_steps)), self.step, self.total_steps, loss, loss / math.log(2),
                "" if better else f" | best {best[0]:.4f} at step {best[1]}",
                f"{scored:,}", time.perf_counter() - started, per_rank,
            )  # fmt: skip
        return better

    def evaluate(self) -> tuple[float, int, list[float | None]]:
        """The loss over the held-out text, as `evaluation.evaluate` has it.

        Runs the plain model: compiling for evaluation would cost more than it saves. Raises
        `UserError` without a `test_dataset`.
        """
        if self.test_dataset is None:
            raise UserError("evaluate: the Trainer was given no test_dataset")
        with self._eagerly(), self._autocast():
            return evaluate(self.bare, self.test_dataset, self.world, self._poll)

    def _eagerly(self) -> contextlib.AbstractContextManager:
        """Where nothing is compiled."""
        if self.choices["compile"]:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def _autocast(self):
        enabled = self.amp_dtype is not torch.float32
        return torch.autocast(
            self.world.device.type, dtype=self.amp_dtype if enabled else None, enabled=enabled
        )

    # ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Says, before the first step, what is about to happen and on what."""
        config, world, dataset = self.config, self.world, self.train_dataset
        if world.device.type == "cuda":
            device = torch.cuda.get_device_name(world.device)
        else:
            threads = torch.get_num_threads()
            device = f"CPU, {threads} thread{'s' * (threads > 1)} a process"
        processes = f"{world.size} process{'es' * (world.size > 1)}"
        sharded = ", the model sharded" * sharding.is_sharded(self.bare)
        parameters = sum(p.numel() for p in self.parameters)
        characters = config.batch_size * dataset.block_size
        log.info("device      %s; %s%s", device, processes, sharded)
        log.info(
            "precision   %s%s; %s; %s", self.choices["amp_dtype"],
            " with loss scaling" if self.scaler.is_enabled() else "",
            "compiled (the first step waits for it)" if self.choices["compile"] else "not compiled",
            "deterministic" if self.choices["deterministic"] else "not deterministic",
        )  # fmt: skip
        log.info("parameters  %s", f"{parameters:,}")
        log.info(
            "batch       %d windows = %s x %d micro-batch x %d accumulated; x %d characters = %s "
            "characters a step",
            config.batch_size, processes, self.micro_batch_size, self.accumulation,
            dataset.block_size,
            f"{characters:,}",
        )  # fmt: skip
        held_out = len(self.test_dataset.data) if self.test_dataset is not None else 0
        log.info(
            "split       %s characters to train on, %s held out, %d distinct",
            f"{len(dataset.data):,}", f"{held_out:,}", dataset.vocab_size,
        )  # fmt: skip
        log.info(
            "epoch       %s windows, one from each character: %s characters",
            f"{len(dataset):,}", f"{len(dataset) * dataset.block_size:,}",
        )  # fmt: skip
        planned = self.total_steps * characters
        log.info(
            "plan        %d step%s = %s characters = %.3g times the text = %.3g epochs%s",
            self.total_steps, "s" * (self.total_steps > 1), f"{planned:,}",
            planned / len(dataset.data), self.total_steps * config.batch_size / len(dataset),
            f"; from step {self.step}" if self.step else "",
        )  # fmt: skip


def described(config: TrainerConfig, model: nn.Module, dataset: Any) -> dict[str, Any]:
    """The configuration of a run that a program of its own has put together, as far as it shows."""
    described: dict[str, Any] = {"trainer": dataclasses.asdict(config)}
    for name, part in (("model", model), ("data", dataset)):
        own: Any = getattr(part, "config", None)
        if dataclasses.is_dataclass(own) and not isinstance(own, type):
            described[name] = dataclasses.asdict(own)
    return described


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of all that is random in one step of one rank: no generator needs saving."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
