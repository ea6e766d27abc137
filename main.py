"""Trains a character-level GPT.

    python main.py                                         one process; the recipe for this machine
    python main.py launch.nproc_per_node=gpu               a process for every GPU of this machine
    torchrun --standalone --nproc_per_node=2 main.py       two processes, on GPUs or CPU cores
    srun python main.py                                    a process for every task of a SLURM job
    python main.py experiment=mingpt_ddp                   a named recipe; see conf/experiment/
    python main.py model.n_layer=8 trainer.max_steps=500   anything is an override
    python main.py data=text data.path=book.txt            another text

The same command again resumes the run where it was stopped.
"""

from engine.run import signals

if __name__ == "__main__":
    signals.prepare()

import atexit
import contextlib
import dataclasses
import errno
import inspect
import logging
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import NoReturn, cast

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import CharDataset
from config import Config, explain, plain, register, validate
from engine.config import sweep
from engine.config.overrides import check_overrides, compose_config, follow_overrides, with_recipe
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.interop import pretrained as init_from
from engine.kernels import native as kernels
from engine.machine.choices import choose_amp_dtype
from engine.optim.optimizer import create_optimizer
from engine.optim.schedule import learning_rate_factor
from engine.parallel import distributed, launch, sharding, slurm
from engine.parallel.distributed import (
    World,
    gather,
    launched_rank,
    launched_size,
    report_unresponsive_ranks,
    run_on_each_host,
    run_on_first,
)
from engine.run import provenance as environment
from engine.run.directory import (
    CONFIG,
    METRICS,
    REPORT,
    check_none_elsewhere,
    is_run,
    lock_run,
    shown,
)
from engine.run.progress import show_every_character
from engine.run.signals import Stopped
from engine.snapshots.saver import Saver
from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import is_local
from engine.text.encoding import fill
from engine.text.sources import fetch
from model import GPT, GPTConfig
from sample import draw
from trainer import Trainer

log = logging.getLogger("gpt")


def configure(*overrides: str) -> DictConfig:
    """The configuration that `python main.py OVERRIDES` composes, to be given to `train` by another
    program or in a notebook, as often as one likes.

    Without an `experiment=` it has the recipe that fits this machine. Raises `UserError`.
    """
    log_to_console()
    words = with_recipe(list(overrides))
    check_overrides(words)
    return compose_config(words)


def train(composed: DictConfig) -> float | None:
    """Builds everything from a composed configuration and trains, in this process; returns the last
    held-out loss, nats per character. Raises `UserError`.
    """
    log_to_console()
    config = validate(composed)
    if config.launch.starts_others():
        raise UserError(
            f"launch.nproc_per_node={config.launch.nproc_per_node}, "
            f"launch.max_restarts={config.launch.max_restarts}: train() is one process, which "
            "starts no other; start python main.py, or hand train to a launcher"
        )
    distributed.check_not_copied()
    world = distributed.join_processes(
        config.trainer.device, config.trainer.threads, config.trainer.timeout_s
    )
    with (
        contextlib.ExitStack() as stack,
        report_unresponsive_ranks(world, lambda: "before training"),
    ):
        own = lock_run(config.run_dir, config.trainer)
        run_on_first(lambda: stack.enter_context(own), world)
        log.info("run         %s in %s", config.run_name, os.path.abspath(config.run_dir))
        saver = Saver(config.trainer, config.run_dir, world)
        snapshot = saver.found
        if snapshot is not None:
            complete(snapshot)
        if snapshot is None and config.trainer.resume != "never":
            run_on_first(lambda: check_none_elsewhere(config.run_dir, config.trainer), world)
        if snapshot is None and is_run(config.run_dir) and config.trainer.resume != "never":
            log.warning(
                "there are metrics of an earlier start, but no snapshot: training from the "
                "beginning, %s is written anew",
                METRICS,
            )
        learned = init_from.prepare(config, snapshot, world)
        dataset = load_text(config, snapshot, world)
        train_dataset, test_dataset = dataset.split()

        if config.model.vocab_size not in (None, dataset.vocab_size):
            raise UserError(
                f"model.vocab_size={config.model.vocab_size}: the text has {dataset.vocab_size} "
                "distinct characters; leave it null"
            )
        config.model.vocab_size = dataset.vocab_size
        torch.manual_seed(config.trainer.seed)  # every rank starts from the same weights
        choices = snapshot.choices_on(world.device.type) if snapshot else {}
        dtype = getattr(torch, choose_amp_dtype(config.trainer, world.device, choices))
        model = sharding.build(
            lambda: GPT(config.model),
            world,
            config.trainer.strategy,
            dtype,
            config.trainer.offload,
        )
        if learned is not None:
            init_from.load_pretrained(learned, model, dataset.vocabulary)
            learned = None  # or every process would keep the whole of it
        optimizer = create_optimizer(model, config.optimizer)
        log.info(
            "optimizer   %s, %s schedule, learning rate %g, weight decay %g",
            config.optimizer.name, config.optimizer.schedule, config.optimizer.learning_rate,
            config.optimizer.weight_decay,
        )  # fmt: skip

        def sample() -> list[str]:
            return draw(cast(GPT, distributed.unwrap(model)), dataset.vocabulary, world.device)

        trainer = Trainer(
            config.trainer,
            model,
            optimizer,
            train_dataset,
            test_dataset,
            schedule=lambda step, total_steps: learning_rate_factor(
                step, total_steps, config.optimizer
            ),
            sample=sample if config.samples else None,
            world=world,
            run_config=plain(config),
            saver=saver,
        )
        snapshot = None
        if world.device.type == "cpu" and not trainer.choices["compile"]:
            log.info("kernels     %s", kernels.describe(dtype))
        if trainer.step < trainer.total_steps:  # of a finished run, the file says how it was made
            run_on_first(lambda: save_config(config), world)
            run_on_first(lambda: environment.record(config.run_dir, trainer), world)
        loss = trainer.train()
        if config.report and world.is_first:
            write_report(config.run_dir)
        if trainer.best is not None:
            at = trainer.files.best
            at = shown(at) if is_local(at) else at
            log.info("best        held-out loss %.4f at step %d: %s", *trainer.best, at)
        log.info("sample      python sample.py run_dir=%s", shown(config.run_dir))
    return loss


