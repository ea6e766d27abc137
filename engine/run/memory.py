"""Memory: the largest micro-batch that fits on a GPU; exhausted memory as a one-line error."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn as nn

from engine.errors import UserError, one_line
from engine.machine import hardware
from engine.parallel import distributed, sharding
from engine.run.dataset import Windows
from engine.run.plan import Plan

log = logging.getLogger("gpt")
RAISES_OUT_OF_MEMORY = {"cuda"}  # on a CPU the operating system may kill the process instead
CHARACTERS = 2**16  # of a micro-batch where memory is not measured; a request to stop waits for one
HEADROOM = 0.05  # share of a GPU's memory left free for fragmentation, evaluation and libraries


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]  # of a model and a micro-batch (x, y)


def fit_micro_batch(plan: Plan, model: nn.Module, dataset: Windows, loss_of: Loss) -> Plan:
    """The plan with its micro-batch halved until a forward and backward pass of the unwrapped `model` fits into the
    memory of every rank. Raises `UserError` if one window is too many.

    Devices that raise no OutOfMemoryError have at most `CHARACTERS` in one. For sharded models on others nothing is
    tried: a rank that failed would leave the others waiting.
    """
    device = distributed.device()
    if device.type not in RAISES_OUT_OF_MEMORY:
        most = max(1, CHARACTERS // plan.block_size)
        return plan if plan.micro_batch_size <= most else plan.with_micro_batch(most)
    if sharding.is_sharded(model):
        return plan
    hardware.free_unused(device)  # an earlier Trainer of this process
    while True:
        fits = _fits(plan, model, dataset, loss_of)
        hardware.free_unused(device)  # libraries need memory outside torch's
        if all(distributed.all_gather(fits)):
            return plan
        log.info("memory      a micro-batch of %d windows does not fit on the GPU", plan.micro_batch_size)
        if plan.micro_batch_size == 1:
            raise UserError(f"out of memory: {advice(plan)}")
        plan = plan.with_micro_batch(plan.micro_batch_size // 2)


def _fits(plan: Plan, model: nn.Module, dataset: Windows, loss_of: Loss) -> bool:
    """Whether a micro-batch of `plan` fits into memory, with the optimizer's two moment estimates per parameter, the
    gradients of earlier micro-batches and some headroom.
    """
    device = distributed.device()
    copies = 3 if plan.accumulation > 1 else 2
    needed = sum(copies * 4 * parameter.numel() for parameter in model.parameters())
    if device.type == "cuda":
        needed += int(HEADROOM * torch.cuda.get_device_properties(device).total_memory)
    try:
        reserved = torch.empty(needed, dtype=torch.uint8, device=device)
        x, y = dataset.batch(np.zeros(plan.micro_batch_size, np.int64))
        loss_of(model, x.to(device), y.to(device)).backward()
        del reserved
    except RuntimeError as error:
        if not hardware.is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


@contextlib.contextmanager
def report_exhausted(plan: Plan | None = None) -> Iterator[None]:
    """Turns an out-of-memory error in the block, on a GPU or a CPU, into a `UserError`. With the `plan` of a run in
    progress, it names a micro-batch that needs half the memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise UserError(f"out of memory ({one_line(error)[:200]}): {advice(plan)}") from error


def advice(plan: Plan | None) -> str:
    """What needs less memory."""
    if plan is None:
        return "reduce model.n_layer, model.n_embd, trainer.micro_batch_size or, for a large text, data.truncate"
    windows = plan.micro_batch_size
    if windows == 1:
        return (
            f"one window of data.block_size={plan.block_size} does not fit: set a smaller one, a smaller model, or "
            "model.activation_checkpointing=true"
        )
    smaller = plan.with_micro_batch(windows // 2).micro_batch_size
    return (
        f"with {windows} windows at once; the same command with trainer.micro_batch_size={smaller} resumes from the "
        "newest snapshot"
    )
