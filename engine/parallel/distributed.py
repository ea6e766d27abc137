"""Processes: who am I, where do I compute, and how do we agree. Works the same for one process
without any launcher.

The launcher's environment (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`: torchrun's
names, which Accelerate sets too, and `slurm.export_torchrun_env` under srun) decides whether there is a process
group; nothing else but `slurm.py` reads these variables.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError, one_line
from engine.machine import hardware
from engine.parallel import slurm
from engine.parallel.rendezvous import check_launcher, choose_interface, rendezvous

# The process that has last trained. In this module, as submitit pickles what is in `main` and takes
# it along into a job's next turn, which is another process but no copy.
trained_in: int | None = None


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, `local_rank` of `local_size` on its host, computing
    on `device`. Through `store` the processes can tell each other what they know when nothing else
    works any more; there is none where somebody else made the process group.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, the one process that writes and prints."""
        return self.rank == 0


def launched_size() -> int:
    """How many processes the launcher started; 1 without a launcher. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_rank() -> int:
    """The global rank that the launcher gave this process; 0 without a launcher. Needs no process
    group.
    """
    return int(os.environ.get("RANK", 0))


def is_restart(world: World) -> bool:
    """Whether torchrun has started these processes again (`--max-restarts`) after a failure, or
    SLURM has put their job back into the queue.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # by this host's torchrun
    return any(gather(restarts > 0 or slurm.is_restart(), world))


