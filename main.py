"""Trains a character-level GPT.

    python main.py                                         one process; the recipe for this machine
    torchrun --standalone --nproc_per_node=gpu main.py     one process per GPU of this machine
    torchrun --standalone --nproc_per_node=2 main.py       two processes, on GPUs or CPU cores
    srun python main.py                                    one process per task of a SLURM job
    python main.py experiment=mingpt_ddp                   a named recipe; see conf/experiment/
    python main.py model.n_layer=8 trainer.max_steps=500   override any field
    python main.py data=text data.path=book.txt            your own text

The same command again resumes the run where it stopped.
"""

from engine import signals

if __name__ == "__main__":
    signals.prepare()

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

import report
from char_dataset import CharDataset
from config import Config, as_config, check_ranks_agree, compose, help_text, in_sweep
from engine import portable
from engine.config.overrides import add_default_recipe, check_overrides
from engine.errors import UserError, one_line
from engine.files import masked
from engine.interop.pretrained import load_pretrained, read_init_weights
from engine.parallel import distributed, sharding
from engine.parallel.accelerate import launch_settings
from engine.precision import resolve_amp_dtype
from engine.repeats import find_repeats, known_share
from engine.reports.history import Run
from engine.reports.problems import loss_warning
from engine.reports.sweep import check_sweep
from engine.run.console import command_line, fail, log_to_console
from engine.run.directory import REPORT, is_run, open_run, shell_path
from engine.run.evaluation import evaluate
from engine.run.memory import report_exhausted
from engine.run.metrics import MetricsFile
from engine.run.plan import planned_steps
from engine.run.provenance import record_start
from engine.signals import Stopped
from engine.sizing.choose import choose_sizes
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot, check_can_resume
from engine.snapshots.storage import exists
from engine.text.encoding import prepare_text
from model import GPT, create_optimizer
from sample import load_model, run_text
from trainer import Trainer

log = logging.getLogger("gpt")


def configure(*overrides: str) -> DictConfig:
    """Composes the configuration of `python main.py OVERRIDES`, for `train` in a notebook or another program. Raises
    `UserError`.
    """
    log_to_console()
    return compose(add_default_recipe([*launch_settings(), *overrides]))


def train(composed: DictConfig, started: float | None = None) -> float | None:
    """Builds everything from a composed configuration and trains, in this process; returns the last
    held-out loss, nats per character. `trainer.max_minutes` counts from `started`, as `time.monotonic()` gives it, or
    from now. Raises `UserError`.
    """
    started = time.monotonic() if started is None else started
    log_to_console()
    config = as_config(composed)
    distributed.init(config.trainer.device, config.trainer.threads, config.trainer.timeout_s)
    with open_run(config.run_dir, config.trainer.snapshot_path) as restore_missing_files, report_exhausted():
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        snapshots = SnapshotManager(config.trainer, config.run_dir, restore_missing_files)
        found = snapshots.found
        recorded = found.config if found else None
        build = functools.partial(build_trainer, snapshots)

        # These change `config` in place: the architecture; the text and its vocabulary; every null size.
        pretrained = read_init_weights(config, found)
        text = load_text(config, recorded)
        if pretrained is not None:
            keep_held_out(config, text, pretrained)
        deadline = choose_sizes(
            config,
            text.in_sight,
            recorded,
            started,
            lambda timed: build(timed, text.with_config(timed.data).split()),
            text.parts[2],
        )
        if found:  # before a changed setting makes the split fail
            check_can_resume(found, snapshots.path, config.recorded(), {}, text.digest)

        text = text.with_config(config.data)
        split, final = text.split(), text.final_part()
        repeated = distributed.run_on_rank_0(lambda: find_repeats(*split, config.trainer.max_minutes))
        if final is not None and config.data.test_path is not None:
            distributed.run_on_rank_0(lambda: find_repeats(split[0], final, config.trainer.max_minutes, is_final=True))
        if pretrained is not None and config.data.held_out is None:
            distributed.run_on_rank_0(lambda: warn_if_known(config, split[1], pretrained))
        trainer = build(config, split, pretrained)
        log_parts(config, trainer, *split)
        log_consequences(config, trainer, recorded)
        facts = {
            "total_steps": trainer.plan.total_steps,
            "precision": trainer.precision.amp_dtype,
            "compiled": trainer.precision.compile,
            "parameters": sum(parameter.numel() for parameter in trainer.parameters),
            "text_sha256": text.digest,
            "unigram_loss": split[1].unigram_loss(split[0]),
            "repeated_share": repeated,
        }
        on_start = functools.partial(record_start, config.run_dir, trainer.run_config, trainer.state.step, facts)
        loss = trainer.train(deadline, on_start=on_start)
        if distributed.is_rank_0():
            finish_run(config, trainer, final)
    return loss


