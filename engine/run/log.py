"""The log of a run: progress lines, `metrics.jsonl`, and experiment trackers."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.config.schema import TrainerConfig
from engine.errors import UserError, one_line
from engine.kernels import build
from engine.machine.hardware import device_name, peak_flops, peak_memory
from engine.parallel import distributed
from engine.portable import is_installed
from engine.precision import Precision
from engine.run.evaluation import Evaluation
from engine.run.metrics import MetricsFile, duration, format_loss
from engine.run.plan import Plan
from engine.run.trackers import TRACKERS, Tracker
from engine.snapshots.state import State

log = logging.getLogger("gpt")
MANY_PASSES = 50  # over the text
MOST_SKIPPED = 10  # steps in a row, which a GradScaler skips because their gradients overflow


class RunLog:
    """The log of a run; it also ends the run once gradients are no longer finite. All ranks call the same methods in
    the same order; rank 0 writes.

    Args:
        flops_per_character: of training, for the model FLOPs utilization (MFU).
        unit: "character" or "byte".
        scaler: skips float16 steps that overflow.
        sample: draws texts, on every rank; None for none.
    """

    def __init__(
        self,
        config: TrainerConfig,
        plan: Plan,
        state: State,
        flops_per_character: float,
        unit: str,
        scaler: torch.amp.GradScaler,
        sample: Callable[[], list[str]] | None,
    ):
        self.config, self.plan, self.state = config, plan, state
        self.flops_per_character, self.unit, self.scaler, self.sample = flops_per_character, unit, scaler, sample
        self.metrics: MetricsFile | None = None  # on rank 0, while open
        self.trackers: dict[str, Tracker] = {}
        device = distributed.device()
        # (step, this rank's loss, gradient norm, learning rate) of the step that diverged; step -1: none.
        self.diverged = torch.full((4,), -1.0, device=device)
        self.in_a_row = torch.zeros((), device=device)  # steps without a finite gradient
        self.lr: float | None = None  # of the last step

    # --- start and end ---

    def open(self, run_dir: str, hyperparameters: dict[str, Any], on_start: Callable[[], None] = lambda: None) -> None:
        """Opens the files, on rank 0; `on_start` writes others, again at each `reopen` and after an OSError."""
        state, self.on_start = self.state, on_start
        self.metrics = MetricsFile(run_dir, state.step, state.is_evaluated, state.metrics_lines)
        for name in self.config.trackers:
            if is_installed(name):
                self.trackers[name] = TRACKERS[name]()
            else:
                log.info("%s is not installed (pip install %s): not logging to it", name, name)
        start = os.path.abspath(run_dir), hyperparameters, state.step, self.metrics.logged
        self._track(lambda tracker: tracker.start(*start))
        self._record_start()

    def reopen(self) -> None:
        """Writes deleted files again, on rank 0."""
        if self.metrics:
            self.metrics.reopen()
        self._record_start()

    def _record_start(self) -> None:
        try:
            self.on_start()
            self.is_recorded = True
        except OSError as error:
            self.is_recorded = False
            log.warning("%s; will retry", one_line(error))

    def start(self, precision: Precision) -> None:
        """Logs device, precision, batch and plan; starts the clock of the steps."""
        plan, unit, device = self.plan, self.unit, distributed.device()
        self.peak_flops = None if precision.amp_dtype == "float32" else peak_flops(device)  # None: no MFU is logged
        ranks = f"{plan.world_size} process{'es' * (plan.world_size > 1)}"
        name = device_name(device)
        if device.type == "cpu":
            threads = torch.get_num_threads()
            name = f"CPU, {threads} thread{'s' * (threads > 1)} per process"
        log.info("device      %s; %s", name, ranks)
        log.info("precision   %s", precision)
        if device.type == "cpu":
            log.info("kernels     %s", build.describe(precision.dtype))
        least, rest = divmod(plan.batch_size, plan.world_size * plan.accumulation)
        sizes = f"{least} or {least + 1}" if rest else least
        log.info(
            f"batch       {plan.batch_size} windows of {plan.block_size} {unit}s = {plan.step_characters:,} {unit}s "
            f"per step; {ranks} x micro-batch {sizes} x accumulation {plan.accumulation}"
        )
        steps = f"{plan.total_steps} step{'s' * (plan.total_steps > 1)}"
        passes = f"{plan.passes:.3g}" if plan.passes < 1000 else f"{plan.passes:,.0f}"
        start = f"; from step {self.state.step}" if self.state.step else ""
        planned = plan.total_steps * plan.step_characters
        log.info(f"plan        {steps} = {planned:,} {unit}s = {passes} passes over the text{start}")
        if plan.passes > MANY_PASSES:
            log.warning(
                f"plan: {passes} passes over the text will probably overfit; the best snapshot is kept; fewer "
                "trainer.max_steps or max_epochs, or a trainer.patience, save time"
            )
        self.start_step = self.logged_step = self.state.step
        self.paused_s = 0.0
        self.lap_started = time.perf_counter()

    def close(self) -> None:
        """Closes the files."""
        if self.metrics:
            self.metrics.close()
            self.metrics = None
        self._track(lambda tracker: tracker.close())
        self.trackers = {}

    # --- training ---

    @contextlib.contextmanager
    def paused(self, recurs: bool = True) -> Iterator[None]:
        """Context excluded from the step time: evaluation, saving, sampling."""
        device = distributed.device()
        if device.type != "cpu":  # finish the queued steps before the pause starts
            torch.get_device_module(device).synchronize()
        started = time.perf_counter()
        yield
        paused_s = time.perf_counter() - started
        self.lap_started += paused_s
        if recurs:
            self.paused_s += paused_s

    def step(self, rank_loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Logs a line for the step that ended if one is due. Records gradient norms that are not finite, on the device,
        so that no step waits; see `check_finite`.
        """
        step = self.state.step
        self.lr = lr
        if step == self.start_step + 1:
            self.paused_s = 0.0  # evaluating pretrained weights
        noted = torch.stack((torch.full_like(rank_loss, step), rank_loss, grad_norm, torch.full_like(rank_loss, lr)))
        self.in_a_row = torch.where(grad_norm.isfinite(), 0.0, self.in_a_row + 1)
        allowed = MOST_SKIPPED if self.scaler.is_enabled() else 1
        has_diverged = (self.in_a_row >= allowed) & (self.diverged[0] < 0)
        self.diverged = torch.where(has_diverged, noted, self.diverged)
        if self.state.progress >= 1 or step % self.config.log_every_steps == 0:
            self._line(rank_loss, grad_norm)
        elif step == self.start_step + 1:  # includes compilation: restart the clock
            loss = self._mean(rank_loss)
            seconds = time.perf_counter() - self.lap_started
            log.info(f"{self._progress()} | loss {loss:.4f} | first step took {seconds:.1f} s")
            self.logged_step, self.lap_started = step, time.perf_counter()

    def _line(self, rank_loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Logs the line of this step, with the loss averaged over the ranks, nats per character."""
        plan, state, step = self.plan, self.state, self.state.step
        self.check_finite()
        samples = self._draw_samples()
        loss = self._mean(rank_loss)
        seconds = (time.perf_counter() - self.lap_started) / max(step - self.logged_step, 1)
        self.logged_step, self.lap_started = step, time.perf_counter()
        if not self.metrics:
            return
        rate = plan.step_characters / seconds
        mfu, mfu_shown = None, ""
        if self.peak_flops:
            mfu = rate * self.flops_per_character / (self.peak_flops * plan.world_size)
            mfu_shown = f" | MFU {mfu:.0%}"
        # The speed of recent steps; evaluations and saves as often as so far.
        left = (seconds + self.paused_s / (step - self.start_step)) * (plan.total_steps - step)
        if state.limit_s:
            left = min(left, max(state.limit_s - state.seconds, 0.0))
        norm = grad_norm.item()
        self._write(
            "train", loss,
            lr=self.lr, grad_norm=norm, tokens_per_s=rate, mfu=mfu,
            memory=peak_memory(distributed.device()), **({"samples": samples} if samples else {}),
        )  # fmt: skip
        log.info(
            f"{self._progress()} | loss {loss:.4f} | lr {self.lr:.2e} | grad norm {norm:.2f} | "
            f"{rate:,.0f} {self.unit}s/s{mfu_shown} | {duration(left)} left"
        )
        if samples:
            shown = re.sub(r"\r?\n", r"\\n", samples[0].strip())
            # A byte model may sample control characters, which affect a terminal.
            log.info("sampled     %s", re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", shown))

    def _draw_samples(self) -> list[str]:
        """Texts for the lines 1, 4, 16, 64, ... and the last."""
        line = self.state.step // self.config.log_every_steps
        is_power_of_4 = line.bit_count() == 1 and line.bit_length() % 2 == 1
        if self.sample is None or not (is_power_of_4 or self.state.progress >= 1):
            return []
        with self.paused(recurs=False):
            return self.sample()

    def _mean(self, rank_loss: torch.Tensor) -> float:
        """The mean over the ranks."""
        return sum(distributed.all_gather(rank_loss.item())) / self.plan.world_size

    def _progress(self) -> str:
        total = self.plan.total_steps
        return f"step {self.state.step:{len(str(total))}d}/{total}"

    def _write(self, split: str, loss: float, **values: Any) -> None:
        """Writes one measurement to `metrics.jsonl` and the trackers, on rank 0."""
        if not self.metrics:
            return
        state = self.state
        values["progress"] = round(min(state.progress, 1.0), 6)
        line = self.metrics.log(state.step, self.plan.epoch(state.step), split, loss, state.seconds, **values)
        self._track(lambda tracker: tracker.log(line))

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Calls `call` with each tracker: one that fails is disabled, and the run continues."""
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # packages, disks and networks fail in many ways
                log.warning("%s: %s; disabled for this run", name, one_line(error))
                del self.trackers[name]

    # --- evaluation and saving ---

    def evaluation(self, result: Evaluation, seconds: float) -> None:
        """Logs an evaluation of this step. Raises `UserError` if the loss is not finite."""
        loss, characters, rank_losses = result
        if not math.isfinite(loss):
            raise self.divergence(f"the held-out loss is {loss}")
        self._write("val", loss, tokens=characters, rank_losses=rank_losses)
        line = f"{self._progress()} | held-out loss {loss:.4f} ({loss / math.log(2):.4f} bits per {self.unit})"
        best = self.state.best_loss
        if best is not None and best <= loss:
            line += f" | best {best:.4f} at step {self.state.best_step}"
        line += f" | {characters:,} {self.unit}s in {seconds:.1f} s"
        if self.plan.world_size > 1:
            line += f" | by rank {', '.join(map(format_loss, rank_losses))}"
        log.info(line)

    def sync(self) -> None:
        """Flushes `metrics.jsonl` to disk, and counts its lines in the state, unwritten ones included."""
        if self.metrics:
            self.metrics.flush(sync=True)
            self.state.metrics_lines = self.metrics.lines

    def check_finite(self) -> None:
        """Raises `UserError` on every rank if a gradient norm so far was not finite; with float16, whose scaler skips
        such steps, if those of `MOST_SKIPPED` steps in a row were not. Waits for the device.
        """
        step, loss, norm, lr = self.diverged.tolist()
        if step >= 0:
            skipped = f", and {MOST_SKIPPED} steps in a row were skipped" * self.scaler.is_enabled()
            raise self.divergence(f"loss {loss:g}, gradient norm {norm:g}{skipped}", int(step), lr)

    def divergence(self, what: str, step: int | None = None, lr: float | None = None) -> UserError:
        """The error of a run that diverged, at this step or an earlier one; also written to the metrics."""
        lr = self.lr if lr is None else lr
        if lr is not None:
            what += f" at learning rate {lr:.3g}"
        self._write("train", math.nan, diverged=what)
        return UserError(
            f"step {self.state.step if step is None else step}: {what}: training has diverged; lower "
            "optimizer.learning_rate or raise optimizer.warmup_steps; earlier snapshots, if any, are kept"
        )

    # --- the end ---

    def ended(self) -> None:
        """Logs why a run is over, unless it has done all its steps."""
        state, total = self.state, self.plan.total_steps
        if state.progress < 1:
            log.info("stopped by trainer.patience=%d: no lower held-out loss", self.config.patience)
        elif state.step < total:
            log.info("the time is over: %d steps of %d", state.step, total)

    def finished(self) -> None:
        """Logs that a run is over, which was so when it was started."""
        state, total = self.state, self.plan.total_steps
        if state.loss is not None:
            log.info("held-out loss %.4f at step %d", state.loss, state.loss_step)
        if state.step > total:
            log.warning("this run has %d steps, more than the %d asked for", state.step, total)
            return
        limit = "its limit (trainer.max_steps, max_epochs or max_minutes)"
        log.info(
            "this run is finished: it has %d steps of %d; to train longer, raise %s",
            state.step, total, limit if state.progress >= 1 else "trainer.patience",
        )  # fmt: skip

    def stopped(self, signal: str, path: str) -> None:
        """Logs that `signal` ended the run, and how to resume from the snapshot at `path`."""
        without = ", without trainer.resume=never," if self.config.resume == "never" else ""
        log.info(
            "%s: stopped after step %d of %d; the same command%s resumes from %s",
            signal, self.state.step, self.plan.total_steps, without, path,
        )  # fmt: skip
