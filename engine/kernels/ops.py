"""Operations of a model: plain PyTorch, or faster where the device and the sizes allow it. Each function computes
the same, to rounding, whichever implementation it chooses.
"""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import native
from engine.kernels.build import instructions
from engine.machine import hardware

log = logging.getLogger("gpt")

MIN_KERNEL_FLOPS = 2**17  # multiplications of a linear layer, below which torch's is faster
MIN_KERNEL_ROWS = 256  # of a linear layer in bfloat16, whose weight has to be rounded and reordered
MIN_KERNEL_ELEMENTS = 8192  # of a squared ReLU, below which torch's two operations are faster
MAX_PLAIN_ATTENTION = 256  # characters; on a CPU matrix products are faster up to here
COMPARED_LENGTHS = (256, 1024, 4096, 16384, 65536)  # of contexts, in `fused`


def rms_norm(x: Tensor, eps: float = native.NORM_EPS) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) over the last dimension."""
    if eps == native.NORM_EPS and native.supports(x):
        return native.rms_norm(x)
    if x.is_cuda and not torch.compiler.is_compiling():
        # F.rms_norm computes in float32 under autocast.
        return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)[0]
    # F.rms_norm takes twice the time where tensors are small, as in `generate`.
    mean = x.float().square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean + eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalization (Ba et al., 2016) of x (..., C) with `weight` and `bias` (C,)."""
    # FSDP2 gathers weights in the type that is computed in; the kernel's are float32.
    fits = weight.dtype is torch.float32 and weight.shape == x.shape[-1:]
    if fits and eps == native.LAYER_NORM_EPS and native.supports(x):
        return native.layer_norm(x, weight, bias)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021): rotates the pairs (x[i], x[i + D / 2]) of x
    (..., T, D) by the angles of their positions, given as cosines and sines (T, D / 2).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU (So et al., "Primer", 2021): max(x, 0)^2."""
    if x.numel() >= MIN_KERNEL_ELEMENTS and native.supports(x):
        return native.squared_relu(x)
    positive = F.relu(x)
    return positive * positive  # square() goes to float32 under autocast on a GPU


def gelu(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016), exact: x Phi(x)."""
    return native.gelu(x) if native.supports(x) else F.gelu(x)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout (Srivastava et al., 2014). Not called where it does nothing: 4 % of `generate`."""
    return F.dropout(x, p) if training and p else x


def cross_entropy(logits: Tensor, targets: Tensor, softcap: int = 0) -> tuple[Tensor, Tensor]:
    """Capped logits (..., V) in float32, and their mean cross-entropy in nats over the `targets`
    (...), int64, that are not -1; take no gradients of it with respect to these logits.
    """
    fits = targets.dtype is torch.int64 and targets.shape == logits.shape[:-1]
    if fits and native.holds_memory(targets) and native.supports(logits, multiple=1):
        return native.cross_entropy(logits, targets, softcap)
    logits = cap(logits, softcap)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
    return logits, loss


def cap(logits: Tensor, softcap: int) -> Tensor:
    """Soft cap in float32 (Gemma Team, "Gemma 2", 2024): softcap tanh(logits / softcap), unless that is 0."""
    logits = logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# --------------------------------------------------------------------------------------------------
# Linear layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer: x (..., C) times `weight` (columns, C) transposed, plus `bias` (columns)."""
    if _linear_is_faster(x, weight, bias):
        return native.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_is_faster(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can compute this and beats torch (benchmarks/experiments.md): large
    products only, in bfloat16 under its autocast, in float32 without autocast and gradients.
    """
    if torch.compiler.is_compiling() or x.numel() * weight.size(0) < MIN_KERNEL_FLOPS:
        return False
    if torch.is_autocast_enabled("cpu"):
        rows = x.numel() // x.size(-1)
        if rows < MIN_KERNEL_ROWS or rows % 8:
            return False
        computed = torch.get_autocast_dtype("cpu")
        columns, C = 2 * native.WIDTH, 2 * native.WIDTH
    else:
        if torch.is_grad_enabled():
            return False
        computed, columns, C = torch.float32, 4, native.WIDTH
    return (
        x.dtype is computed
        and native.supports(x, multiple=C)
        and weight.size(0) % columns == 0
        and weight.size(1) == x.size(-1)
        and _is_dense_float32(weight)
        and (bias is None or (_is_dense_float32(bias) and bias.numel() == weight.size(0)))
        and _products_are_slow(computed)
    )


def _is_dense_float32(x: Tensor) -> bool:
    return native.holds_memory(x) and x.dtype is torch.float32 and x.is_contiguous()


@functools.cache
def _products_are_slow(dtype: torch.dtype) -> bool:
    """Whether torch's matrix products are slow on this CPU: in bfloat16, without AMX; in float32,
    those of Intel's MKL on one of AMD's. Measured on a Zen 5, two threads.
    """
    if dtype is torch.bfloat16:
        return not torch.cpu._is_amx_tile_supported()
    by_amd = "AuthenticAMD" in hardware.cpuinfo()
    mkl = torch.backends.mkl.is_available()
    return by_amd and mkl and instructions(torch.float32) == "AVX512"


# --------------------------------------------------------------------------------------------------
# Attention


def fused(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates attention written in plain PyTorch: dispatches to a fused implementation that gives
    the same results, where there is one.

    `attention(qkv, n_head, rotation, cache, pdrop)` returns (B, S, C) for queries, keys and values
    qkv (B, S, 3 C) of n_head heads, the last S characters of T: with a `cache`, an
    `engine.generation.LayerCache`, those in it come first. `rotation`, cosines and sines
    (S, D / 2), is None where queries and keys are neither rotated nor normalized; `pdrop` is the
    dropout probability of the attention weights.

    `_agrees` compares the two on random inputs, once per shape of a head and range of lengths. An
    edited `attention` that is no longer standard causal attention therefore runs as written, on
    every device, compiled or not, but slower. It must be pure. Called with other arguments, it
    always runs as written.
    """

    def is_standard(*shape: Any) -> bool:
        return _agrees(attention, *shape)

    # As torch.compiler.assume_constant_result, whose call imports the compiler, for one to six
    # seconds: torch.compile calls this function and does not trace it.
    is_standard._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(attention)
    def dispatch(*arguments: Any, **named: Any) -> Tensor:
        if len(arguments) == 5 and not named and type(arguments[0]) is Tensor:
            qkv, n_head, rotation, cache, pdrop = arguments
            width = qkv.size(2) // 3 // n_head
            length = qkv.size(1) if cache is None else qkv.size(1) + cache.length
            kernel = _choose_kernel(qkv, width, length, rotation, cache, pdrop)
            if kernel is not None:
                for compared in COMPARED_LENGTHS:
                    if length <= compared:
                        break
                if is_standard(n_head, width, rotation is not None, compared):
                    return kernel(*arguments)
        return attention(*arguments, **named)

    return dispatch


def _choose_kernel(
    qkv: Tensor, width: int, length: int, rotation: native.Rotation, cache: Any, pdrop: float
) -> Callable[..., Tensor] | None:
    """The fused attention for heads of this width and a context of this length. None where plain
    matrix products are faster.
    """
    S = qkv.size(1)
    if cache is not None and 1 < S < length:
        return None
    if not qkv.is_cpu:
        return _torch_attention
    if pdrop:  # on a CPU, torch's fused attention has no dropout
        return None
    if (
        width >= 2 * native.WIDTH
        and width % native.WIDTH == 0
        and native.supports(qkv)
        and _fits(rotation, S, width)
    ):
        if cache is None:
            return _native_attention
        if S == 1 and qkv.dtype is cache.keys.dtype and not torch.is_grad_enabled():
            return _native_attention
    return _torch_attention if length > MAX_PLAIN_ATTENTION else None


def _fits(rotation: native.Rotation, S: int, width: int) -> bool:
    """Whether the kernels can read these tables: contiguous float32, no gradient required."""
    return rotation is None or all(
        _is_dense_float32(table) and table.numel() == S * width // 2 and not table.requires_grad
        for table in rotation
    )


def _native_attention(qkv, n_head, rotation, cache, pdrop) -> Tensor:
    if cache is None:
        return native.attention(qkv, n_head, rotation)
    y = native.attention_step(qkv, n_head, rotation, cache.keys, cache.values, cache.length)
    cache.length += 1
    return y


def _torch_attention(qkv, n_head, rotation, cache, pdrop) -> Tensor:
    """Standard causal attention with torch's own fused kernels, for S = T or S = 1."""
    B, S, _ = qkv.shape
    qkv = qkv.view(B, S, 3, n_head, -1)
    q, k, v = qkv.unbind(2)
    if rotation is not None:
        cos, sin = (table[:, None, None] for table in rotation)
        q, k = rms_norm(rotate(qkv[:, :, :2], cos, sin)).unbind(2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, D)
    if cache is not None:
        k, v = cache.append(k, v)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=pdrop, is_causal=S > 1)
    return y.transpose(1, 2).reshape(B, S, -1)


