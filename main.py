"""Trains a character-level GPT.

    python main.py                                              one process; picks the recipe for
    this machine
    torchrun --standalone --nproc_per_node=gpu main.py          a process for every GPU of this
    machine
    torchrun --standalone --nproc_per_node=2 main.py            two processes, on GPUs or on CPU
    cores
    python main.py experiment=mingpt_ddp                        a named recipe; conf/experiment/ has
    them
    python main.py model.n_layer=8 optimizer.learning_rate=1e-3 anything is an override
    python main.py data=text data.path=book.txt                 another text

The same command again goes on where the run was stopped.
"""

import contextlib
import dataclasses
import logging
import os
import sys

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

import distributed
from char_dataset import CharDataset, fetch
from config import Config, explain, plain, register, validate
from distributed import (
    World,
    gather,
    launched_rank,
    launched_size,
    run_on_each_host,
    run_on_first,
)
from errors import UserError
from metrics import run_directory
from model import GPT, create_optimizer
from schedule import learning_rate_factor
from snapshot import Snapshot
from trainer import Trainer, find_snapshot

log = logging.getLogger("gpt")


def train(composed: DictConfig, text_is_named: bool = True) -> float | None:
    """Builds everything from a composed configuration and trains; returns the last held-out loss,
    nats per character.

    `text_is_named` says that the user chose the text, so that no other may stand in for it. Raises
    `UserError`.
    """
    config = validate(composed)
    if text_is_named:
        config.data.fallback = None
    world = distributed.start(
        config.trainer.device, config.trainer.threads, config.trainer.timeout_s
    )
    with contextlib.ExitStack() as stack:
        run_on_first(lambda: stack.enter_context(run_directory(config.run_dir)) and None, world)
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        snapshot = find_snapshot(config.trainer, config.run_dir, world)
        dataset = load_text(config, snapshot, world)
        train_dataset, test_dataset = dataset.split()

        config.model.vocab_size = dataset.vocab_size
        torch.manual_seed(
            config.trainer.seed
        )  # the weights are the same on every rank, and in every start
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
        run_on_first(
            lambda: OmegaConf.save(plain(config), os.path.join(config.run_dir, "config.yaml")),
            world,
        )
        loss = trainer.train()
        log.info("sample      python sample.py run_dir=%s", config.run_dir)
    return loss


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
    dataset = CharDataset(data)
    if len(set(gather(dataset.digest, world))) > 1:
        raise UserError(f"data.path={path}: the processes read different texts there")
    return dataset


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    try:
        if hydra_config.mode == RunMode.MULTIRUN and launched_size() > 1:
            raise UserError(
                "-m runs its jobs one after another in this process: start it with python, not "
                "torchrun"
            )
        if hydra_config.runtime.output_dir != os.getcwd():  # a sweep's job, or hydra.run.dir=...
            composed.run_dir = hydra_config.runtime.output_dir
        named = {override.split("=")[0] for override in hydra_config.overrides.task}
        if "data.path" in named and "data.url" not in named:
            composed.data.url = None  # the configured url and digest are those of another text
            if "data.sha256" not in named:
                composed.data.sha256 = None
        return train(composed, text_is_named=bool(named & {"data", "data.path", "data.url"}))
    except UserError as error:
        distributed.stop()  # every rank comes here; one that just left would take the others down
        fail(error)


def fail(error: Exception | str) -> None:
    """Ends the process with one line."""
    rank = f" (rank {launched_rank()})" if launched_size() > 1 else ""
    print(f"error{rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(1)


def log_to_console() -> None:
    """Has rank 0, and no other, print its log."""
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(
        logging.StreamHandler(sys.stdout) if launched_rank() == 0 else logging.NullHandler()
    )


def choose_recipe() -> None:
    """Adds the recipe that fits this machine to the command line, unless it names one."""
    if (
        "experiment=null" in sys.argv
    ):  # Hydra has no override that says so; null is what conf/config.yaml has
        return sys.argv.remove("experiment=null")
    # A choice made inside conf/config.yaml would be an interpolated group, and those may not
    # override other groups.
    if not any(argument.lstrip("+").startswith("experiment=") for argument in sys.argv[1:]):
        recipe = "shakespeare_gpu" if torch.cuda.is_available() else "shakespeare_cpu"
        sys.argv.append(f"experiment={recipe}")
        if not any(
            argument.startswith("-") for argument in sys.argv[1:]
        ):  # not for --help, --cfg and the like
            log.info(
                "recipe      %s, which fits this machine; choose another with experiment=NAME: %s",
                recipe,
                recipes(),
            )


def recipes() -> str:
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf", "experiment")
    return ", ".join(sorted(name.removesuffix(".yaml") for name in os.listdir(folder)))


if __name__ == "__main__":
    register()
    log_to_console()
    choose_recipe()
    os.environ.setdefault(
        "HYDRA_FULL_ERROR", "1"
    )  # Hydra raises its errors instead of printing them its own way
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    distributed.stop()
