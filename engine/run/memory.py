"""Memory: the largest micro-batch that fits on a GPU; a failed step repeated with half of it; a CPU estimate."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from engine.config import auto
from engine.errors import UserError, one_line
from engine.kernels import execution
from engine.machine import hardware
from engine.parallel import distributed, sharding
from engine.parallel.distributed import World
from engine.run.plan import Plan

log = logging.getLogger("gpt")
RAISES_OUT_OF_MEMORY = {"cuda"}  # on a CPU the operating system may kill the process instead
# Share of a GPU's memory left free for fragmentation, evaluation and libraries.
HEADROOM = 0.05


def fit_micro_batch(
    plan: Plan, known: int | None, model: nn.Module, dataset: Any, choices: dict[str, Any], world: World
) -> Plan:
    """Finds a micro-batch that fits: halves that of `plan`, or the `known` one that an earlier start found, until a
    forward and backward pass of `model` fits into the memory of every rank. Returns the plan with it, and records it
    in `choices`. Raises `UserError` if one window is too many.

    Tries nothing on devices that raise no OutOfMemoryError, nor for sharded models: a rank that failed would leave the
    others waiting.
    """
    if known is not None:
        plan, choices["micro_batch_size"] = plan.with_micro_batch(known), known
    if world.device.type not in RAISES_OUT_OF_MEMORY or sharding.is_sharded(model):
        return plan
    hardware.free_unused(world.device)  # an earlier Trainer of this process
    while True:
        windows = plan.micro_batch_size
        fits = _fits(plan, model, dataset, choices, world.device)
        hardware.free_unused(world.device)  # libraries need memory outside torch's
        if all(distributed.all_gather(fits, world)):
            choices["micro_batch_size"] = windows
            return plan
        log.info("memory      a micro-batch of %d windows does not fit on the GPU", windows)
        if windows == 1:
            raise UserError(too_large_message(plan))
        plan = plan.with_micro_batch(windows // 2)


def _fits(plan: Plan, model: nn.Module, dataset: Any, choices: dict[str, Any], device: torch.device) -> bool:
    """Whether a micro-batch of `plan` fits into memory, with the optimizer's two moment estimates per parameter, the
    gradients of earlier micro-batches and some headroom.
    """
    copies = 3 if plan.accumulation > 1 else 2
    needed = sum(copies * 4 * parameter.numel() for parameter in model.parameters())
    if device.type == "cuda":
        needed += int(HEADROOM * torch.cuda.get_device_properties(device).total_memory)
    try:
        reserved = torch.empty(needed, dtype=torch.uint8, device=device)
        x, y = dataset.batch(np.zeros(plan.micro_batch_size, np.int64))
        with execution.eagerly(choices), execution.autocast(choices):
            loss = model(x.to(device), y.to(device))[1]
        loss.backward()
        del reserved
    except RuntimeError as error:
        if not hardware.is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


def too_large_message(plan: Plan) -> str:
    return (
        f"a window of data.block_size={plan.block_size} does not fit in memory: set a smaller one, a "
        "smaller model, or model.activation_checkpointing=true"
    )


def halved(plan: Plan, step: int, may_repeat: bool, error: Exception) -> Plan:
    """The plan with half the micro-batch, after `step` ran out of memory. Raises `UserError` for a single window, or if
    the step may not be repeated (`may_repeat`): with several ranks, or once the optimizer has changed a weight.
    """
    windows = plan.micro_batch_size
    if windows == 1:
        raise UserError(f"step {step}: out of memory: {too_large_message(plan)}") from error
    smaller = plan.with_micro_batch(windows // 2)
    what = f"step {step}: out of memory with {windows} windows at once"
    if not may_repeat:
        setting = f"trainer.micro_batch_size={smaller.micro_batch_size}"
        raise UserError(f"{what}; the same command with {setting} resumes from the newest snapshot") from error
    log.warning("%s; retrying with %d", what, smaller.micro_batch_size)
    return smaller


@contextlib.contextmanager
def report_exhausted() -> Iterator[None]:
    """Turns an out-of-memory error in the block, on a GPU or a CPU, into a `UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory ({one_line(error)[:200]}): reduce model.n_layer, model.n_embd, "
            "trainer.micro_batch_size or, for a large text, data.truncate"
        ) from error


def count_block_weights(model: Any) -> int:
    """The number of weights in the matrices of the blocks of a `GPTConfig`."""
    return 12 * model.n_layer * model.n_embd**2


def count_weights(model: Any) -> int:
    """The number of weights of a `GPTConfig`, without those of norms, biases and positions."""
    rows = 2 * (model.vocab_size + model.ngram_rows)
    return count_block_weights(model) + rows * model.n_embd


def warn_if_short(model: Any, trainer: Any, world: World) -> bool:
    """CPU memory estimate: warns if training `model` (`GPTConfig`) with `trainer` (`TrainerConfig`) may need more
    than this host has free: the system would kill it. Returns whether it warned.
    """
    share = -(-trainer.batch_size // world.size)
    characters = min(trainer.micro_batch_size or share, share) * model.block_size
    weight_bytes = 16 * count_weights(model)  # with gradients and moment estimates
    saved = 24 * count_weights(model)  # on rank 0: two copies of weights and moment estimates
    # Activations of all blocks, or of one, and the logits. Fused attention, without dropout, keeps no weights.
    blocks = 1 + model.n_layer / 8 if model.activation_checkpointing else model.n_layer
    is_half = auto.resolve_amp_dtype(trainer, world.device, {}) != "float32"
    attention = 3.5 * model.n_head * model.block_size if model.attn_pdrop else 0
    kept = (2 if is_half else 4) * (25 * model.n_embd + attention)  # bytes per character and block
    per_process = weight_bytes + characters * (blocks * kept + 12 * model.vocab_size)
    needed, free = world.local_size * per_process + saved, hardware.free_memory()
    if world.device.type != "cpu" or free is None or needed <= free:
        return False
    windows = characters // model.block_size
    tables = ", model.ngram_rows" * (model.ngram_rows > 0)
    advice = f"a smaller model (model.n_layer, model.n_embd{tables})"
    if world.local_size * weight_bytes + saved < free and windows > 1:
        advice = f"trainer.micro_batch_size={windows // 2} or less, or {advice}"
    log.warning(
        "training needs about %s GB of memory, but only %s GB are free: set %s",
        f"{needed / 1e9:,.1f}", f"{free / 1e9:,.1f}", advice,
    )  # fmt: skip
    return True
