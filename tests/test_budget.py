"""Budget of a step on a GPU: the kernels that its forward and backward passes launch, and the bytes these
read and write, counted on fake tensors. If a figure falls, lower its budget.

Where torch is built for CPUs, fake tensors on a GPU have no gradients: these are on the CPU, and compute as on a GPU.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import as_config, compose
from engine.kernels import ops
from engine.machine import hardware
from engine.optim import set_learning_rate
from model import GPT, create_optimizer

LAUNCHES, GIGABYTES = 430, 3.05  # of experiment=shakespeare_gpu; 418 and 2.94 without n-grams
UPDATE_LAUNCHES = 267  # of clipping and the optimizer's step
# Operations that launch nothing; views apart. `zeros` makes the flash kernel's random state.
FREE = ("device", "_unsafe_view", "zeros")


class Launches(TorchDispatchMode):
    """Counts operations, views excluded, and the bytes of their inputs and results."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket.__name__ not in FREE:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            self.count += 1  # an expanded tensor is read as often as it is stored
            self.bytes += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
        return result


def test_the_norm_is_torchs_fused_one_on_a_gpu(monkeypatch):
    calls: list[tuple] = []
    with monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.ops.aten, "_fused_rms_norm", lambda *given: (calls.append(given),))
        ops.rms_norm(torch.empty(2, 8, 64, device="cuda", dtype=torch.bfloat16))
    [(_, *settings)] = calls
    x = torch.randn(2, 8, 64)
    torch.testing.assert_close(torch.ops.aten._fused_rms_norm(x, *settings)[0], ops.rms_norm(x))


class FusedRMSNorm(torch.autograd.Function):
    """Launches one kernel each way and moves as many bytes as that of CUDA."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g):
        return g * ctx.saved_tensors[0]


def flash_attention(q, k, v, dropout_p, is_causal):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def test_a_gpu_step_stays_within_its_budget_of_launches_and_bytes_without_synchronizing(monkeypatch):
    monkeypatch.setattr(ops, "rms_norm", FusedRMSNorm.apply)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash_attention)
    monkeypatch.setattr(ops, "causal_attention", ops._torch_attention)
    monkeypatch.setattr(hardware, "computes_in_bfloat16", lambda device: True)  # as on a GPU
    config: Any = as_config(compose(["experiment=shakespeare_gpu"]))
    size = config.trainer.batch_size, config.data.block_size
    with FakeTensorMode(), Launches() as launched:
        model = GPT(dataclasses.replace(config.model, vocab_size=65))
        launched.count = launched.bytes = 0
        ids = torch.zeros(size, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, ids)[1]
        loss.backward()
        assert launched.count <= LAUNCHES
        assert launched.bytes <= GIGABYTES * 1e9
        # Reading a number from the GPU, which no CUDA graph can capture, raises an error on fake tensors.
        optimizer = create_optimizer(model, config.optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
            group["lr"] = torch.empty(())  # unlike a number made a tensor, unknown
        set_learning_rate(optimizer, 0.5)
        launched.count = 0
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.grad_norm_clip)
        optimizer.step()
        assert launched.count <= UPDATE_LAUNCHES
