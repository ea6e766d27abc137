"""Trains a character-level GPT.

    python main.py                                         one process; the recipe for this machine
    torchrun --standalone --nproc_per_node=gpu main.py     a process for every GPU of this machine
    torchrun --standalone --nproc_per_node=2 main.py       two processes, on GPUs or CPU cores
    python main.py experiment=mingpt_ddp                   a named recipe; see conf/experiment/
    python main.py model.n_layer=8 trainer.max_steps=500   anything is an override
    python main.py data=text data.path=book.txt            another text

The same command again goes on where the run was stopped.
"""

import signals

if __name__ == "__main__":
    signals.prepare()

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from typing import NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

import distributed
import kernels
from char_dataset import CharDataset, fetch, read_text
from config import Config, explain, plain, register, validate
from distributed import (
    World,
    gather,
    launched_rank,
    launched_size,
    naming_the_silent,
    run_on_each_host,
    run_on_first,
)
from errors import UserError, one_line
from metrics import LOCK, METRICS, owned, run_directory
from model import GPT
from optimizer import create_optimizer
from schedule import learning_rate_factor
from signals import Stopped
from snapshot import Snapshot
from snapshot_files import exists, is_local
from trainer import Trainer, find_snapshot, snapshot_path

log = logging.getLogger("gpt")
CONFIG = "config.yaml"  # of a run, in its directory


def train(composed: DictConfig, text_is_named: bool = True) -> float | None:
    """Builds everything from a composed configuration and trains; returns the last held-out loss,
    nats per character.

    `text_is_named` says that the user chose the text, so that no other may stand in for it. Raises
    `UserError`.
    """
    config = validate(composed)
    if config.trainer.snapshot_path in (CONFIG, METRICS, LOCK, "main.log"):
        raise UserError(
            f"trainer.snapshot_path={config.trainer.snapshot_path}: the run has another file of "
            "that name"
        )
    if text_is_named:
        config.data.fallback = None
    world = distributed.start(
        config.trainer.device, config.trainer.threads, config.trainer.timeout_s
    )
    with contextlib.ExitStack() as stack, naming_the_silent(world, lambda: "before training"):
        run_on_first(lambda: own_files(config, stack), world)
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        snapshot = find_snapshot(config.trainer, config.run_dir, world)
        if snapshot is None and config.trainer.resume != "never":
            run_on_first(lambda: check_nothing_is_left_behind(config), world)
        dataset = load_text(config, snapshot, world)
        train_dataset, test_dataset = dataset.split()

        if config.model.vocab_size not in (None, dataset.vocab_size):
            raise UserError(
                f"model.vocab_size={config.model.vocab_size}: the text has {dataset.vocab_size} "
                "distinct characters; leave it null"
            )
        config.model.vocab_size = dataset.vocab_size
        torch.manual_seed(config.trainer.seed)  # every rank starts from the same weights
        model = distributed.wrap(GPT(config.model), world)
        optimizer = create_optimizer(model, config.optimizer)
        trainer = Trainer(
            config.trainer,
            model,
            optimizer,
            train_dataset,
            test_dataset,
            schedule=lambda step, total_steps: learning_rate_factor(
                step, total_steps, config.optimizer
            ),
            world=world,
            run_dir=config.run_dir,
            run_config=plain(config),
            snapshot=snapshot,
        )
        eager_bfloat16 = (
            trainer.choices["amp_dtype"] == "bfloat16" and not trainer.choices["compile"]
        )
        if world.device.type == "cpu" and eager_bfloat16:  # nothing else uses them
            log.info("kernels     %s", kernels.describe())
        if trainer.step < trainer.total_steps:  # of a finished run, the file says how it was made
            run_on_first(lambda: save_config(config), world)
        loss = trainer.train()
        at = f"snapshot={trainer.files.path}"
        if os.path.basename(trainer.files.path) == "gpt_snapshot.pt":
            at = f"run_dir={os.path.dirname(trainer.files.path)}"
        log.info("sample      python sample.py %s", at)
    return loss


def own_files(config: Config, stack: contextlib.ExitStack) -> None:
    """Owns what the run writes until `stack` ends: its directory, and its snapshots wherever."""
    stack.enter_context(run_directory(config.run_dir))
    path = snapshot_path(config.trainer, config.run_dir)
    if is_local(path):
        folder, name = os.path.split(path)
        lock = os.path.join(folder, f".{name}{LOCK}")
        stack.enter_context(owned(lock, f"trainer.snapshot_path={path}"))


def check_nothing_is_left_behind(config: Config) -> None:
    """Raises `UserError` if this run has its snapshots, but at another `trainer.snapshot_path`."""
    recorded = os.path.join(config.run_dir, CONFIG)
    if not os.path.exists(recorded):
        return
    try:
        was = OmegaConf.select(OmegaConf.load(recorded), "trainer.snapshot_path")
    except Exception as error:  # a file can be wrong in many ways
        raise UserError(
            f"{recorded}: cannot be read: {one_line(error)}; mend it, or move it away"
        ) from error
    if was is None or was == config.trainer.snapshot_path:
        return
    before = snapshot_path(dataclasses.replace(config.trainer, snapshot_path=was), config.run_dir)
    if exists(before):
        raise UserError(
            f"trainer.snapshot_path={config.trainer.snapshot_path}: there is no snapshot, but this "
            f"run has one at {before}; go on with trainer.snapshot_path={was}, move it there, or "
            "start anew with run_name=NEW_NAME or trainer.resume=never"
        )


