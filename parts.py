"""Run assembly: pretrained weights and sizes for a configuration; provenance; the final report."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
import os
import platform
import shlex
import statistics
import time
from collections.abc import Iterator

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from char_dataset import MAX_COUNTED, CharDataset, compare_characters
from config import Config
from engine import sizing
from engine.config import auto
from engine.config.overrides import override_key, without
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.interop.pretrained import read_pretrained
from engine.machine import hardware
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World, run_on_rank_0
from engine.reports.history import Run
from engine.reports.reference import overfitting_warning, unigram_warning
from engine.run import memory
from engine.run.directory import CONFIG, ENVIRONMENT, REPORT, relative_path
from engine.run.evaluation import evaluate
from engine.run.metrics import Metrics, read_lines, write_lines
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot
from model import GPTConfig, build_model, create_optimizer
from sample import load_model
from trainer import Trainer

log = logging.getLogger("gpt")
TRIAL_S = 1.0  # seconds of steps, after which their time is known well enough


def read_init_weights(config: Config, snapshot: Snapshot | None, world: World) -> Snapshot | None:
    """Reads the pretrained weights that `config.init_from` names, and sets the architecture in `config` to theirs. None
    without them, and for a run that resumes from its own `snapshot`.
    """
    source = config.init_from
    if source is None:
        if snapshot is not None:
            config.init_from = snapshot.config.get("init_from")  # for the snapshots to come
        return None
    if snapshot is not None:  # the source may be gone
        recorded = snapshot.config.get("init_from", source)
        if recorded != source:
            how = "without it" if recorded is None else f"from {recorded}"
            raise UserError(f"init_from={source}: this run started {how}; set run_name=NEW_NAME")
        log.info("init_from   was used at the start; resuming from the run's own snapshot")
        config.resolve_architecture(snapshot.model_config)
        return None
    pretrained = run_on_rank_0(lambda: read_pretrained(source), world)
    encoding = pretrained.encoding
    if encoding != config.data.encoding:
        raise UserError(
            f"init_from={source}: was trained with data.encoding={encoding}; set the same"
        )
    config.resolve_architecture(pretrained.model_config)
    return pretrained


def choose_sizes(
    config: Config, text: CharDataset, snapshots: SnapshotManager, world: World, started: float
) -> None:
    """Fills in what is null in `config`: as the run has it, or chosen for the text and the time."""

    def seconds_left() -> float:
        end = started + 60 * (config.trainer.max_minutes or 0.0)
        return min(distributed.all_gather(end - time.monotonic(), world))

    def seconds_per_step() -> float:
        trial = copy.deepcopy(config)
        trial.model = sized_model(trial)
        trial.trainer.max_steps, trial.trainer.max_epochs = 30, None
        dtype = auto.resolve_amp_dtype(trial.trainer, world.device, {})
        model = build_model(trial.model, trial.trainer, dtype, world)
        optimizer = create_optimizer(model, trial.optimizer)
        split = text.with_config(trial.data).split()
        step_s = time_steps(
            Trainer(trial.trainer, model, optimizer, *split, world=world, snapshots=snapshots)
        )
        del model, optimizer
        hardware.free_unused(world.device)  # a Trainer is part of a reference cycle
        return step_s

    if snapshots.found is not None:
        sizing.recall(config, snapshots.found.config)
    elif sizing.is_needed(config):
        if world.device.type != "cpu":
            log.info(
                "sizing      the rule was fitted on CPUs: on %s it is a guess",
                world.device.type,
            )
        chosen = sizing.choose(config, len(text.data), world.size, seconds_left, seconds_per_step)
        if HydraConfig.initialized():
            own = (f"{override_key(override)}=" for override in chosen)
            typed = without(HydraConfig.get().overrides.task, *own)
            named = {"run_name", "run_dir"} & {*map(override_key, typed)}
            chosen = ["python", "main.py", *typed, *chosen, *([] if named else ["run_name=again"])]
        log.info("sizing      to repeat this choice: %s", shlex.join(chosen))
    config.model = sized_model(config)
    memory.warn_if_too_little(config.model, config.trainer, world)


def time_steps(trainer: Trainer) -> float:
    """Trial: the median time in seconds of an optimizer step on the slowest rank, over the first `TRIAL_S` seconds
    of steps, or all of them. Trains the model.
    """
    times = [0.0]
    with contextlib.closing(trainer.steps()) as steps:
        started = time.perf_counter()
        for loss, _ in steps:
            loss.item()  # waits for the device
            times.append(time.perf_counter() - started)
            times[-1] = max(distributed.all_gather(times[-1], trainer.world))
            # The first steps with a CUDA graph are its capture and checks.
            fewest = 18 if trainer.world.device.type == "cuda" else 4
            if len(times) > fewest and times[-1] > TRIAL_S:
                break
    trainer.requests.finish()  # of `steps`, which was left before its end
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def sized_model(config: Config) -> GPTConfig:
    """The model's configuration, checked, with the context of the data. Raises `UserError`."""
    block_size = config.data.block_size
    return dataclasses.replace(config.model, model_type=None, block_size=block_size)