def build_trainer(
    snapshots: SnapshotManager,
    config: Config,
    split: tuple[CharDataset, CharDataset],
    pretrained: Snapshot | None = None,
) -> Trainer:
    """Builds the model, with `pretrained` weights if given, its optimizer and the Trainer."""
    train_text, held_out = split
    device, found = distributed.device(), snapshots.found
    dtype = resolve_amp_dtype(config.trainer, device, found.earlier_choices(device.type) if found else {})
    torch.manual_seed(config.trainer.seed)  # every rank starts from the same weights
    model = sharding.build(lambda: GPT(config.model), config.trainer.strategy, getattr(torch, dtype))
    if pretrained is not None:
        load_pretrained(pretrained, model, train_text.vocabulary)
        pretrained.model_state.clear()  # frees its memory
    return Trainer(
        config.trainer,
        model,
        create_optimizer(model, config.optimizer),
        train_text,
        held_out,
        schedule=config.optimizer.learning_rate_factor,
        run_config=config.recorded(),
        snapshots=snapshots,
    )


def load_text(config: Config, recorded: dict[str, Any] | None) -> CharDataset:
    """Downloads and encodes the text once per host; `config.data` then names the text used. A resumed run keeps the
    text in its `recorded` settings.
    """
    before = recorded.get("data", {}) if recorded else {}
    if before.get("held_out") and config.data.val_path is None and config.data.held_out in (None, before["held_out"]):
        config.data = dataclasses.replace(config.data, held_out=before["held_out"], train_split=before["train_split"])
    if before and "max_bytes" not in before:  # an older run, which had none of these settings
        config.data = dataclasses.replace(config.data, separator=config.data.separator or "none", newlines="keep")
    folder = HydraConfig.get().sweep.dir if in_sweep() else config.run_dir
    config.data = distributed.run_on_each_host(lambda: prepare_text(config.data, folder, before))
    text = CharDataset(config.data)
    config.data = text.config
    check_ranks_agree(config, text.digest)
    config.model.vocab_size = text.vocab_size
    return text


def keep_held_out(config: Config, text: CharDataset, pretrained: Snapshot) -> None:
    """If the `text` begins with that of the `pretrained` model, holds out the same part of it."""
    theirs, length = pretrained.config.get("data", {}), pretrained.characters
    held_out = theirs.get("held_out")
    if text.digest != pretrained.text_digest:
        if not text.begins_with(length, pretrained.text_digest):
            return
        if held_out is None and theirs.get("train_split"):
            held_out = [int(length * theirs["train_split"]), length - int(length * theirs.get("final_split", 0.0))]
    if held_out is None or config.data.val_path is not None or config.data.held_out is not None:
        return
    first, last = held_out
    # From which sizes are chosen.
    share = round(1 - config.data.final_split - (last - first) / text.in_sight, 6)
    config.data = dataclasses.replace(config.data, held_out=held_out, train_split=share)
    log.info(
        "held out    characters %s to %s, as of the pretrained model: its text has grown; data.held_out=[FROM,TO] says "
        "otherwise",
        f"{first:,}", f"{last:,}",
    )  # fmt: skip


