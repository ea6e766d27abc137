"""Trains a character-level GPT.

    python main.py                                         one process; the recipe for this machine
    python main.py launch.nproc_per_node=gpu               a process for every GPU of this machine
    torchrun --standalone --nproc_per_node=2 main.py       two processes, on GPUs or CPU cores
    srun python main.py                                    a process for every task of a SLURM job
    python main.py experiment=mingpt_ddp                   a named recipe; see conf/experiment/
    python main.py model.n_layer=8 trainer.max_steps=500   anything is an override
    python main.py data=text data.path=book.txt            another text

The same command again resumes the run where it stopped.
"""

from engine import signals

if __name__ == "__main__":
    signals.prepare()

import functools
import logging
import os
import signal
import sys
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import CharDataset, prepare_text
from config import SCHEMA, Config, check_ranks_agree, compose, help_text, plain, validate
from engine.config import auto
from engine.config.overrides import with_recipe, worker_arguments
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.interop.pretrained import Pretrained, check_resumed, find_pretrained, load_pretrained
from engine.kernels import build
from engine.optim.schedule import learning_rate_factor
from engine.parallel import distributed, launch, sharding, slurm
from engine.parallel.distributed import World, join_processes, run_on_each_host
from engine.reports.history import Run
from engine.run.console import command_line, fail, log_to_console
from engine.run.directory import CONFIG, REPORT, open_run, relative_path
from engine.run.provenance import record_start
from engine.signals import Stopped
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.probe import probe_logits
from engine.snapshots.snapshot import Snapshot
from model import GPT, create_optimizer
from sample import draw
from trainer import Trainer

log = logging.getLogger("gpt")


def configure(*overrides: str) -> DictConfig:
    """The configuration of `python main.py OVERRIDES`, to be given to `train` by another program or in a
    notebook. Raises `UserError`.
    """
    log_to_console()
    return compose(with_recipe(list(overrides)))


def train(composed: DictConfig) -> float | None:
    """Builds everything from a composed configuration and trains, in this process; returns the last
    held-out loss, nats per character. Raises `UserError`.
    """
    log_to_console()
    config = validate(composed)
    config.launch.check_starts_none()
    return run_training(config)


def run_training(config: Config) -> float | None:
    """Builds everything from the validated configuration and trains; returns the last held-out loss."""
    world = join_processes(config.trainer.device, config.trainer.threads, config.trainer.timeout_s)
    with open_run(config.run_dir, config.trainer.snapshot_path, world):
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        snapshots = SnapshotManager(config.trainer, config.run_dir, world)
        pretrained = start_from(config, snapshots.found, world)
        train_text, held_out = load_text(config, snapshots.found, world)
        model = build_model(config, snapshots.found, world)
        if pretrained is not None:
            load_pretrained(pretrained, model, train_text.vocabulary)
            pretrained = None  # free the weights
        bare: Any = distributed.unwrap(model)
        optimizer = create_optimizer(model, config.optimizer)
        shape = train_text.vocab_size, train_text.block_size
        draw_samples = functools.partial(draw, bare, train_text.vocabulary, world.device)
        trainer = Trainer(
            config.trainer,
            model,
            optimizer,
            train_text,
            held_out,
            schedule=functools.partial(learning_rate_factor, config=config.optimizer),
            sample=draw_samples if config.samples else None,
            probe=functools.partial(probe_logits, bare, *shape, world.device),
            world=world,
            run_config=plain(config),
            snapshots=snapshots,
            on_start=lambda: record_run(config, trainer),
        )
        loss = trainer.train()
        if world.is_first:
            conclude(config, trainer)
    return loss


def start_from(config: Config, snapshot: Snapshot | None, world: World) -> Pretrained | None:
    """The pretrained weights that `config.init_from` names, whose architecture `config` then has; None
    without them, and for a run that resumes from its own `snapshot`.
    """
    if snapshot is None and config.init_from is not None:
        pretrained = find_pretrained(config.init_from, world)
        config.resolve_architecture(pretrained.architecture)
        return pretrained
    if snapshot is not None and config.init_from is not None:
        check_resumed(config.init_from, snapshot)
        config.resolve_architecture(snapshot.model_config)
    elif snapshot is not None:
        config.init_from = snapshot.config.get("init_from")  # for the snapshots to come
    return None


