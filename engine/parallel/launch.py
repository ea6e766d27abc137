"""Several processes from plain Python: what `torchrun --standalone` does, done by `main.py` itself.

    python main.py launch.nproc_per_node=2

This process becomes the agent of torch's elastic launcher: it starts the same program with the same
overrides, waits for its processes, hands signals on to them, and ends as they do.
"""

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from engine.errors import UserError
from engine.parallel.distributed import launched_size
from engine.run.signals import SIGNALS, Stopped

PROGRAM = str(Path(__file__).resolve().parents[2] / "main.py")


@dataclass
class LaunchConfig:
    """How many processes train. The fields are explained in `conf/config.yaml`."""

    nproc_per_node: int | str = 1
    max_restarts: int = 0

    def __post_init__(self):
        n = self.nproc_per_node
        if n != "gpu" and (isinstance(n, str) or n < 1):
            raise UserError(
                f"launch.nproc_per_node={n}: must be a number of processes, at least 1, or gpu"
            )
        if self.max_restarts < 0:
            raise UserError(f"launch.max_restarts={self.max_restarts}: must not be negative")

    def processes(self) -> int:
        """How many processes are to be started; 1 is this one. Raises `UserError` for `gpu` where
        there is none.
        """
        if self.nproc_per_node != "gpu":
            return int(self.nproc_per_node)
        if not torch.cuda.is_available():
            raise UserError(
                "launch.nproc_per_node=gpu: no GPU that this build of torch can use; give a number"
            )
        return torch.cuda.device_count()

    def starts_others(self) -> bool:
        """Whether others train, and this one waits: one that died could not start itself again."""
        return self.processes() > 1 or self.max_restarts > 0

    def check(self) -> None:
        """Raises `UserError` if processes are to be started by one that a launcher has started."""
        if launched_size() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        if self.processes() > 1:
            raise UserError(
                f"launch.nproc_per_node={self.nproc_per_node}: must be 1 under a launcher, which "
                "has started the processes already; or leave the launcher out: python main.py "
                f"launch.nproc_per_node={self.nproc_per_node}"
            )
        if self.max_restarts > 0:
            raise UserError(
                f"launch.max_restarts={self.max_restarts}: must be 0 under a launcher, which "
                "starts its processes again itself (torchrun --max-restarts)"
            )


def without(overrides: list[str], *keys: str) -> list[str]:
    """The overrides that do not begin with one of `keys`, as in `launch.` or `run_dir=`."""
    return [o for o in overrides if not o.lstrip("+~").startswith(keys)]


def quoted(value: str) -> str:
    """`value` as an override has it, whatever is in it."""
    return QuotedString(value, Quote.single).with_quotes()


def arguments(hydra: Any, overrides: list[str], run_dir: str) -> list[str]:
    """The arguments with which a process composes what this job has composed: from `hydra`, Hydra's
    own configuration, the overrides as they were typed, and the directory that was chosen.
    """
    sources = {source.provider: source.path for source in hydra.runtime.config_sources}
    result = ["--config-path", sources["main"], "--config-name", hydra.job.config_name]
    if "command-line" in sources:
        result += ["--config-dir", sources["command-line"]]
    result += [o for o in hydra.overrides.hydra if o.lstrip("+").startswith("hydra.searchpath=")]
    result += without(overrides, "launch.")
    if not any(o.lstrip("+").startswith("experiment=") for o in overrides):
        result.append("experiment=null")  # or it would choose one
    return [
        *result,
        f"run_dir={quoted(run_dir)}",
        "launch.nproc_per_node=1",
        "launch.max_restarts=0",
    ]


def is_news(record: logging.LogRecord) -> bool:
    """Whether the elastic launcher logs more than that it hands on a signal, or that a process
    failed: the processes and `start` say those in a line each.
    """
    return not re.match(r"Received .* death signal|Sending process|failed \(exit", str(record.msg))


def start(config: LaunchConfig, arguments: list[str]) -> None:
    """Runs `main.py` with `arguments` in `config.processes()` processes and waits for them.

    SIGTERM, SIGINT, SIGHUP and SIGUSR2 are handed on. Raises `Stopped` where the processes were
    asked to stop, and `UserError` where one of them failed; it has said why, unless a signal ended
    it.
    """
    for name in ("agent.server", "multiprocessing"):
        logging.getLogger(f"torch.distributed.elastic.{name}.api").addFilter(is_news)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    handed_on = [number for number in SIGNALS if number != signal.SIGUSR1]  # which stops nothing
    handlers = {number: signal.getsignal(number) for number in handed_on}
    heard = [n.name for n, handler in handlers.items() if handler != signal.SIG_IGN]  # not by nohup
    with tempfile.TemporaryDirectory() as folder:
        elastic = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.processes(),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=config.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(heard),
        )
        try:
            api.elastic_launch(elastic, sys.executable)("-u", PROGRAM, *arguments)
        except SignalException as error:
            raise Stopped(SIGNALS[error.sigval]) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            for number, request in SIGNALS.items():
                if failure.exitcode == 128 + number:  # one was signalled, and all have stopped
                    raise Stopped(request) from None
            if failure.exitcode < 0:
                how = f"was ended by {failure.signal_name()}; the same command resumes it"
            else:
                how = f"ended with status {failure.exitcode}; see its error above"
            raise UserError(f"rank {rank} (process {failure.pid}) {how}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