def save_config(config: Config) -> None:
    """Writes the resolved configuration into the run's directory, whole or not at all."""
    path = os.path.join(config.run_dir, CONFIG)
    OmegaConf.save(plain(config), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_text(config: Config, snapshot: Snapshot | None, world: World) -> CharDataset:
    """The text to train on, read on every rank once the first process of each host has fetched it.

    A run that has begun on the fallback text keeps it. `config.data` says afterwards which text it
    is.
    """
    data = config.data
    began_on = snapshot.config.get("data", {}).get("path") if snapshot else None
    if data.fallback is not None and began_on == data.fallback:
        path = data.fallback
    else:
        path = run_on_each_host(lambda: fetch(data), world)
        if path != data.path:
            log.warning(
                "%s cannot be had (no network?): training on %s, text that comes with Python",
                data.url,
                path,
            )
    if path != data.path:
        config.data = data = dataclasses.replace(data, path=path, url=None, sha256=None)
    log.info("text        %s", path)
    remote = not is_local(path)  # is read once, by rank 0, and handed to the others
    dataset = CharDataset(data, run_on_first(lambda: read_text(data), world) if remote else None)
    if len(set(gather(dataset.digest, world))) > 1:
        raise UserError(f"data.path={path}: the processes read different texts there")
    return dataset


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    try:
        if hydra_config.runtime.output_dir != os.getcwd():  # a sweep's job, or hydra.run.dir=...
            composed.run_dir = hydra_config.runtime.output_dir
        path = composed.trainer.snapshot_path
        apart = (is_local(path) and not os.path.isabs(path)) or composed.run_dir in path
        if hydra_config.mode == RunMode.MULTIRUN and not apart:
            fail(
                f"trainer.snapshot_path={path}: is the same for all jobs of the sweep; leave it "
                "relative, or put ${run_dir} into it"
            )
        overrides = OmegaConf.to_container(hydra_config.overrides.task)  # as they were typed
        named = {o.split("=")[0].lstrip("+~") for o in overrides}
        sizes = ("n_layer", "n_head", "n_embd")
        if "model.model_type" in named and not named & {f"model.{size}" for size in sizes}:
            for size in sizes:  # the recipe's sizes are not those of the type that was asked for
                composed.model[size] = None
        if "data.path" in named and "data.url" not in named:
            composed.data.url = None  # the configured url and digest are those of another text
            if "data.sha256" not in named:
                composed.data.sha256 = None
        return train(composed, text_is_named=bool(named & {"data", "data.path", "data.url"}))
    except Stopped as stopped:  # of a sweep, the other jobs too
        distributed.leave(stopped.status)
    except UserError as error:
        if hydra_config.mode == RunMode.MULTIRUN:
            log.error("error: %s", error)
            raise  # Hydra goes on with the other jobs and raises it again when they are done
        fail(error)


def fail(error: Exception | str, status: int = 1) -> NoReturn:
    """Ends the process with one line."""
    rank = f" (rank {launched_rank()})" if launched_size() > 1 else ""
    sys.stderr.write(f"error{rank}: {error}\n")  # in one piece: the ranks share a terminal
    distributed.leave(status)


def log_to_console() -> None:
    """Has rank 0, and no other, print its log."""
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(
        logging.StreamHandler(sys.stdout) if launched_rank() == 0 else logging.NullHandler()
    )


def choose_recipe() -> None:
    """Puts the recipe that fits this machine on the command line, unless it names one."""
    given = sys.argv[1:]
    if "experiment=null" in given:  # Hydra has no such override; null is what config.yaml has
        sys.argv.remove("experiment=null")
        return
    names = {argument.split("=")[0].lstrip("+~") for argument in given}
    if names & {"experiment", "--hydra-help", "--version"}:
        return
    gpu = torch.cuda.is_available() and "trainer.device=cpu" not in given
    recipe = "shakespeare_gpu" if gpu else "shakespeare_cpu"
    # A choice made inside conf/config.yaml would be an interpolated group, and those may not
    # override other groups. Hydra wants all overrides in one place.
    overrides = (i for i, a in enumerate(sys.argv) if i and "=" in a and not a.startswith("-"))
    sys.argv.insert(next(overrides, 1), f"experiment={recipe}")
    if names.isdisjoint(
        {"--help", "-h", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
    ):
        log.info(
            "recipe      %s, which fits this machine; or experiment=NAME: %s", recipe, recipes()
        )


def recipes() -> str:
    """The names of all recipes."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf", "experiment")
    return ", ".join(sorted(name.removesuffix(".yaml") for name in os.listdir(folder)))


if __name__ == "__main__":
    signals.interruptible()
    register()
    log_to_console()
    if launched_size() > 1 and not {"-m", "--multirun"}.isdisjoint(sys.argv):
        fail("-m runs its jobs in this process: start it with python, not torchrun")
    choose_recipe()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors, to be shown our way
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except UserError:
        sys.exit(1)  # of a sweep's job, and said then
    except OSError as error:
        if error.filename is None or not any(a.startswith("hydra.") for a in sys.argv):
            raise
        fail(
            f"{error.filename}: {error.strerror}"
        )  # Hydra could not make the directory it was given
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from the last snapshot", 128 + signal.SIGINT)
    distributed.leave(0)
