"""SLURM and submitit: their environment variables, translated to torchrun's."""

import atexit
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import NoReturn

from engine import signals


def export_torchrun_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables where srun or submitit started this process as one of several.

    A launcher between srun and Python (torchrun, Accelerate) has set RANK, and wins. A batch script,
    a shell of salloc and `srun --pty` are one process: they have SLURM_PROCID, and SLURM_NTASKS of
    the whole job, but no step of several tasks.
    """
    if "RANK" in env:
        return
    if is_submitit_worker() and env.get("SUBMITIT_EXECUTOR") == "local":
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        return
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return

    # node[01-03,07],gpu5
    first_host = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])  # 4(x2),2
    tasks_per_node = [n for n, nodes in counts for _ in range(int(nodes or 1))]
    # The port: the same for all tasks of a step, another for the next step or job on a host; below
    # those that Linux gives to outgoing connections.
    port = 10_000 + (int(env["SLURM_JOB_ID"]) + 7919 * int(env["SLURM_STEP_ID"])) % 20_000
    ranks = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks_per_node[int(env["SLURM_NODEID"])],
        "MASTER_ADDR": env.get("MASTER_ADDR", first_host),
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }
    env.update(ranks)


def shows_own_gpus() -> bool:
    """Whether srun lets each task see its own GPUs alone, numbered from 0."""
    return any(name in os.environ for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))


def is_submitit_worker() -> bool:
    """Whether submitit started this process: it runs a pickled function, not `main.py`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "submitit.core._submit"


@contextlib.contextmanager
def submitit_job(leave: Callable[[int], NoReturn]) -> Iterator[None]:
    """A job of a sweep: in a worker of submitit, signals act as in `main.py`, and a job whose time is up
    goes back into the queue. `leave` ends a process. Elsewhere nothing changes.
    """
    if not is_submitit_worker():
        yield
        return
    signals.prepare()
    signals.interruptible()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit ignores
    try:
        yield
    except signals.Stopped as stopped:
        status = stopped.status
        if stopped.name == "SIGUSR2":
            try:
                signal.raise_signal(signal.SIGUSR2)  # submitit's handler on rank 0 requeues the job
            except SystemExit as leaving:
                status = leaving.code if isinstance(leaving.code, int) else 1
        leave(status)
    if "RANK" in os.environ:
        atexit.register(leave, 0)  # submitit writes down the result first


def share_imports(folder: str) -> None:
    """Lets a worker of submitit, which runs in another directory, import from `folder`."""
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, others)))