def warn_if_known(config: Config, held_out: CharDataset, pretrained: Snapshot) -> None:
    """Warns if the pretrained model was trained on text that is held out now, or if that cannot be known."""
    known, problem = None, ""
    log.disabled = True  # what is said of a text is said of the new one
    try:
        known, _ = run_text(pretrained, "init_from", None).split()
    except UserError as error:
        problem = str(error)
    finally:
        log.disabled = False
    if known is None:
        log.warning("the text of the model may have the held-out text, but cannot be compared: %s", problem)
        return
    share, _ = known_share(held_out, known)
    if share >= 0.01:
        log.warning(
            "init_from: the model was trained on %.0f %% of the held-out text: the held-out loss is too low; hold out "
            "what its run held out (data.train_split=%s)",
            100 * share, pretrained.config["data"].get("train_split"),
        )  # fmt: skip


def log_parts(config: Config, trainer: Trainer, train_text: CharDataset, held_out: CharDataset) -> None:
    """Logs the text, the model and the optimizer."""
    optimizer, unseen = config.optimizer, held_out.unseen_share(train_text)
    log.info(
        "text        %s: %s %ss to train on, %s held out%s, %d distinct",
        config.data.path, f"{len(train_text.data):,}", train_text.unit, f"{len(held_out.data):,}",
        f" (of which {unseen:.2%} do not occur in training)" if unseen else "", train_text.vocab_size,
    )  # fmt: skip
    sharded = ", sharded" * sharding.is_sharded(trainer.bare)
    log.info("parameters  %s%s", f"{sum(p.numel() for p in trainer.bare.parameters()):,}", sharded)
    ngrams = f", n-gram decay {optimizer.ngram_decay:g}" if config.model.ngram_rows else ""
    log.info(
        "optimizer   %s, %s schedule, learning rate %g, weight decay %g%s",
        optimizer.name, optimizer.schedule, optimizer.learning_rate, optimizer.weight_decay, ngrams,
    )  # fmt: skip


def log_consequences(config: Config, trainer: Trainer, recorded: dict[str, Any] | None) -> None:
    """Logs what overrides entail that one may not expect: a compressed warm-up; a learning rate that had fallen, by the
    settings `recorded` before, and rises; with another batch than the recipe's, more passes at the same learning rate.
    """
    plan, step, optimizer = trainer.plan, trainer.state.step, config.optimizer
    earlier = copy.copy(config.trainer)  # without its checks: a time limit may have ended the run before
    before = recorded.get("trainer", {}) if recorded and step else {}
    earlier.max_steps, earlier.max_epochs = before.get("max_steps"), before.get("max_epochs")
    steps_before = planned_steps(earlier, plan.windows)
    if math.isfinite(steps_before):
        peak, schedule = optimizer.learning_rate or 0.0, optimizer.learning_rate_factor
        was, now = peak * schedule(step - 1, int(steps_before)), peak * schedule(step, plan.total_steps)
        if now > 2 * was:
            log.warning(
                "the learning rate rises from %.2g to %.2g: it follows %d steps, no longer %d; to go on at the last "
                "rate: optimizer.schedule=constant optimizer.learning_rate=%.2g",
                was, now, plan.total_steps, steps_before, was,
            )  # fmt: skip
    if config.optimizer.warmup_steps > plan.total_steps:
        log.warning("optimizer.warmup_steps=%d: the run has only %d", config.optimizer.warmup_steps, plan.total_steps)
    if not HydraConfig.initialized():
        return
    composed = HydraConfig.get()
    typed = {override.partition("=")[0]: override for override in composed.overrides.task}
    recipe = composed.runtime.choices.get("experiment")
    if recipe is None or "trainer.batch_size" not in typed or typed.keys() & {"optimizer", "optimizer.learning_rate"}:
        return
    others = [override for key, override in typed.items() if key != "trainer.batch_size"]
    usual = hydra.compose(composed.job.config_name, others).trainer.batch_size
    if usual not in (None, plan.batch_size):
        log.warning(
            "trainer.batch_size=%d, in the recipe %d: the learning rate stays %g, and the text is passed over %.3g "
            "times, not %.3g; see optimizer.learning_rate and trainer.max_steps",
            plan.batch_size, usual, config.optimizer.learning_rate, plan.passes, plan.passes * usual / plan.batch_size,
        )  # fmt: skip


