"""C kernels as PyTorch operations, with gradients, for `engine.kernels.ops`, which checks that they
apply: they read raw memory and check neither type nor shape.
"""

import ctypes
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.jit import is_tracing

from engine.kernels.build import library

WIDTH = 16  # row lengths are a multiple of this, except for `cross_entropy`
NORM_EPS, LAYER_NORM_EPS = 1e-6, 1e-5  # as in kernels.c

Rotation = tuple[Tensor, Tensor] | None  # cosines and sines (T, D / 2)


def supports(x: Tensor, multiple: int = WIDTH) -> bool:
    """Whether kernels can read x (..., C); False in torch.compile and tracing."""
    return (
        holds_memory(x)
        and x.size(-1) % multiple == 0
        and not is_compiling()
        and not is_tracing()
        and library(x.dtype) is not None
    )


def holds_memory(x: Tensor) -> bool:
    """Whether x is a CPU tensor, not a subclass without storage (FakeTensor, DTensor)."""
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu


def _call(dtype: torch.dtype, name: str, *arguments: Tensor | int | None) -> None:
    """Calls the kernel `name` for `dtype` with the number of threads and, in the order of its C function, the sizes and
    the addresses of tensors, which must be contiguous.
    """
    addresses = [a if a is None or isinstance(a, int) else a.data_ptr() for a in arguments]
    failed = _kernel(dtype, name, 1 + len(arguments))(torch.get_num_threads(), *addresses)
    if failed == 2:
        raise IndexError(f"{name}: a target is neither -1 nor in the vocabulary")
    if failed:
        raise MemoryError(f"{name}: no memory for its workspace")


@functools.cache
def _kernel(dtype: torch.dtype, name: str, arguments: int) -> Any:
    """The kernel for `dtype`. All arguments, `long` or address, have the size of a pointer."""
    kernel = getattr(library(dtype), name)
    kernel.argtypes = [ctypes.c_void_p] * arguments
    return kernel


