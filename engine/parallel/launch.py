"""Local launcher: torchrun, called by `main.py` itself for `launch.nproc_per_node=2`."""

import logging
import os
import signal
import tempfile
from dataclasses import dataclass

import torch

from engine.errors import UserError
from engine.parallel.distributed import launched_size
from engine.signals import SIGNALS, Request, Stopped


@dataclass
class LaunchConfig:
    """The processes that `main.py` starts on this machine."""

    nproc_per_node: int | str = 1  # processes; gpu: one for each GPU; 1 under another launcher
    max_restarts: int = 0  # how often all are restarted after a failure; 0 under another launcher

    def __post_init__(self):
        n = self.nproc_per_node
        if n != "gpu" and (isinstance(n, str) or n < 1):
            raise UserError(f"launch.nproc_per_node={n}: must be a number of processes, or gpu")
        if self.max_restarts < 0:
            raise UserError(f"launch.max_restarts={self.max_restarts}: must not be negative")

    def processes(self) -> int:
        """The number of processes that train. Raises `UserError` for `gpu` without a GPU."""
        if self.nproc_per_node != "gpu":
            return int(self.nproc_per_node)
        if not torch.cuda.is_available():
            raise UserError(
                "launch.nproc_per_node=gpu: no GPU that this build of torch can use; give a number"
            )
        return torch.cuda.device_count()

    def starts_others(self) -> bool:
        """Whether training runs in child processes: several, or one that is restarted."""
        return self.processes() > 1 or self.max_restarts > 0

    def check_starts_none(self) -> None:
        """Raises `UserError` if training would run in child processes."""
        if self.starts_others():
            raise UserError(
                f"launch.nproc_per_node={self.nproc_per_node}, launch.max_restarts={self.max_restarts}: "
                "must be 1 and 0 under a launcher and in train(), which is one process; leave them out"
            )


def start(config: LaunchConfig, script: str, arguments: list[str]) -> None:
    """Runs `python SCRIPT ARGUMENTS...` in `config.processes()` processes and waits for them.

    Signals are forwarded. Raises `Stopped` if one stopped the processes, and `UserError` if a process
    failed.
    """
    from torch.distributed import run as torchrun  # only a launcher needs it
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("agent.server", "multiprocessing"):  # the errors below say it in one line
        logging.getLogger(f"torch.distributed.elastic.{name}.api").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    stopping = [number for number, request in SIGNALS.items() if request != Request.SAVE]
    handlers = {number: signal.getsignal(number) for number in stopping}
    forwarded = [n.name for n, handler in handlers.items() if handler != signal.SIG_IGN]  # by nohup
    with tempfile.TemporaryDirectory() as log_dir:
        options = [
            *("--standalone", "--local-addr=localhost", f"--log-dir={log_dir}"),
            f"--nproc-per-node={config.processes()}",
            f"--max-restarts={config.max_restarts}",
            f"--signals-to-handle={','.join(forwarded)}",
        ]
        try:
            torchrun.run(torchrun.parse_args([*options, script, *arguments]))
        except SignalException as error:
            raise Stopped(SIGNALS[error.sigval]) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            for number, request in SIGNALS.items():
                if failure.exitcode == 128 + number:  # sent to one rank, which stopped all
                    raise Stopped(request) from None
            how = f"ended with status {failure.exitcode}; see its error above"
            if failure.exitcode < 0:
                how = f"was ended by {failure.signal_name()}; the same command resumes it"
            raise UserError(f"rank {rank} (process {failure.pid}) {how}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def check_sweep(arguments: list[str]) -> None:
    """Raises `UserError` for a sweep under a launcher, or over how its jobs are launched."""
    if launched_size() > 1:
        raise UserError(
            "-m: the jobs of a sweep run one after another, each with processes of its own: start it "
            f"with python main.py -m launch.nproc_per_node={launched_size()} ..., without a launcher"
        )
    if {"--cfg", "-c"} & set(arguments):
        raise UserError("--cfg: prints one configuration; leave out -m")
    for argument in arguments:
        if argument.lstrip("+").startswith("launch.") and "," in argument:
            raise UserError(
                f"{argument}: cannot differ between the jobs of a sweep; give one value"
            )