def finish_run(config: Config, trainer: Trainer, final: CharDataset | None) -> None:
    """Scores the final part of the text, writes the report, and logs what to do next."""
    if not is_run(config.run_dir):  # a finished run, whose snapshot is elsewhere: nothing was logged here
        return
    try:
        if final is not None and trainer.state.step <= trainer.plan.total_steps:
            score_final(trainer, final)
    finally:  # the report and the best snapshot do not depend on the score
        if config.report:
            with log_failure(f"write {REPORT}"):
                path = os.path.join(config.run_dir, REPORT)
                report.write([Run(config.run_dir)], path)
                log.info("report      %s", shell_path(path))
        with log_failure("check the run for overfitting"):
            if problem := loss_warning(Run(config.run_dir)):
                log.warning("%s", problem)
        if trainer.state.best_loss is not None:
            best, path = trainer.state, trainer.snapshots.storage.best_path
            log.info("best        held-out loss %.4f at step %d: %s", best.best_loss, best.best_step, path)
        log.info("sample      python sample.py run_dir=%s", shell_path(config.run_dir))


def score_final(trainer: Trainer, final: CharDataset) -> None:
    """Scores the final part of the text, unused for any choice, with the best snapshot; logs the loss and appends it to
    the metrics. Skipped if done at this step.
    """
    snapshots, state = trainer.snapshots, trainer.state
    scored = Run(snapshots.run_dir).final
    if scored is not None and scored["step"] == state.step:
        return
    has_best = state.best_loss is not None and exists(snapshots.storage.best_path)
    best = snapshots.storage.best_path if has_best else snapshots.path
    snapshot = load_full(best)
    model = load_model(snapshot, distributed.device().type)
    with trainer.precision.autocast(), distributed.alone():
        loss, characters, _ = evaluate(model, final, max_windows=trainer.plan.max_eval_windows)
    log.info(
        "final       loss %.4f (%.4f bits per %s) on %s %ss of the final part; %s",
        loss, loss / math.log(2), final.unit, f"{characters:,}", final.unit, best,
    )  # fmt: skip
    with log_failure("write the final loss"):
        metrics = MetricsFile(snapshots.run_dir, state.step)
        epoch = trainer.plan.epoch(state.step)
        metrics.log(state.step, epoch, "final", loss, state.seconds, tokens=characters, scored_step=snapshot.step)
        metrics.close()


@contextlib.contextmanager
def log_failure(action: str) -> Iterator[None]:
    """Logs an error as a warning: the run has finished, and its snapshots are written."""
    try:
        yield
    except Exception as error:  # a full disk, a missing file or package
        log.warning("cannot %s: %s", action, one_line(error))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    """Trains as composed, in this process."""
    chosen = HydraConfig.get().runtime.output_dir
    if chosen != os.getcwd():  # a sweep's job, or hydra.run.dir
        composed.run_dir = chosen
    try:  # each job of a sweep has the whole time
        return train(composed, None if in_sweep() else signals.started)
    except Stopped as stopped:  # also ends the sweep
        distributed.leave(stopped.status)
    except UserError as error:
        if not in_sweep():
            fail(error)  # before Hydra adds a line of its own
        log.error("%s", error)
        message = str(error)
    # Hydra keeps the exception during later jobs: raise one whose frames do not hold the model.
    raise UserError(message)


def run() -> None:
    """The command line: `main` under Hydra."""
    arguments = sys.argv[1:]
    with command_line():
        if {"-h", "--help"} & set(arguments):
            portable.restore_sigpipe()
            with portable.checked_output():
                print(__doc__, help_text(), sep="\n")
            return
        if {"-m", "--multirun"} & set(arguments):
            check_sweep(arguments)
        sys.argv[1:] = add_default_recipe([*launch_settings(), *arguments])
        check_overrides(sys.argv[1:])
        portable.patch_argparse()
        if any(argument.partition("=")[0] in ("--cfg", "-c") for argument in arguments):  # Hydra prints it in full
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                main()
            with portable.checked_output():
                print(masked(shown.getvalue()), end="")
        else:
            main()
    distributed.leave(0)


if __name__ == "__main__":
    run()
