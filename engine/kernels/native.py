"""Builds `kernels.c` for this machine, once, and calls it from autograd.

    if kernels.fit(qkv, head_width):
        y = kernels.attention(qkv, n_head, rotation)

Nothing here is needed: where there is no C compiler, or another CPU, or another precision, the
model computes the same in plain PyTorch (`model.py`), to rounding.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engine.errors import one_line
from engine.machine import hardware

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = "-O3 -mfma -fno-math-errno -fno-strict-aliasing -ffp-contract=fast -fopenmp -shared -fPIC"
FLAGS_OF = {  # what the instructions of the name need beside
    "AVX2": "-mavx2",
    "AVX512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "AVX-512 BF16": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -DBF16",
}
WIDTH = 16  # numbers, a multiple of which a row must have
LAYER_NORM_EPS = 1e-5  # as in kernels.c
LEAST = 2**17  # multiplications, below which calling a kernel takes longer than torch's product
LEAST_ROWS = 256  # below which it takes too long to round and order a weight for bfloat16


def instructions(dtype: torch.dtype) -> str | None:
    """The instructions of this CPU that the kernels for `dtype` are built with, if any will do."""
    if dtype is torch.bfloat16:
        return "AVX-512 BF16" if torch.cpu._is_avx512_bf16_supported() else None
    if dtype is torch.float32:  # as torch has chosen for its own kernels; ATEN_CPU_CAPABILITY
        found = torch.backends.cpu.get_cpu_capability()
        return found if found in FLAGS_OF else None
    return None


@functools.cache
def _build(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    """The built kernels for `dtype`, or None, and what there is to say of them."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, "they are for Linux on x86-64"
    chosen = instructions(dtype)
    if chosen is None:
        return None, f"there are none for {str(dtype).removeprefix('torch.')} on this CPU"
    if not compiler or shutil.which(compiler[0]) is None:
        return None, "there is no C compiler (cc, or what CC names)"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        flags = [*FLAGS.split(), *FLAGS_OF[chosen].split()]
        key = repr((compiler, flags, SOURCE.read_bytes(), platform.libc_ver()))
        key = hashlib.sha256(key.encode()).hexdigest()[:16]
        built = Path(cache, "character-level-gpt", f"kernels-{key}.so")
        if built.exists():
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(built)), str(built)
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            fresh = Path(folder, "kernels.so")
            command = [*compiler, *flags, str(SOURCE), "-o", str(fresh), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            with open(fresh, "rb") as file:
                os.fsync(file.fileno())
            os.replace(fresh, built)  # whole or not at all: other processes build it, too
        return ctypes.CDLL(str(built)), str(built)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return None, f"{' '.join(compiler)} failed: {lines[0] if lines else error.returncode}"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, one_line(error)


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The built kernels for `dtype`; None where they cannot be had."""
    return _build(dtype)[0]


def describe(dtype: torch.dtype) -> str:
    """Whether there are kernels for `dtype`, for a log."""
    found, why = _build(dtype)
    return (
        f"C, for {instructions(dtype)}, in {why}"
        if found
        else f"none, plain PyTorch instead: {why}"
    )


def fit(x: torch.Tensor, head_width: int = 2 * WIDTH, multiple: int = WIDTH) -> bool:
    """Whether the kernels can be used on x (..., C), where C must be a multiple of `multiple`; or
    those for attention, on heads that are `head_width` wide.
    """
    return (
        _is_plain(x)
        and x.size(-1) % multiple == 0
        and head_width % (2 * WIDTH) == 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and library(x.dtype) is not None
    )


def _is_plain(x: torch.Tensor) -> bool:
    """Whether numbers of x are where its address says."""
    # not a subclass: FakeTensor, DTensor
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cpu


def fit_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `linear` can be used on x (..., C), a weight (columns, C) and a bias (columns), and
    is faster than torch (benchmarks/experiments.md): for large products only, in bfloat16 where that is
    autocast's type, in float32 without autocast and without gradients.
    """
    if torch.compiler.is_compiling() or x.numel() * weight.size(0) < LEAST:
        return False
    if torch.is_autocast_enabled("cpu"):
        rows = x.numel() // x.size(-1)
        if rows < LEAST_ROWS or rows % 8:
            return False
        computed, columns, C = torch.get_autocast_dtype("cpu"), 2 * WIDTH, 2 * WIDTH
    else:
        if torch.is_grad_enabled():
            return False
        computed, columns, C = torch.float32, 4, WIDTH
    return (
        x.dtype is computed
        and fit(x, multiple=C)
        and weight.size(0) % columns == 0
        and weight.size(1) == x.size(-1)
        and _is_dense_float32(weight)
        and (bias is None or (_is_dense_float32(bias) and bias.numel() == weight.size(0)))
        and _products_are_slow(computed)
    )


def _is_dense_float32(x: torch.Tensor) -> bool:
    strided = x.layout is torch.strided and x.is_contiguous()
    return _is_plain(x) and x.dtype is torch.float32 and strided


@functools.cache
def _products_are_slow(dtype: torch.dtype) -> bool:
    """Whether the CPU is one that torch's matrix products are slow on: in bfloat16, without AMX; in
    float32, one of AMD's, if torch's are those of Intel's MKL. Measured on a Zen 5, two threads.
    """
    if dtype is torch.bfloat16:
        return not torch.cpu._is_amx_tile_supported()
    amd = hardware.is_by_amd() and torch.backends.mkl.is_available()
    return amd and instructions(torch.float32) == "AVX512"


def _call(dtype: torch.dtype, name: str, *arguments: torch.Tensor | int | None) -> None:
    """Calls a kernel, the one for `dtype`, with addresses for tensors, which must be dense."""
    addresses = [a if a is None or isinstance(a, int) else a.data_ptr() for a in arguments]
    failed = _kernel(dtype, name, 1 + len(arguments))(torch.get_num_threads(), *addresses)
    if failed == 2:
        raise IndexError(f"{name}: a target is neither -1 nor in the vocabulary")
    if failed:
        raise MemoryError(f"{name}: no memory for its workspace")


@functools.cache
def _kernel(dtype: torch.dtype, name: str, arguments: int) -> Any:
    """The kernel for `dtype`, told once that all its arguments, `long` or address, are as wide."""
    kernel = getattr(library(dtype), name)
    kernel.argtypes = [ctypes.c_void_p] * arguments
    return kernel


class _NoContext:
    """Stands for the context of a function whose gradient nobody will ask for."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`, without what autograd costs (a fifth of `generate`) where it is off."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, n_head, cosine, sine):
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        qkv, out = qkv.contiguous(), qkv.new_empty(B, T, C)
        statistics = qkv.new_empty(2, B, n_head, T, dtype=torch.float32)
        _call(
            qkv.dtype, "attention", B, T, n_head, C // n_head, qkv, cosine, sine, out, *statistics
        )
        ctx.save_for_backward(qkv, cosine, sine, out, statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        qkv, cosine, sine, out, statistics = ctx.saved_tensors
        _, B, n_head, T = statistics.shape
        D, grad = out.size(2) // n_head, torch.empty_like(qkv)
        _call(
            *(qkv.dtype, "attention_backward"),
            *(B, T, n_head, D, qkv, cosine, sine, out, *statistics, g.contiguous(), grad),
        )
        return grad, None, None, None


class _Linear(torch.autograd.Function):
    """In bfloat16 the weights' gradients are added up, and stay, in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        columns, C = weight.shape
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], columns)
        _call(x.dtype, "linear", x.numel() // C, columns, C, x, weight, bias, y)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        columns, C = weight.shape
        grads = torch.empty_like(x), torch.empty_like(weight), weight.new_empty(columns)
        saved = (g.contiguous(), x, weight)
        _call(x.dtype, "linear_backward", x.numel() // C, columns, C, *saved, *grads)
        return *grads[:2], grads[2] if ctx.has_bias else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x, rows = x.contiguous(), x.numel() // x.size(-1)
        y, r = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
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
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight, statistics = ctx.saved_tensors
        rows, C, grad = statistics.size(1), x.size(-1), torch.empty_like(x)
        parts, sums = weight.new_empty(-(-rows // 64), 2, C), weight.new_empty(2, C)
        g = g.contiguous()
        _call(x.dtype, "layer_norm_backward", rows, C, g, x, weight, *statistics, grad, parts, sums)
        return grad, sums[0], sums[1] if ctx.has_bias else None


class _Elementwise(torch.autograd.Function):
    """A kernel whose gradient needs what it was given."""

    @staticmethod
    def forward(ctx, x, name):
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
        return grad, None


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


def attention(
    qkv: torch.Tensor, n_head: int, rotation: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Causal attention: (B, T, C) from queries, keys and values (B, T, 3 C).

    With `rotation`, float32 cosines and sines (T, D / 2), queries and keys are rotated and
    normalised first. The weights are never in memory as a whole, forward or backward, as in
    FlashAttention (Dao et al., 2022).
    """
    cosine, sine = rotation if rotation is not None else (None, None)
    return _apply(_Attention, qkv, n_head, cosine, sine)


def attention_step(
    qkv: torch.Tensor,
    n_head: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: int,
) -> torch.Tensor:
    """The same for one more character of each sequence, (B, 1, C) from (B, 1, 3 C), which sees the
    first `past` of `keys` and `values` (B, H, block_size, D) and is written behind them. Has no
    gradient.
    """
    B, D = qkv.size(0), keys.size(3)
    cosine, sine = rotation if rotation is not None else (None, None)
    qkv, out = qkv.contiguous(), qkv.new_empty(B, 1, n_head * D)
    sizes = (B, n_head, D, keys.size(2), past)
    _call(qkv.dtype, "attention_step", *sizes, qkv, cosine, sine, keys, values, out)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., C) times `weight` (columns, C) transposed, plus `bias`, both float32: (..., columns).
    Where x is float32 it has no gradient. A row's result does not depend on how many there are.
    """
    if x.dtype is torch.float32:
        return _Linear.forward(_NoContext(), x, weight, bias)
    return _apply(_Linear, x, weight, bias)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """x over the root mean square of its last dimension."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x)
    x, C = x.contiguous(), x.size(-1)
    y = torch.empty_like(x)
    _call(x.dtype, "rms_norm", x.numel() // C, C, x, y, None)
    return y


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x less its mean, over its deviation, times `weight` plus `bias`, float32 (C,) each."""
    return _apply(_LayerNorm, x, weight, bias)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    return _apply(_Elementwise, x, "squared_relu")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the share of the normal distribution up to x (Hendrycks and Gimpel, 2016)."""
    return _apply(_Elementwise, x, "gelu")


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, softcap: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits (..., V), as softcap tanh(logits / softcap) unless that is 0, and their mean
    cross-entropy in nats over the `targets` (...), int64, that are not -1. Both have gradients, but
    the loss is not made from the logits returned: it has none with respect to those.

    Raises IndexError for a target outside of the vocabulary, ValueError for targets of another type
    or number, or on another device.
    """
    rows = logits.numel() // max(1, logits.size(-1))
    if targets.dtype is not torch.int64 or not targets.is_cpu or targets.numel() != rows:
        raise ValueError(
            f"targets {tuple(targets.shape)} of {targets.dtype} on {targets.device} for logits "
            f"{tuple(logits.shape)} on cpu"
        )
    return _apply(_CrossEntropy, logits, targets, softcap)
