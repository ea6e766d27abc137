"""Process group: rank, device, collectives.

A group that the program has created already is used, and left as it was. Otherwise RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE decide whether there is one: torchrun and Accelerate set them, `slurm.export_torchrun_env` under srun.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError, one_line
from engine.machine import hardware
from engine.parallel import accelerate
from engine.parallel.rendezvous import choose_interface, rendezvous
from engine.signals import Stopped

log = logging.getLogger("gpt")
T = TypeVar("T")
_joined_in: int | None = None  # the id of the process that has called `init`
_alone = ContextVar("alone", default=False)
_device = torch.device("cpu")
_local_rank, _local_size = 0, 1
_store: dist.Store | None = None  # of the group created here; connects the ranks when a collective has failed
_gloo: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}  # beside the default group of another program


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which this thread counts as the only process: what it calls exchanges nothing with the others."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def size() -> int:
    """The number of processes: of the process group or, before there is one, those that a launcher started, or 1."""
    if _alone.get():
        return 1
    return dist.get_world_size() if dist.is_initialized() else launched("WORLD_SIZE", 1)


def rank() -> int:
    """The rank of this process: in the process group or, before there is one, as a launcher gave it, or 0."""
    if _alone.get():
        return 0
    return dist.get_rank() if dist.is_initialized() else launched("RANK", 0)


def launched(name: str, default: int) -> int:
    """A launcher's variable; `default` without one, or for one that `check_launcher` refuses."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def check_launcher() -> None:
    """Raises `UserError` for a launcher's variable that is no integer or too small, or a RANK too large."""
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        value = os.environ.get(name, str(least))
        if not value.isdecimal() or int(value) < least:
            raise UserError(f"{name}={value}: must be an integer, at least {least}; it is a launcher's variable")
    if rank() >= size():
        raise UserError(f"RANK={rank()}: must be below WORLD_SIZE, {size()}: unset RANK, or set both")


def is_rank_0() -> bool:
    """Whether this is rank 0, the one process that writes and prints."""
    return rank() == 0


def device() -> torch.device:
    """The device of this process."""
    return _device


