"""FSDP2 (Zhao et al., "PyTorch FSDP", 2023): each rank keeps a shard of every parameter, gradient and optimizer state.

A sharded parameter is a `DTensor` (torch.distributed.tensor), sharded along dimension 0. `full_tensor` and `shard_like`
convert it to the plain tensor that a snapshot holds and back.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError
from engine.machine import hardware
from engine.parallel import distributed

# torch.distributed.fsdp and .tensor take most of a second to import: only sharded runs do.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def build(make: Callable[[], nn.Module], strategy: str, dtype: torch.dtype) -> nn.Module:
    """The model that `make()` makes, on this rank's device, wrapped in DDP or sharded with FSDP2 as
    `strategy` (ddp or fsdp) says; a single process wraps nothing.

    For FSDP2 it is constructed on the meta device and sharded; then `init_weights()` draws the same weights, one
    parameter at a time, so that no rank ever holds all of them.
    """
    if strategy == "ddp" or distributed.size() == 1:
        return wrap(make(), strategy)
    with torch.device("meta"):
        model = make()
    shard(model, dtype)
    model.to_empty(device=distributed.device())
    cast(Callable[[], None], model.init_weights)()  # nn.Module has none
    return model


def wrap(model: nn.Module, strategy: str) -> nn.Module:
    """Returns a bare `model` on this rank's device, in DDP with several ranks; a wrapped or sharded one unchanged.
    Raises `UserError` for a bare one under fsdp: its optimizer would hold the full parameters.
    """
    if distributed.unwrap(model) is not model or is_sharded(model):
        return model
    if strategy == "fsdp" and distributed.size() > 1:
        raise UserError(
            "trainer.strategy=fsdp: shard the model (sharding.build), then create its optimizer, before the Trainer"
        )
    model.to(distributed.device())
    if distributed.size() == 1:
        return model
    device_ids = [distributed.device().index] if distributed.device().type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # Buffers never change. The argument is deprecated since torch 2.13.
    wrapped.broadcast_buffers = False
    return wrapped


def shard(model: nn.Module, dtype: torch.dtype) -> None:
    """Shards the parameters of `model` in place. Each member of a `ModuleList`, a block, is gathered
    on its own, and the remaining parameters together, as in pytorch/torchtitan. They are gathered and
    used in `dtype`; gradients are averaged in float32.
    """
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    # gloo has no all-to-all, and torch warns that it gathers instead.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    mesh = init_device_mesh(distributed.device().type, (distributed.size(),))
    policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for module in lists for block in module]
    # Also reshard the root: by default, it stays gathered after the forward pass.
    for module in (*blocks, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if distributed.device().type == "cpu":  # or the heap would grow to more than a full model
        hardware.keep_freed_memory(False)


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of a model are sharded."""
    return any(map(is_dtensor, model.parameters()))


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether a tensor is sharded."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one, on every rank; all ranks must call it. Plain ones unchanged."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full `tensor`, cut as `like` is, on its device; all of it if `like` is plain. Unchanged if
    `like` has another shape (an optimizer's step count), or if `tensor` is a shard already.
    """
    if is_dtensor(tensor) or tensor.shape != like.shape:
        return tensor
    if not is_dtensor(like):
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    # Without communication. Copied, as a slice on the CPU would keep all of `tensor` in memory.
    placed = (like.device_mesh, like.placements)
    return distribute_tensor(tensor, *placed, src_data_rank=None).clone()


def map_matrices(function: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """`function` of a batch of matrices (N, R, C). If they are sharded along R, every rank computes
    N / ranks full ones.
    """
    if not is_dtensor(batch):
        return function(batch)
    from torch.distributed.tensor import Shard

    by_matrix = batch.redistribute(placements=[Shard(0)])
    by_matrix.to_local().copy_(function(by_matrix.to_local()))
    return by_matrix.redistribute(placements=batch.placements)