def save_config(config: Config) -> None:
    """Writes the resolved configuration into the run's directory, whole or not at all."""
    with atomic_write(os.path.join(config.run_dir, CONFIG)) as file:
        OmegaConf.save(plain(config), file)


def write_report(run_dir: str) -> None:
    """Writes the run's report; that it cannot be written is no reason to fail."""
    try:
        import report  # what only it needs

        log.info("report      %s", shown(report.write([run_dir], os.path.join(run_dir, REPORT))))
    except Exception as error:
        log.warning("%s was not written: %s", REPORT, one_line(error))


def complete(snapshot: Snapshot) -> None:
    """Gives the fields that `GPTConfig` has got since `snapshot` was made their defaults, which is
    what the model was made with: a run may not go on with another value of these either.
    """
    if snapshot.config.get("model"):  # other programs may have kept none
        snapshot.config["model"] = dataclasses.asdict(GPTConfig.recorded(snapshot.model_config))


def load_text(config: Config, snapshot: Snapshot | None, world: World) -> CharDataset:
    """The text to train on, read on every rank once the first process of each host has fetched it,
    and has put it into the host's cache if it is large.

    A run that has begun on the fallback text keeps it. `config.data` says afterwards which text it
    is.
    """
    data = config.data
    began_on = snapshot.config.get("data", {}).get("path") if snapshot else None
    if data.fallback is not None and began_on == data.fallback:
        path = data.fallback
        log.warning(
            "this run began on %s, as %s could not be downloaded, and stays with it; "
            "for another text, run_name=NEW_NAME or trainer.resume=never",
            path, data.path,
        )  # fmt: skip
    else:
        path = run_on_each_host(lambda: fetch(data), world)
        if path != data.path:
            log.warning(
                "%s could not be downloaded (no network?): training on %s, which comes with "
                "Python; to train on the text itself, put it at %s",
                data.url, path, os.path.abspath(data.path),
            )  # fmt: skip
    if path != data.path:
        config.data = data = dataclasses.replace(data, path=path, url=None, sha256=None)
    log.info("text        %s", path)
    texts: list[str | None] = []  # rank 0 hands its own to the others, if it has one
    run_on_each_host(lambda: texts.append(fill(data)), world)
    dataset = CharDataset(data, run_on_first(lambda: texts[0], world))
    if len(set(gather(dataset.digest, world))) > 1:
        raise UserError(f"data.path={path}: the processes read different texts there")
    return dataset


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@record  # gives torchrun the traceback of the rank that failed
def main(composed: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    by_submitit = not log.handlers  # in a process of its own, which has this function alone
    try:
        if by_submitit:
            begin_job()
        if hydra_config.runtime.output_dir != os.getcwd():  # a sweep's job, or hydra.run.dir=...
            composed.run_dir = hydra_config.runtime.output_dir
        path = composed.trainer.snapshot_path
        apart = (is_local(path) and not os.path.isabs(path)) or composed.run_dir in path
        if hydra_config.mode == RunMode.MULTIRUN and not apart:
            fail(
                f"trainer.snapshot_path={path}: every job of a sweep has its own; leave it "
                "relative, or put ${run_dir} into it"
            )
        overrides = cast(list[str], OmegaConf.to_container(hydra_config.overrides.task))  # as typed
        with contextlib.ExitStack() as stack:
            if hydra_config.mode == RunMode.MULTIRUN and launched_rank() == 0:
                job = launch.without(overrides, "launch.")
                stack.enter_context(sweep.recorded(composed.run_dir, job))
            follow_overrides(composed, overrides)
            config = validate(composed)
            if config.launch.starts_others():
                arguments = launch.arguments(hydra_config, overrides, config.run_dir)
                launch.start(config.launch, arguments)
                return sweep.last_loss(config.run_dir)
            loss = train(composed)
        if by_submitit and launched_size() > 1:  # it has yet to write down the result
            atexit.register(distributed.leave, 0)
        return loss
    except Stopped as stopped:  # of a sweep, the other jobs too
        status = stopped.status
        if by_submitit and stopped.name == "SIGUSR2":
            try:  # its own handler puts the job back into the queue, on rank 0
                signal.raise_signal(signal.SIGUSR2)
            except SystemExit as leaving:
                status = cast(int, leaving.code)
        distributed.leave(status)
    except UserError as error:
        if hydra_config.mode == RunMode.MULTIRUN:
            log.error("%s", error)
            raise  # Hydra goes on with the other jobs and raises it again when they are done
        fail(error)


def begin_job() -> None:
    """Does in a process of submitit's what the end of this file does in others."""
    signals.prepare()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit has it ignored
    slurm.export_torchrun_env()
    log_to_console()


def print_config(arguments: list[str]) -> bool:
    """Prints what `--cfg job` asks for as it would run, which Hydra, that knows nothing of
    `follow_overrides`, does not; False where something else is asked for, too.
    """
    asked = {"--cfg", "-c", "--cfg=job"} & set(arguments)
    others = [a for a in arguments if a not in (*asked, "job", "--resolve")]
    if not asked or any("=" not in a or a.startswith("-") for a in others):
        return False
    print(OmegaConf.to_yaml(compose_config(others), resolve="--resolve" in arguments), end="")
    return True


def fail(error: Exception | str, status: int = 1) -> NoReturn:
    """Ends the process with one line."""
    rank = f" (rank {launched_rank()})" if launched_size() > 1 else ""
    sys.stderr.write(f"error{rank}: {error}\n")  # in one piece: the ranks share a terminal
    distributed.leave(status)


def show_from_main(
    kind: type[BaseException], error: BaseException, found: TracebackType | None
) -> None:
    """Prints the traceback of an error of the code without what leads to `main`, which is Hydra's
    own.
    """
    code = inspect.unwrap(main).__code__
    own = found
    while own is not None and own.tb_frame.f_code is not code:
        own = own.tb_next
    traceback.print_exception(error.with_traceback(own or found))


class Console(logging.StreamHandler):
    """Prints the log, until nobody reads it any more."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
            self.setLevel(logging.CRITICAL + 1)
        else:
            super().handleError(record)


class Plain(logging.Formatter):
    """Messages as they are, warnings and errors named as such."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        named = record.levelno >= logging.WARNING
        return f"{record.levelname.lower()}: {message}" if named else message


def log_to_console() -> None:
    """Has rank 0, and no other, print its log, also where processes begin as copies of this one."""
    if log.handlers:
        return
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = Console(sys.stdout)
    handler.setFormatter(Plain())
    handler.addFilter(lambda record: launched_rank() == 0)
    log.addHandler(handler)


if __name__ == "__main__":
    signals.interruptible()
    sys.excepthook = show_from_main
    show_every_character()
    register()
    try:
        slurm.export_torchrun_env()
    except UserError as error:
        fail(error)
    log_to_console()
    if not {"-m", "--multirun"}.isdisjoint(sys.argv):
        if launched_size() > 1:
            fail(
                "-m: the jobs of a sweep take turns, each with processes of its own: start it with "
                f"python main.py -m launch.nproc_per_node={launched_size()} ..., without a launcher"
            )
        if {"--cfg", "-c"} & set(sys.argv):
            fail("--cfg: prints one configuration; leave out -m")
        for argument in sys.argv:
            if argument.lstrip("+").startswith("launch.") and "," in argument:
                fail(f"{argument}: cannot differ between the jobs of a sweep; give one value")
        here, others = os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, others)))  # for submitit
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors, to be shown our way
    try:
        sys.argv[1:] = with_recipe(sys.argv[1:])
        check_overrides(sys.argv[1:])
        if not print_config(sys.argv[1:]):
            main()
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, sys.argv[1:]))
    except UserError as error:  # of a sweep's job; said then, but it may be long ago or elsewhere
        fail(error)
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        fail(" ".join(str(error).splitlines()[:2]))  # before all that the job has printed
    except OSError as error:
        given = any(a.startswith("hydra.") or a in ("-m", "--multirun") for a in sys.argv)
        if error.filename is None or not given:
            raise
        fail(f"{error.filename}: {error.strerror}")  # a directory that Hydra could not make
    except KeyboardInterrupt:
        fail("interrupted; the same command resumes from the last snapshot", 128 + signal.SIGINT)
    distributed.leave(0)