def is_restart() -> bool:
    """Whether torchrun has restarted the processes of any host, or SLURM their job."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(all_gather(any(os.environ.get(name, "0") != "0" for name in counts)))


def init(wanted: str = "auto", threads: int | None = None, timeout_s: float = 600) -> None:
    """Chooses the device, and joins the process group if there are several processes: gloo for CPUs, NCCL for GPUs, or
    the group that the program has created. On a CPU, also sets torch's threads and malloc. Raises `UserError`.

    `wanted` is the device: auto, cpu, cuda, or another device of torch (mps, xpu); `threads` is the number per process
    on a CPU, None for the host's cores divided by its processes, or `OMP_NUM_THREADS` for one process alone;
    `timeout_s` bounds every wait for another process.
    """
    global _joined_in, _device, _local_rank, _local_size
    if _joined_in not in (None, os.getpid()):  # OpenMP's threads are gone: it would hang
        raise UserError(
            "this process was forked after torch had started its threads: restart the session, and start the "
            "processes first"
        )
    is_first, _joined_in = _joined_in is None, os.getpid()
    check_launcher()
    timeout = timedelta(seconds=timeout_s)
    _local_rank, _local_size = launched("LOCAL_RANK", rank()), launched("LOCAL_WORLD_SIZE", size())
    if dist.is_initialized() and _store is None:
        adopt_group(timeout)
        _device = device_of_group(wanted)
    else:
        _device = choose_device(wanted)
    prepare_device(threads)
    if is_first and size() == 1 and _device.type == "cpu" and accelerate.is_launcher():
        log.info("accelerate  one process on the CPU; for two: torchrun --standalone --nproc_per_node=2 main.py")
    if size() > 1 and not dist.is_initialized():
        connect(timeout)


def prepare_device(threads: int | None) -> None:
    """Makes the GPU current, or sets torch's threads on the CPU; divides the host's cores among its processes."""
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    share = max(1, cores // _local_size)
    if on_linux and _local_size > 1:  # or torch.compile starts 32 workers in each process
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, share)))
    if _device.type == "cuda":
        try:  # a driver older than this build of torch lists GPUs that cannot be used
            torch.cuda.set_device(_device)
        except RuntimeError as error:
            raise UserError(
                f"{_device}: torch cannot use it (trainer.device=cpu trains without): {one_line(error)[:400]}"
            ) from error
        return
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    is_default = omp_threads == "1" and accelerate.is_launcher()
    if _local_size == 1 and omp_threads.isdigit() and not is_default:  # torchrun sets it to 1 for several processes
        share = max(1, int(omp_threads))
    torch.set_num_threads(threads or share)
    hardware.keep_freed_memory()


def connect(timeout: timedelta) -> None:
    """Creates the default process group of the processes that a launcher started. Raises `UserError`."""
    global _store
    gpu = _device if _device.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    number, count = rank(), size()
    try:
        store = rendezvous(number, count, timeout)
        if count > _local_size:
            choose_interface(store, number, count)
        store.set(f"process/{number}", f"process {os.getpid()} on {socket.gethostname()}")
        dist.init_process_group(backend, timeout=timeout, store=store, rank=number, world_size=count, device_id=gpu)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the {count} processes could not be connected (trainer.timeout_s={timeout.total_seconds():g}): "
            f"{one_line(error)[-300:]}"
        ) from error
    _store = store
    atexit.register(wait_for_gloo)


def adopt_group(timeout: timedelta) -> None:
    """Creates a group of gloo beside the default group of another program, which may have NCCL alone, and counts the
    processes of each host if no launcher did.
    """
    global _local_rank, _local_size
    if gloo() is None:
        _gloo[dist.group.WORLD] = dist.new_group(backend="gloo", timeout=timeout)
        atexit.register(wait_for_gloo)
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        hosts = all_gather(socket.gethostname())
        _local_rank, _local_size = hosts[: rank()].count(hosts[rank()]), hosts.count(hosts[rank()])


def gloo() -> dist.ProcessGroup | None:
    """The group for objects and tensors of the CPU; None: the default group."""
    return _gloo.get(dist.group.WORLD)


def wait_for_gloo() -> None:
    """Ends the group of `adopt_group`, and waits: a gloo thread that releases tensors during Python's shutdown aborts
    the process (torch 2.13.0). Programs that end with `leave` do not need it.
    """
    if (group := gloo()) is not None:
        dist.destroy_process_group(group)  # joins its threads
    _gloo.clear()
    time.sleep(0.2)


def device_of_group(wanted: str) -> torch.device:
    """The device for the process group of another program: with NCCL the current GPU or, if the program has chosen
    none, that of its local rank; with gloo alone the CPU, unless `wanted` is cuda. Raises `UserError`.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if wanted == "auto" and backends.get("cuda", "gloo") == "gloo":
        wanted = "cpu"
    chosen = choose_device(wanted)
    if chosen.type not in backends:
        raise UserError(
            f"trainer.device={wanted}: the process group that this program created is for {', '.join(backends)}; "
            f"create it for {chosen.type}, too"
        )
    if chosen.type == "cuda" and torch.cuda.current_device():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def choose_device(wanted: str) -> torch.device:
    """The device of one of a host's processes: a GPU each, the CPU, or, for one process alone, another
    accelerator. Raises `UserError`.
    """
    hardware.check_device("trainer.device", wanted)
    if wanted not in ("auto", "cpu", "cuda"):
        if size() > 1:
            raise UserError(f"trainer.device={wanted}: one process only, not {size()}")
        return torch.device(wanted, 0)
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    # srun may show each task its own GPU alone, as number 0.
    if gpus == 1 and os.environ.keys() & {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"}:
        return torch.device("cuda", 0)
    if _local_size > gpus:
        raise UserError(
            f"{_local_size} processes on a machine with {gpus} GPU{'s' * (gpus > 1)}: start "
            f"--nproc_per_node={gpus} (srun --ntasks-per-node={gpus}), or set trainer.device=cpu"
        )
    return torch.device("cuda", _local_rank)


def leave(status: int) -> NoReturn:
    """Ends the process with exit status `status`. Destroys the process group if `status` is 0, and skips the
    interpreter's shutdown, where gloo's threads may abort the process (torch 2.13.0).
    """
    if not dist.is_initialized():
        atexit._run_exitfuncs()
    elif status == 0:  # after a failure the others may be gone
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed terminal or pipe
            stream.flush()
    os._exit(status)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, whose parameter names a snapshot holds."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def seed_step(seed: int, step: int) -> None:
    """Seeds everything random in one step of one rank, so that no generator needs saving. Each
    rank has its own seed; randomness that all must share needs a generator of its own.
    """
    digest = hashlib.blake2b(f"{seed} {step} {rank()}".encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(own)  # torch.manual_seed takes a stack trace at each call
    if device().type != "cpu":
        torch.get_device_module(device()).manual_seed(own)


def all_gather(value: T) -> list[T]:
    """Every rank's `value` (plain, picklable), in the order of ranks, on every rank."""
    if not dist.is_initialized() or _alone.get():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=gloo())
    return values


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's `tensor`, in the memory of the CPU, on every rank; the others give one of the same shape and type, which
    may be on the meta device.
    """
    if size() == 1:
        return tensor
    own = tensor.contiguous() if is_rank_0() else torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.broadcast(own.view(-1).view(torch.uint8), src=0, group=gloo())  # as bytes: gloo does not know every type
    return own


def check_replicas(model: nn.Module, step: int) -> None:
    """Checksum: warns if the weights of a rank differ from those of rank 0, which are saved. DDP synchronizes
    gradients alone. Waits for the device.
    """
    if size() == 1:
        return
    # As integers, whose sum is exact in any order.
    sums = [p.detach().float().view(torch.int32).sum() for p in model.parameters()]
    checksums = all_gather(int(torch.stack(sums).sum()))
    if others := [str(rank) for rank, own in enumerate(checksums) if own != checksums[0]]:
        log.warning(
            "step %d: the weights of rank %s differ from those of rank 0 (a hardware fault, or other devices or "
            "numbers of threads); resume from a snapshot to make them equal",
            step, ", ".join(others),
        )  # fmt: skip


def run_on_rank_0(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 alone; returns its result, which is pickled, on every rank. A `UserError` or `OSError`
    there is raised as a `UserError` on every rank; another error on rank 0 as it is, and on the others as a `UserError`
    that names it. It may take longer than the ranks' timeout: they poll whether it is done.
    """
    return _run(action, is_rank_0())


def run_on_each_host(action: Callable[[], T]) -> T:
    """Runs `action` on the first process of every host; returns rank 0's result, and raises as `run_on_rank_0`."""
    return _run(action, _local_rank == 0)


def _run(action: Callable[[], T], is_mine: bool) -> T:
    if size() == 1:
        try:
            return action()
        except OSError as error:
            raise UserError(str(error)) from error
    attempt = ThreadPoolExecutor(1).submit(action if is_mine else lambda: None)
    while not all(all_gather(attempt.done())):
        wait([attempt], timeout=1)
    failed = attempt.exception()
    cause = None
    if isinstance(failed, UserError | OSError):
        failed, cause = None, str(failed)
    elif failed:
        cause = f"rank {rank()}: {type(failed).__name__}: {one_line(failed)}"
    causes = [cause for cause in all_gather(cause) if cause is not None]
    if failed:  # with its traceback
        raise failed
    if causes:
        raise UserError(causes[0])
    result: list[Any] = [attempt.result()]
    dist.broadcast_object_list(result, src=0, group=gloo(), device=torch.device("cpu"))
    return result[0]


@contextlib.contextmanager
def name_failed_ranks(when: Callable[[], str]) -> Iterator[None]:
    """Turns a failed collective into a `UserError` that names the ranks which caused it: their errors or, of those that
    have not noticed the failure, process and host. `when()` is part of the message: "after step 5". What all ranks
    raise, `Stopped` and `UserError`, is not told to the others.
    """
    try:
        if _store:
            _store.delete_key(f"noticed/{rank()}")  # of an earlier run of this process
        yield
    except (Stopped, UserError):
        raise
    except Exception as error:
        # Without the position in gloo's source, and its advice.
        message = re.sub(r"^\[\S+\] |\. This is typically.*", "", one_line(error))[:300]
        lost = re.search("gloo|nccl|connection (closed|reset|refused)|timed? ?out", message, re.IGNORECASE)
        own = "" if isinstance(error, RuntimeError) and lost else f"{type(error).__name__}: {message}"
        if _store and (failed := failed_ranks(_store, own)):
            raise UserError(f"{when()}: {message}: {failed}") from error
        raise


def failed_ranks(store: dist.Store, own: str) -> str:
    """Tells the others the `own` error of this rank. Without one, after a failed collective, returns theirs, or names
    the ranks that have not noticed the failure within 3 s: gloo's "Timed out waiting 5000ms for recv operation to
    complete" does not. A rank that notices sets a key in the store.
    """

    def ask() -> str:
        store.set(f"noticed/{rank()}", own)
        ranks, deadline = range(size()), time.monotonic() + 3
        while not own:
            time.sleep(0.1)
            noticed = {r: store.get(f"noticed/{r}").decode() for r in ranks if store.check([f"noticed/{r}"])}
            if causes := [f"rank {r} failed: {cause}" for r, cause in noticed.items() if cause]:
                return ", ".join(causes)
            silent = [r for r in ranks if r not in noticed]
            if not silent or time.monotonic() > deadline:
                names = [f"rank {r} ({store.get(f'process/{r}').decode()})" for r in silent]
                return f"no answer from {', '.join(names)} within 3 s" * bool(silent)
        return ""

    try:  # in a thread: behind a broken link, a call to the store outlives its own timeout
        return ThreadPoolExecutor(1).submit(ask).result(timeout=6)
    except (RuntimeError, TimeoutError):
        return "" if own else "no answer from the process that holds the store"
