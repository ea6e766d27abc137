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

import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import CharDataset, unseen_share_and_unigram_loss
from config import Config, check_ranks_agree, check_typed, compose, help_text, validate
from engine import portable
from engine.config import auto
from engine.config.overrides import add_default_recipe
from engine.errors import UserError
from engine.interop.pretrained import load_pretrained, read_init_weights, warn_if_seen
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World, join_processes, run_on_each_host
from engine.reports.sweep import check_sweep
from engine.run.console import command_line, fail, log_to_console
from engine.run.directory import open_run
from engine.run.memory import report_exhausted
from engine.run.plan import Deadline
from engine.run.provenance import log_parts, record_run
from engine.signals import Stopped
from engine.sizing.choose import choose_sizes
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.snapshot import Snapshot, check_can_resume, probe_logits
from engine.text import prepare_text
from model import GPT, create_optimizer
from report import finish_run
from sample import sample_during_training
from trainer import Trainer

log = logging.getLogger("gpt")


def configure(*overrides: str) -> DictConfig:
    """Composes the configuration of `python main.py OVERRIDES`, for `train` in a notebook or another program. Raises
    `UserError`.
    """
    log_to_console()
    return compose(add_default_recipe(list(overrides)))


def train(composed: DictConfig) -> float | None:
    """Builds everything from a composed configuration and trains, in this process; returns the last
    held-out loss, nats per character. Raises `UserError`.
    """
    log_to_console()
    mode = torch.get_deterministic_debug_mode()  # the Trainer may change it
    try:
        return run_training(validate(composed), time.monotonic())
    finally:
        torch.set_deterministic_debug_mode(mode)


def run_training(config: Config, started: float) -> float | None:
    """Builds everything from the validated configuration and trains; returns the last held-out loss.
    `trainer.max_minutes` counts from `started`, as `time.monotonic()` gives it.
    """
    world = join_processes(config.trainer.device, config.trainer.threads, config.trainer.timeout_s)
    with open_run(config.run_dir, config.trainer.snapshot_path, world), report_exhausted():
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        snapshots = SnapshotManager(config.trainer, config.run_dir, world)
        recorded = snapshots.found.config if snapshots.found else None
        make_trainer = functools.partial(build_trainer, snapshots=snapshots, world=world)

        # These three resolve the null fields of `config`.
        pretrained = read_init_weights(config, snapshots.found, world)
        text = load_text(config, recorded, world)
        deadline = choose_sizes(config, text, recorded, world, started, make_trainer)
        if snapshots.found:  # before a changed setting makes the split fail
            check_can_resume(snapshots.found, snapshots.path, dataclasses.asdict(config), {}, text)

        text = text.with_config(config.data)
        split, final = text.split(), text.final_part()
        unseen, unigram_loss = unseen_share_and_unigram_loss(*split)
        on_plan = functools.partial(record_run, unigram_loss, time.strftime("%Y-%m-%d %H:%M:%S %z"))
        trainer = make_trainer(config, split, pretrained=pretrained, on_plan=on_plan, deadline=deadline)
        log_parts(config, trainer, unseen)
        loss = trainer.train()
        if world.is_rank_0:
            finish_run(config, trainer, final)
    return loss


def build_trainer(
    config: Config,
    split: tuple[CharDataset, CharDataset],
    snapshots: SnapshotManager,
    world: World,
    pretrained: Snapshot | None = None,
    on_plan: Callable[[Trainer], None] = lambda trainer: None,
    deadline: Deadline | None = None,
) -> Trainer:
    """Builds the model, with `pretrained` weights if given, its optimizer and the Trainer."""
    train_text, held_out = split
    dtype = auto.resolve_amp_dtype(config.trainer, world.device, snapshots.earlier_choices())
    torch.manual_seed(config.trainer.seed)  # every rank starts from the same weights
    model = sharding.build(lambda: GPT(config.model), world, config.trainer.strategy, getattr(torch, dtype))
    if pretrained is not None:
        warn_if_seen(pretrained, config.data, train_text.digest)
        load_pretrained(pretrained, model, train_text.vocabulary)
        pretrained.model_state.clear()  # frees its memory
    bare: Any = distributed.unwrap(model)
    sample = functools.partial(sample_during_training, bare, train_text)
    return Trainer(
        config.trainer,
        model,
        create_optimizer(model, config.optimizer),
        train_text,
        held_out,
        schedule=config.optimizer.learning_rate_factor,
        sample=sample if config.samples else None,
        probe=functools.partial(probe_logits, bare, train_text.vocab_size, train_text.block_size, world.device),
        world=world,
        run_config=dataclasses.asdict(config),
        snapshots=snapshots,
        is_pretrained=config.init_from is not None,
        on_plan=on_plan,
        deadline=deadline,
    )


def load_text(config: Config, recorded: dict[str, Any] | None, world: World) -> CharDataset:
    """Downloads and encodes the text once per host; `config.data` then names the text used. A resumed run keeps the
    text in its `recorded` settings.
    """
    recorded_path = recorded.get("data", {}).get("path") if recorded else None
    config.data = run_on_each_host(lambda: prepare_text(config.data, recorded_path), world)
    text = CharDataset(config.data)
    check_ranks_agree(config, text.digest, world)
    config.model.vocab_size = text.vocab_size
    return text


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    """Trains as composed, in this process."""
    is_job = HydraConfig.get().mode == RunMode.MULTIRUN
    chosen = HydraConfig.get().runtime.output_dir
    if chosen != os.getcwd():  # a sweep's job, or hydra.run.dir
        composed.run_dir = chosen
    try:  # each job of a sweep has the whole time
        return run_training(validate(composed), time.monotonic() if is_job else signals.started)
    except Stopped as stopped:  # also ends the sweep
        distributed.leave(stopped.status)
    except UserError as error:
        if not is_job:
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
            print(__doc__, help_text(), sep="\n")
            return
        if {"-m", "--multirun"} & set(arguments):
            check_sweep(arguments)
        sys.argv[1:] = add_default_recipe(arguments)
        check_typed(sys.argv[1:])
        portable.patch_argparse()
        main()
    distributed.leave(0)


if __name__ == "__main__":
    run()