# Stands in for `ctx` where no backward pass follows: what is stored in it is never read.
NO_CONTEXT = SimpleNamespace(save_for_backward=lambda *_: None, set_materialize_grads=lambda _: None)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`; without gradients, `forward` alone, which makes `generate` a fifth faster."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(NO_CONTEXT, *arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, n_head, cosine, sine):
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        qkv, out = qkv.contiguous(), qkv.new_empty(B, T, C)
        statistics = qkv.new_empty(2, B, n_head, T, dtype=torch.float32)
        sizes = B, T, n_head, C // n_head
        _call(qkv.dtype, "attention", *sizes, qkv, cosine, sine, out, *statistics)
        ctx.save_for_backward(qkv, cosine, sine, out, statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        qkv, cosine, sine, out, statistics = ctx.saved_tensors
        _, B, n_head, T = statistics.shape
        sizes, grad = (B, T, n_head, out.size(2) // n_head), torch.empty_like(qkv)
        saved = (qkv, cosine, sine, out, *statistics)
        _call(qkv.dtype, "attention_backward", *sizes, *saved, g.contiguous(), grad)
        return grad, None, None, None


class _Linear(torch.autograd.Function):
    """The result of a row does not depend on the other rows. In bfloat16, gradients of weight and bias
    are accumulated and returned in float32; in float32 there is no backward pass.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        columns, C = weight.shape
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], columns)
        _call(x.dtype, "linear", x.numel() // C, columns, C, x, weight, bias, y)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        columns, C = weight.shape
        grads = torch.empty_like(x), torch.empty_like(weight), weight.new_empty(columns)
        saved = (g.contiguous(), x, weight)
        _call(x.dtype, "linear_backward", x.numel() // C, columns, C, *saved, *grads)
        return *grads[:2], grads[2] if ctx.needs_input_grad[2] else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x, rows = x.contiguous(), x.numel() // x.size(-1)
        y = torch.empty_like(x)
        r = None if ctx is NO_CONTEXT else x.new_empty(rows, dtype=torch.float32)
        _call(x.dtype, "rms_norm", rows, x.size(-1), x, y, r)
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        y, r = ctx.saved_tensors
        grad = torch.empty_like(y)
        _call(y.dtype, "rms_norm_backward", r.numel(), y.size(-1), g.contiguous(), y, r, grad)
        return grad


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        x, rows = x.contiguous(), x.numel() // x.size(-1)
        y, statistics = torch.empty_like(x), x.new_empty(2, rows, dtype=torch.float32)
        _call(x.dtype, "layer_norm", rows, x.size(-1), x, weight, bias, y, *statistics)
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight, statistics = ctx.saved_tensors
        rows, C, grad = statistics.size(1), x.size(-1), torch.empty_like(x)
        parts, sums = weight.new_empty(-(-rows // 64), 2, C), weight.new_empty(2, C)
        g = g.contiguous()
        _call(x.dtype, "layer_norm_backward", rows, C, g, x, weight, *statistics, grad, parts, sums)
        return grad, sums[0], sums[1] if ctx.needs_input_grad[2] else None


class _TokenShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        _call(x.dtype, "token_shift", *x.shape, x, weight, y)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        B, T, C = x.shape
        grad, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        parts, saved = weight.new_empty(-(-B * T // 64), C), (g.contiguous(), x, weight)
        _call(x.dtype, "token_shift_backward", B, T, C, *saved, grad, parts, grad_weight)
        return grad, grad_weight


class _Elementwise(torch.autograd.Function):
    """An elementwise kernel; its backward pass needs the input."""

    @staticmethod
    def forward(ctx, name, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        _call(x.dtype, name, x.numel(), x, y)
        ctx.save_for_backward(x)
        ctx.name = name
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        grad = torch.empty_like(x)
        _call(x.dtype, f"{ctx.name}_backward", x.numel(), x, g.contiguous(), grad)
        return None, grad


class _Dropout(torch.autograd.Function):
    """Dropout by a hash of `seed` and position; `dropped` is the probability times 2^24."""

    @staticmethod
    def forward(ctx, x, dropped, seed):
        ctx.drawn = dropped, seed
        x = x.contiguous()
        y = torch.empty_like(x)
        _call(x.dtype, "dropout", x.numel(), dropped, seed, x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return _Dropout.forward(NO_CONTEXT, g, *ctx.drawn), None, None  # the gradient has the same mask


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, targets, softcap):
        x, targets = x.contiguous(), targets.contiguous()
        rows, V = targets.numel(), x.size(-1)
        y = x.new_empty(x.shape, dtype=torch.float32)
        statistics = x.new_empty(3, rows, dtype=torch.float32)
        total = x.new_empty((), dtype=torch.float32)
        _call(x.dtype, "cross_entropy", rows, V, softcap, x, targets, y, *statistics, total)
        count = (targets != -1).sum()
        ctx.save_for_backward(y, targets, statistics, count)
        ctx.softcap, ctx.dtype = softcap, x.dtype
        ctx.set_materialize_grads(False)
        return y, total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, g_y, g_loss):
        y, targets, (highest, log_sum, _), count = ctx.saved_tensors
        rows, V = targets.numel(), y.size(-1)
        grad = None
        if g_loss is not None:
            grad = torch.empty_like(y, dtype=ctx.dtype)
            saved = (y, targets, highest, log_sum, (g_loss / count).float())
            _call(ctx.dtype, "cross_entropy_backward", rows, V, ctx.softcap, grad, *saved)
        if g_y is not None:
            slope = 1 - (y / ctx.softcap).square() if ctx.softcap else 1
            extra = (g_y * slope).to(ctx.dtype)
            grad = extra if grad is None else grad + extra
        return grad, None, None


def attention(qkv: Tensor, n_head: int, rotation: Rotation) -> Tensor:
    """Causal attention: (B, T, C) from queries, keys and values (B, T, 3 C).

    With `rotation`, in float32, queries and keys are rotated and normalized first. The weight matrix
    is never stored, as in FlashAttention (Dao et al., 2022).
    """
    return _apply(_Attention, qkv, n_head, *(rotation or (None, None)))


def attention_step(qkv: Tensor, n_head: int, rotation: Rotation, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """Causal attention for one new position: (B, 1, C) from qkv (B, 1, 3 C) and the first `past` entries of `keys` and
    `values` (B, H, block_size, D). Writes the new key and value at index `past`. Not differentiable.
    """
    B, D = qkv.size(0), keys.size(3)
    qkv, out = qkv.contiguous(), qkv.new_empty(B, 1, n_head * D)
    sizes, tables = (B, n_head, D, keys.size(2), past), rotation or (None, None)
    _call(qkv.dtype, "attention_step", *sizes, qkv, *tables, keys, values, out)
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout, with a seed from torch's global generator."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    return _apply(_Dropout, x, round(p * 2**24), seed)


# As in ops; weights and biases are float32.
linear = functools.partial(_apply, _Linear)
rms_norm = functools.partial(_apply, _RMSNorm)
layer_norm = functools.partial(_apply, _LayerNorm)
token_shift = functools.partial(_apply, _TokenShift)
squared_relu = functools.partial(_apply, _Elementwise, "squared_relu")
gelu = functools.partial(_apply, _Elementwise, "gelu")
# Raises IndexError for a target outside the vocabulary.
cross_entropy = functools.partial(_apply, _CrossEntropy)