def log_text(config: Config, train_text: CharDataset, held_out: CharDataset) -> None:
    unseen, _ = compare_characters(train_text, held_out)
    is_counted = len(train_text.data) <= MAX_COUNTED  # as a whole
    log.info(
        "text        %s: %s %ss to train on, %s held out%s, %d distinct",
        config.data.path, f"{len(train_text.data):,}", train_text.unit, f"{len(held_out.data):,}",
        f" (of which {unseen:.2%} do not occur in training)" if unseen and is_counted else "",
        train_text.vocab_size,
    )  # fmt: skip


def log_model(config: Config, model: torch.nn.Module) -> None:
    sharded, optimizer = ", sharded" * sharding.is_sharded(model), config.optimizer
    log.info("parameters  %s%s", f"{sum(p.numel() for p in model.parameters()):,}", sharded)
    log.info(
        "optimizer   %s, %s schedule, learning rate %g, weight decay %g",
        optimizer.name, optimizer.schedule, optimizer.learning_rate, optimizer.weight_decay,
    )  # fmt: skip


def record_run(config: Config, trainer: Trainer) -> None:
    """Provenance: writes `config.yaml`, and versions, hardware and command line as a line of `environment.jsonl`;
    without Hydra, `recipe` and `overrides` are None. Earlier starts at or past this step are dropped, as nothing
    that they computed is kept.
    """
    with atomic_write(os.path.join(config.run_dir, CONFIG)) as file:
        OmegaConf.save(dataclasses.asdict(config), file)
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    world, choices = trainer.world, trainer.choices
    start = {
        "step": trainer.step,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "recipe": hydra.runtime.choices.get("experiment") if hydra else None,
        "overrides": list(hydra.overrides.task) if hydra else None,
        "total_steps": trainer.plan.total_steps,
        "precision": choices["amp_dtype"],
        "compiled": choices["compile"],
        "parameters": sum(parameter.numel() for parameter in trainer.parameters),
        "text_sha256": trainer.train_dataset.digest,
        "frequency_loss": compare_characters(trainer.train_dataset, trainer.test_dataset)[1],
        "device": hardware.device_name(world.device),
        "hosts": -(-world.size // world.local_size),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    path = os.path.join(config.run_dir, ENVIRONMENT)
    earlier = [line for line in read_lines(path) if line["step"] < trainer.step]
    write_lines(path, [*earlier, start])


def score_final(trainer: Trainer, final: CharDataset) -> None:
    """Scores the final part of the text, which nothing was chosen by, with the best snapshot, unless that was done at
    this step; logs the loss, and appends it to the metrics.
    """
    scored = Run(trainer.snapshots.run_dir).final
    if scored is not None and scored["step"] == trainer.step:
        return
    snapshots, device = trainer.snapshots, trainer.world.device
    best = snapshots.storage.best if snapshots.best is not None else snapshots.path
    snapshot = load_full(best)
    model = load_model(snapshot, device.type)
    alone, limit = World.alone(device), trainer.choices.get("micro_batch_size")
    with auto.autocast(trainer.choices):
        loss, characters, _ = evaluate(model, final, alone, lambda: None, limit)
    log.info(
        "final       loss %.4f (%.4f bits per %s) on %s %ss of the final part; %s",
        loss, loss / math.log(2), final.unit, f"{characters:,}", final.unit, best,
    )  # fmt: skip
    step, epoch = trainer.step, trainer.plan.epoch(trainer.step)
    with log_failure("write the final loss"):
        metrics = Metrics(snapshots.run_dir, step, trackers=())
        metrics.log(step, epoch, "final", loss, tokens=characters, scored_step=snapshot.step)
        metrics.close()


@contextlib.contextmanager
def log_failure(action: str) -> Iterator[None]:
    """Logs an error as a warning: the run has finished, and its snapshots are written."""
    try:
        yield
    except Exception as error:  # a full disk, a missing file or package
        log.warning("cannot %s: %s", action, one_line(error))


def finish_run(config: Config, trainer: Trainer, final: CharDataset | None) -> None:
    """Scores the final part of the text, writes the report, and logs what to do next."""
    try:
        if final is not None:
            score_final(trainer, final)
    finally:  # the report and the best snapshot do not depend on the score
        if config.report:
            with log_failure(f"write {REPORT}"):
                import report  # with jinja2, which only it needs

                path = report.write([config.run_dir], os.path.join(config.run_dir, REPORT))
                log.info("report      %s", relative_path(path))
        with log_failure("judge the run"):
            run = Run(config.run_dir)
            for problem in filter(None, (overfitting_warning(run), unigram_warning(run))):
                log.warning("%s", problem)
        snapshots = trainer.snapshots
        if snapshots.best is not None:
            path = snapshots.storage.best
            log.info("best        held-out loss %.4f at step %d: %s", *snapshots.best, path)
        log.info("sample      python sample.py run_dir=%s", relative_path(config.run_dir))