def join_processes(
    device: str = "auto", threads: int | None = None, timeout_s: float = 600
) -> World:
    """Chooses the device and joins the process group, if a launcher started more than one process.

    `device` is auto, cpu or cuda; `threads` per process on a CPU, where None divides the cores
    of the host (torchrun would leave every process with one). `timeout_s` bounds every later wait
    for another process. The backend is gloo on a CPU and NCCL on GPUs. Raises `UserError` for a
    device that is not there.
    """
    rank, size = launched_rank(), launched_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"trainer.device={device}: must be auto, cpu or cuda")
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise UserError(
            "trainer.device=cuda: no GPU that this build of torch can use; set trainer.device=cpu "
            "or auto"
        )
    own_gpu = gpus == 1 and slurm.shows_own_gpus()
    if gpus and local_size > gpus and not own_gpu:
        raise UserError(
            f"{local_size} processes on a machine with {gpus} GPU{'s' * (gpus > 1)}: start "
            f"--nproc_per_node={gpus} (srun --ntasks-per-node={gpus}), "
            "or set trainer.device=cpu"
        )
    if gpus:
        chosen = torch.device("cuda", 0 if own_gpu else local_rank)
        torch.cuda.set_device(chosen)
    else:
        chosen = torch.device("cpu")
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        torch.set_num_threads(threads or max(1, cores // local_size))
        hardware.keep_freed_memory()
    store = None
    if size > 1 and not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        check_launcher()
        try:
            store = rendezvous(rank, size, timeout)
            if size > local_size:
                choose_interface(store, rank, size)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=chosen if gpus else None,
            )
        except (dist.DistError, RuntimeError) as error:
            raise UserError(
                f"the {size} processes did not find each other within {timeout_s:g} s "
                f"(trainer.timeout_s): {one_line(error)[-300:]}"
            ) from error
    return World(rank, size, local_rank, local_size, chosen, store)


def check_not_copied() -> None:
    """Takes note that this process trains. Raises `UserError` in a fork of one that has: it lacks
    the threads of OpenMP, and would hang.
    """
    global trained_in
    if trained_in not in (None, os.getpid()):
        raise UserError(
            "this process is a fork of one that has trained, and torch's threads are not in it: "
            "restart the session, and start the processes before anything else trains in it"
        )
    trained_in = os.getpid()


def leave(status: int) -> NoReturn:
    """Ends the process with exit status `status`, leaving the process group first.

    Skips the interpreter's own tear-down, in which gloo's threads, which may outlive their group,
    now and then abort the process (torch 2.13.0); it would take half a second, too.
    """
    if not dist.is_initialized():
        atexit._run_exitfuncs()
    elif status == 0:  # else the others may be gone, and not there to take leave of
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def wrap(model: nn.Module, world: World) -> nn.Module:
    """`model` on this process's device, in `DistributedDataParallel` if there are several
    processes.
    """
    model.to(world.device)
    if world.size == 1:
        return model
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `wrap`'s result: the one whose parameter names a snapshot holds."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def run_on_first(action: Callable[[], Any], world: World) -> Any:
    """Runs `action` on rank 0 alone and returns its result, a plain value, on every rank.

    A `UserError` or `OSError` there is raised as a `UserError` on every rank, so that none is left
    waiting.
    """
    outcome: list[Any] = [None, None]
    if world.is_first:
        try:
            outcome[0] = action()
        except (UserError, OSError) as error:
            outcome[1] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


def run_on_each_host(action: Callable[[], Any], world: World) -> Any:
    """Runs `action` on the first process of every host, then returns rank 0's result on every rank.

    Errors are shared as in `run_on_first`; the lowest rank's is the one that all raise. It may take
    longer than the processes wait for each other: it runs in a thread, and they meet meanwhile.
    """
    if world.size == 1:
        return run_on_first(action, world)
    result, error = None, None
    outcome: Future[Any] = Future()
    if world.local_rank == 0:
        outcome = ThreadPoolExecutor(1, "first of host").submit(action)
    else:
        outcome.set_result(None)
    done = False
    while not done:
        wait([outcome], timeout=1)
        done = all(gather(outcome.done(), world))
    try:
        result = outcome.result()
    except (UserError, OSError) as caught:
        error = str(caught)
    outcomes = gather((result, error), world)
    for _, message in outcomes:
        if message is not None:
            raise UserError(message)
    return outcomes[0][0]


def gather(value: Any, world: World) -> list[Any]:
    """Every rank's `value` (plain, picklable), in the order of ranks, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Adds up `tensor` over all ranks, in place, and returns it."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


class Agreement:
    """The highest number that any rank gives, known to all of them at the next call.

    Each call gives a number and gets what was agreed on the numbers of the call before; the
    exchange goes on in the background between two calls, so that no step waits for it. Every rank
    must call equally often. One process agrees with itself at once.
    """

    def __init__(self, world: World):
        self.world = world
        self._number = torch.zeros((), dtype=torch.int64)  # on the CPU: needs no look at a device
        self._work: dist.Work | None = None

    def __call__(self, number: int) -> int:
        if self.world.size == 1:
            return number
        agreed = self.finish()
        self._number.fill_(number)
        self._work = dist.all_reduce(self._number, dist.ReduceOp.MAX, async_op=True)
        return agreed

    def finish(self) -> int:
        """What was agreed on the numbers of the last call."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._number)


@contextlib.contextmanager
def report_unresponsive_ranks(world: World, doing: Callable[[], str]) -> Iterator[None]:
    """Turns the failure of a collective operation into a `UserError` that names the ranks that do
    not answer; `doing()` says what was being done.

    gloo and NCCL say that a connection was closed or a wait took too long, not by whom: each rank
    that notices leaves word in the store, and whoever has not is the one.
    """
    try:
        yield
    except RuntimeError as error:
        message = one_line(error)
        about_peers = re.search(r"gloo|nccl|connection|timed? ?out", message, re.IGNORECASE)
        store = world.store
        if store is None or not about_peers:
            raise
        silent = ["the process that holds the store"]

        def ask() -> None:
            with contextlib.suppress(dist.DistError, RuntimeError):  # no answer is the answer
                silent[:] = unresponsive_ranks(store, world)

        # Not waited for: behind a link that is down, a call to the store outlives its own timeout.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(6 + 0.2 * world.size)
        if not silent:
            raise
        # Without the line of gloo's source, and its advice.
        message = re.sub(r"^\[\S+\] |\. This is typically.*", "", message)
        verb = "does" if len(silent) == 1 else "do"
        raise UserError(f"{doing()}: {', '.join(silent)} {verb} not answer: {message}") from error


def unresponsive_ranks(store: dist.Store, world: World) -> list[str]:
    """Leaves word in the store that this rank has noticed a failure; returns who has not done so
    within 3 s. Raises what the store does.
    """
    silent = []
    store.set(f"noticed/{world.rank}", "")
    deadline = time.monotonic() + 3
    for rank in set(range(world.size)) - {world.rank}:
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait([f"noticed/{rank}"], timedelta(seconds=left))
        except dist.DistError:
            silent.append(f"rank {rank} ({store.get(f'who/{rank}').decode()})")
    return silent
