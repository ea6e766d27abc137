"""FSDP2: each process keeps its share of every parameter, gradient and optimizer state.

    model = build(lambda: GPT(config), world, "fsdp", torch.bfloat16)

A sharded parameter is a `DTensor` (torch.distributed.tensor), cut along its first dimension.
`full_tensor` and `shard_like` lead from it to the plain tensor that a snapshot holds and back, so that
snapshots know nothing of how a run was sharded. The engine is torch's `fully_shard` (Zhao et
al., "PyTorch FSDP", 2023); blocks are gathered one at a time, as in pytorch/torchtitan.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn as nn

from engine.machine import hardware
from engine.parallel import distributed
from engine.parallel.distributed import World

# torch.distributed.fsdp and .tensor take most of a second to import: only those who share pay.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def build(
    make: Callable[[], nn.Module], world: World, strategy: str, dtype: torch.dtype, offload: bool
) -> nn.Module:
    """The model that `make()` makes, wrapped as `strategy` (ddp or fsdp) says, on this process's
    device.

    With fsdp it is made without memory, sharded, and only then given its fresh weights by
    `init_weights()`, one parameter after the other: no process ever holds all of it. They are the
    weights that `make()` alone would have drawn. One process has nobody to share with, and wraps
    nothing.
    """
    if strategy == "ddp" or world.size == 1:
        return distributed.wrap(make(), world)
    with torch.device("meta"):
        model: Any = make()  # no type has `init_weights` of any model
    shard(model, world, dtype, offload)
    model.to_empty(device="cpu" if offload else world.device)
    model.init_weights()
    return model


def shard(model: nn.Module, world: World, dtype: torch.dtype, offload: bool = False) -> None:
    """Shards the parameters of `model` in place: each member of a `ModuleList`, a block, is
    gathered for itself, and the rest together.

    Parameters are float32; they are gathered, and computed with, in `dtype`, and gradients are
    averaged in float32. `offload` keeps parameters, gradients and optimizer state in the host's
    memory, where the optimizer then steps.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    # gloo exchanges by gathering, and would warn of it: nothing that a user could do better.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
        ),
    }
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, **settings)
    # The rest would stay gathered after a forward pass, and parameters would not be what they were.
    fully_shard(model, **settings, reshard_after_forward=True)
    if world.device.type == "cpu" or offload:  # or the heap would grow to more than a whole model
        hardware.return_freed_memory()


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of a model are sharded."""
    return any(map(is_dtensor, model.parameters()))


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether a tensor is sharded."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together, on every rank; all must call it. A plain one as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def gather_on_first(state: dict[str, Any], world: World) -> dict[str, Any]:
    """A dictionary of tensors (or of such dictionaries) on rank 0, the sharded ones put together
    in the host's memory, one after the other; all ranks must call it. What the others get is not
    to be used.
    """
    result: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            result[name] = gather_on_first(value, world)
        elif is_dtensor(value):
            full = value.full_tensor()
            result[name] = full.cpu() if world.is_first else None
        else:
            result[name] = value
    return result


def copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a dictionary of tensors (or of such dictionaries) in the host's memory, of what is
    sharded only this process's share.
    """
    return {
        name: copy_to_host(value) if isinstance(value, dict) else value.to("cpu", copy=True)
        for name, value in state.items()
    }


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's share of a plain `tensor`, cut as `like` is; `tensor` where `like` is plain,
    or of another shape (an optimizer's count of steps), or it is a share already.
    """
    if is_dtensor(tensor) or not is_dtensor(like) or tensor.shape != like.shape:
        return tensor
    # Every rank cuts its share from what it holds itself: nobody sends anything, and no device
    # gets more than its share, which distribute_tensor, on a GPU's mesh, would not keep on a CPU.
    result = torch.empty_like(like, dtype=tensor.dtype)
    assert is_dtensor(result)  # as `like` is
    local, mesh = result.to_local(), like.device_mesh
    first = -(-len(tensor) // mesh.size()) * mesh.get_local_rank()
    local.copy_(tensor[first : first + len(local)])
    return result


def map_matrices(
    function: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor
) -> torch.Tensor:
    """`function` of a batch of matrices (N, R, C), which may be sharded along R.

    They are then distributed whole, N / processes to each, so that the work is shared, too.
    """
    if not is_dtensor(batch):
        return function(batch)
    from torch.distributed.tensor import Shard

    dealt = batch.redistribute(placements=[Shard(0)])
    # In place: DTensor.from_local would bring a share in the host's memory to the mesh's GPU.
    dealt.to_local().copy_(function(dealt.to_local()))
    return dealt.redistribute(placements=batch.placements)
