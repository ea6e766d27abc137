"""Training log: progress lines, `metrics.jsonl` and trackers of a run."""

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import auto
from engine.config.settings import flatten
from engine.errors import UserError
from engine.kernels import build
from engine.machine.hardware import device_name, peak_flops, peak_memory
from engine.parallel import distributed
from engine.parallel.distributed import World
from engine.run.evaluation import Evaluation
from engine.run.metrics import Metrics, duration, format_loss
from engine.run.plan import Plan

log = logging.getLogger("gpt")
MANY_PASSES = 50  # over the text
MOST_SKIPPED = 10  # steps in a row, which a GradScaler skips because their gradients overflow


@dataclass
class TrainingLog:
    """The log of a run; it also ends the run once a gradient is no longer finite. All ranks call the same methods in
    the same order; rank 0 writes.
    """

    world: World
    plan: Plan
    every_steps: int  # between lines
    flops_per_character: float  # of training, for the model FLOPs utilization (MFU)
    unit: str  # "character" or "byte"
    scaler: torch.amp.GradScaler  # skips float16 steps that overflow
    learning_rate: Callable[[int], float]  # of a step
    sample: Callable[[], list[str]] | None  # draws texts
    metrics: Metrics | None = None
    lines: int = 0  # of metrics.jsonl at the snapshot

    def __post_init__(self):
        # (step, this rank's loss, gradient norm) of the step that diverged; step -1: none.
        self.diverged = torch.full((3,), -1.0, device=self.world.device)
        self.in_a_row = torch.zeros((), device=self.world.device)  # steps without a finite gradient

    def open(self, run_dir: str, step: int, evaluated: bool, trackers: Iterable[str], run_config: dict) -> None:
        """Opens the files, on rank 0; see `Metrics`."""
        self.metrics = Metrics(run_dir, step, evaluated, self.lines, trackers, flatten(run_config))

    def start(self, step: int, choices: dict[str, Any]) -> None:
        """Logs device, precision, batch and plan; starts the clock at `step`."""
        world, plan, unit = self.world, self.plan, self.unit
        is_float32 = choices["amp_dtype"] == "float32"
        self.peak_flops = None if is_float32 else peak_flops(world.device)  # None: no MFU is logged
        ranks = f"{world.size} process{'es' * (world.size > 1)}"
        device = device_name(world.device)
        if world.device.type == "cpu":
            threads = torch.get_num_threads()
            device = f"CPU, {threads} thread{'s' * (threads > 1)} per process"
        log.info("device      %s; %s", device, ranks)
        log.info("precision   %s", auto.describe(choices))
        if world.device.type == "cpu":
            log.info("kernels     %s", build.describe(getattr(torch, choices["amp_dtype"])))
        least, rest = divmod(plan.batch_size, world.size * plan.accumulation)
        sizes = f"{least} or {least + 1}" if rest else least
        log.info(
            f"batch       {plan.batch_size} windows of {plan.block_size} {unit}s = {plan.step_characters:,} {unit}s "
            f"per step; {ranks} x micro-batch {sizes} x accumulation {plan.accumulation}"
        )
        steps = f"{plan.total_steps} step{'s' * (plan.total_steps > 1)}"
        planned = plan.total_steps * plan.step_characters
        number = planned / (plan.windows + plan.block_size)
        passes = f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
        start = f"; from step {step}" if step else ""
        log.info(f"plan        {steps} = {planned:,} {unit}s = {passes} passes over the text{start}")
        if number > MANY_PASSES:
            log.warning(
                f"plan: {passes} passes over the text will probably overfit; the best snapshot is kept; fewer "
                "trainer.max_steps or max_epochs, or a trainer.patience, save time"
            )
        self.first_step = self.lap_step = self.timed_from = step
        self.paused_s = 0.0
        self.timed_started = self.lap_started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, recurs: bool = True) -> Iterator[None]:
        """Context excluded from the step time: evaluation, saving, sampling."""
        if self.world.device.type != "cpu":  # finish the queued steps before the pause starts
            torch.get_device_module(self.world.device).synchronize()
        started = time.perf_counter()
        yield
        paused_s = time.perf_counter() - started
        self.lap_started += paused_s
        self.timed_started += paused_s
        if recurs:
            self.paused_s += paused_s

    def log_finished(self, step: int, evaluated: tuple[float, int] | None) -> None:
        """Logs that a run is over at `step`; `evaluated` is the newest held-out loss, and its step."""
        if evaluated:
            log.info("held-out loss %.4f at step %d", *evaluated)
        total = self.plan.total_steps
        if step > total:
            log.warning("this run has %d steps, more than the %d asked for", step, total)
            return
        limit = "its limit (trainer.max_steps, max_epochs or max_minutes)"
        log.info(
            "this run is finished: it has %d steps of %d; to train longer, raise %s",
            step, total, limit if step == total else "trainer.patience",
        )  # fmt: skip

    def log_stopped(self, step: int, signal: str, path: str, resume: str) -> None:
        """Logs that `signal` ended the run after `step`, and how to resume from the snapshot at `path`."""
        without = ", without trainer.resume=never," if resume == "never" else ""
        log.info(
            "%s: stopped after step %d of %d; the same command%s resumes from %s",
            signal, step, self.plan.total_steps, without, path,
        )  # fmt: skip

    def log_step(self, step: int, rank_loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Logs a line if one is due, with the loss averaged over the ranks, nats per character. Records gradient norms
        that are not finite, on the device, so that no step waits; see `check_finite`.
        """
        is_first_step = step == self.first_step + 1
        if is_first_step:
            self.paused_s = 0.0  # evaluating pretrained weights
        noted = torch.stack((torch.full_like(rank_loss, step), rank_loss, grad_norm))
        self.in_a_row = torch.where(grad_norm.isfinite(), 0.0, self.in_a_row + 1)
        has_diverged = (self.in_a_row >= self._allowed) & (self.diverged[0] < 0)
        self.diverged = torch.where(has_diverged, noted, self.diverged)
        if step != self.plan.total_steps and step % self.every_steps != 0:
            if is_first_step:  # includes compilation: restart the clock
                loss = self._mean(rank_loss)
                seconds = time.perf_counter() - self.lap_started
                log.info(f"{self._progress(step)} | loss {loss:.4f} | first step took {seconds:.1f} s")
                self._start_lap(step)
            return
        self.check_finite(step)
        samples = self._draw_samples(step)
        loss = self._mean(rank_loss)
        if not self.metrics:
            return
        seconds = (time.perf_counter() - self.lap_started) / (step - self.lap_step)
        self._start_lap(step)
        rate = self.plan.step_characters / seconds
        mfu, mfu_shown = None, ""
        if self.peak_flops:
            mfu = rate * self.flops_per_character / (self.peak_flops * self.world.size)
            mfu_shown = f" | MFU {mfu:.0%}"
        # The speed of recent steps; evaluations and saves as often as so far.
        with_pauses = seconds + self.paused_s / (step - self.first_step)
        left = duration(with_pauses * (self.plan.total_steps - step))
        norm, lr = grad_norm.item(), self.learning_rate(step - 1)
        self.metrics.log(
            step, self.plan.epoch(step), "train", loss,
            lr=lr, grad_norm=norm, tokens_per_s=rate, mfu=mfu,
            memory=peak_memory(self.world.device), **({"samples": samples} if samples else {}),
        )  # fmt: skip
        log.info(
            f"{self._progress(step)} | loss {loss:.4f} | lr {lr:.2e} | grad norm {norm:.2f} | "
            f"{rate:,.0f} {self.unit}s/s{mfu_shown} | {left} left"
        )
        if samples:
            shown = re.sub(r"\r?\n", r"\\n", samples[0].strip())
            # A byte model may sample control characters, which affect a terminal.
            log.info("sampled     %s", re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", shown))

    def _start_lap(self, step: int) -> None:
        """Starts the clock of the steps up to the next line, after the device has finished `step`."""
        self.lap_step, self.lap_started = step, time.perf_counter()
        if step <= max(self.plan.total_steps // 6, self.first_step + 1):
            self.timed_from, self.timed_started = self.lap_step, self.lap_started

    def seconds_per_step(self, step: int) -> float:
        """Mean seconds per step, without pauses, since about a sixth of the plan: the first steps compile and capture a
        CUDA graph.
        """
        return (time.perf_counter() - self.timed_started) / max(step - self.timed_from, 1)

    def _mean(self, rank_loss: torch.Tensor) -> float:
        """The mean over the ranks."""
        return sum(distributed.all_gather(rank_loss.item(), self.world)) / self.world.size

    def _draw_samples(self, step: int) -> list[str]:
        """Texts for the line of `step`: for lines 1, 4, 16, 64, ... and the last."""
        line = step // self.every_steps
        is_power_of_4 = line.bit_count() == 1 and line.bit_length() % 2 == 1
        if self.sample is None or not (is_power_of_4 or step == self.plan.total_steps):
            return []
        with self.paused(recurs=False):
            return self.sample()

    def log_evaluation(self, step: int, result: Evaluation, seconds: float, best: tuple[float, int] | None) -> None:
        """Logs an evaluation; `best`: the lowest held-out loss before, and its step. Raises `UserError` if the loss is
        not finite.
        """
        loss, characters, rank_losses = result
        if not math.isfinite(loss):
            raise self.divergence(step, f"the held-out loss is {loss}")
        if not self.metrics:
            return
        self.metrics.log(step, self.plan.epoch(step), "val", loss, tokens=characters, rank_losses=rank_losses)
        line = f"{self._progress(step)} | held-out loss {loss:.4f} ({loss / math.log(2):.4f} bits per {self.unit})"
        if best and best[0] <= loss:
            line += f" | best {best[0]:.4f} at step {best[1]}"
        line += f" | {characters:,} {self.unit}s in {seconds:.1f} s"
        if self.world.size > 1:
            line += f" | by rank {', '.join(map(format_loss, rank_losses))}"
        log.info(line)

    def check_finite(self, step: int) -> None:
        """Raises `UserError` on every rank if a gradient norm up to `step` was not finite; with float16, whose scaler
        skips such steps, if those of `MOST_SKIPPED` steps in a row were not. Waits for the device.
        """
        first, loss, norm = self.diverged.tolist()
        if first >= 0:
            skipped = f", and {MOST_SKIPPED} steps in a row were skipped" * self.scaler.is_enabled()
            raise self.divergence(int(first), f"loss {loss:g}, gradient norm {norm:g}{skipped}", loss, norm)

    @property
    def _allowed(self) -> int:
        return MOST_SKIPPED if self.scaler.is_enabled() else 1

    def divergence(self, step: int, what: str, loss: float = math.nan, norm: float = math.nan) -> UserError:
        """The error of a run that diverged at `step`; also logs it to the metrics."""
        what += f" at learning rate {self.learning_rate(step - 1):.3g}"
        if self.metrics:
            epoch = self.plan.epoch(step)
            self.metrics.log(step, epoch, "train", loss, grad_norm=norm, diverged=what)
        return UserError(
            f"step {step}: {what}: training has diverged; lower optimizer.learning_rate or raise "
            "optimizer.warmup_steps; earlier snapshots, if any, are kept"
        )

    def sync(self) -> int:
        """Flushes `metrics.jsonl` to disk; returns its number of lines, unwritten ones included."""
        if not self.metrics:
            return 0
        self.metrics.flush(sync=True)
        return self.metrics.lines

    def close(self) -> None:
        if self.metrics:
            self.metrics.close()
            self.lines = self.metrics.lines  # for another `train`
            self.metrics = None

    def _progress(self, step: int) -> str:
        total = self.plan.total_steps
        return f"step {step:{len(str(total))}d}/{total}"