def load_text(
    config: Config, snapshot: Snapshot | None, world: World
) -> tuple[CharDataset, CharDataset]:
    """The text to train on and the held-out text, fetched and encoded once on each host; `config.data` then
    names the text that is used. A run keeps the text it started on.
    """
    recorded = snapshot.config.get("data", {}).get("path") if snapshot else None
    config.data = run_on_each_host(lambda: prepare_text(config.data, recorded), world)
    dataset = CharDataset(config.data)
    check_ranks_agree(config, dataset.digest, world)
    config.model.vocab_size = dataset.vocab_size
    train_text, held_out = dataset.split()
    log.info(
        "text        %s: %s characters to train on, %s held out, %d distinct",
        config.data.path, f"{len(train_text.data):,}", f"{len(held_out.data):,}", dataset.vocab_size,
    )  # fmt: skip
    return train_text, held_out


def build_model(config: Config, snapshot: Snapshot | None, world: World) -> torch.nn.Module:
    """The model on this rank's device, wrapped in DDP or sharded, with fresh weights."""
    torch.manual_seed(config.trainer.seed)  # every rank starts from the same weights
    earlier = snapshot.choices_on(world.device.type) if snapshot else {}
    dtype = getattr(torch, auto.resolve_amp_dtype(config.trainer, world.device, earlier))
    model = sharding.build(lambda: GPT(config.model), world, config.trainer.strategy, dtype)
    sharded = ", sharded" * sharding.is_sharded(model)
    log.info("parameters  %s%s", f"{sum(p.numel() for p in model.parameters()):,}", sharded)
    if world.device.type == "cpu":
        log.info("kernels     %s", build.describe(dtype))
    return model


def record_run(config: Config, trainer: Trainer) -> None:
    """Writes `config.yaml`, and a line of `environment.jsonl`."""
    with atomic_write(os.path.join(config.run_dir, CONFIG)) as file:
        OmegaConf.save(plain(config), file)
    record_start(
        config.run_dir,
        trainer.world,
        trainer.step,
        total_steps=trainer.total_steps,
        precision=trainer.choices["amp_dtype"],
        compiled=trainer.choices["compile"],
        parameters=sum(parameter.numel() for parameter in trainer.parameters),
        text_sha256=trainer.train_dataset.digest,
    )


def conclude(config: Config, trainer: Trainer) -> None:
    """Writes the report, and logs what to do next."""
    if config.report:
        try:
            import report  # with jinja2, which only it needs

            path = report.write([config.run_dir], os.path.join(config.run_dir, REPORT))
            log.info("report      %s", relative_path(path))
        except Exception as error:  # no reason to fail
            log.warning("cannot write %s: %s", REPORT, one_line(error))
    snapshots = trainer.snapshots
    if snapshots.best is not None:
        path = snapshots.storage.best
        log.info("best        held-out loss %.4f at step %d: %s", *snapshots.best, path)
    log.info("sample      python sample.py run_dir=%s", relative_path(config.run_dir))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    """Trains as composed, in this process or in those that `launch` asks for."""
    log_to_console()  # of a worker of submitit
    hydra_config = HydraConfig.get()
    if hydra_config.runtime.output_dir != os.getcwd():
        composed.run_dir = hydra_config.runtime.output_dir  # which Hydra chose for a sweep's job
    try:
        with slurm.submitit_job(distributed.leave):
            config = validate(composed)
            if not config.launch.starts_others():
                return run_training(config)
            launch.start(config.launch, __file__, worker_arguments(hydra_config, config.run_dir))
            return Run(config.run_dir).last_loss
    except Stopped as stopped:  # also ends the other jobs of a sweep
        distributed.leave(stopped.status)
    except UserError as error:
        if hydra_config.mode != RunMode.MULTIRUN:
            fail(error)
        log.error("%s", error)
        raise  # Hydra runs the other jobs first


def run() -> None:
    """The command line: `main` under Hydra."""
    arguments = sys.argv[1:]
    with command_line():
        if {"-h", "--help"} & set(arguments):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
            print(__doc__, help_text(), sep="\n")
            return
        if {"-m", "--multirun"} & set(arguments):
            launch.check_sweep(arguments)
            slurm.share_imports(os.path.dirname(__file__))
        sys.argv[1:] = with_recipe(arguments)
        SCHEMA.check(sys.argv[1:])
        main()
    distributed.leave(0)


if __name__ == "__main__":
    run()