@functools.cache
def _agrees(
    attention: Callable[..., Tensor], n_head: int, width: int, rotated: bool, length: int
) -> bool:
    """Whether `attention` and `_torch_attention` give the same results and gradients on random inputs,
    in float32 on the CPU: for a whole context, for a short one with dropout, and for the last of
    `length` characters. Warns if not. Some 20 ms up to 4,096 characters, longer above.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

    def agree(S: int, past: int = 0, pdrop: float = 0.0) -> bool:
        qkv = random(1, S, 3, n_head * width)
        # Small rows show the epsilon of a norm, and all of them the scale of the scores.
        qkv[:, :, :2] *= 10 ** random(S, 1, 1).clamp(-3, 0.5)
        qkv = qkv.flatten(2).requires_grad_()
        angles = random(S, width // 2)
        rotation = (angles.cos(), angles.sin()) if rotated else None
        keys, values = random(2, 1, n_head, past, width)
        cache = SimpleNamespace(length=past)
        cache.append = lambda k, v: (torch.cat((keys, k), 2), torch.cat((values, v), 2))
        slope = random(1, S, n_head * width)
        results = []
        for function in (attention, _torch_attention):
            torch.default_generator.manual_seed(0)  # both drop the same weights
            y = function(qkv, n_head, rotation, cache if past else None, pdrop)
            results.append((y, *torch.autograd.grad((y * slope).sum(), qkv)))
        pairs = zip(*results, strict=True)
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)

    def compare() -> bool:
        with torch.random.fork_rng(devices=[]):
            try:
                return agree(256) and agree(32, pdrop=0.5) and agree(1, past=length - 1)
            except Exception:  # an incompatible signature raises when called
                return False

    # A new thread has gradients on, and none of the caller's autocast, device or hooks.
    with ThreadPoolExecutor(1) as thread:
        same = thread.submit(compare).result()
    if not same:
        name = f"{attention.__module__}.{attention.__name__}"
        log.warning(
            "attention   %s differs from the fused kernels: run as written, maybe slower", name
        )
    return same
