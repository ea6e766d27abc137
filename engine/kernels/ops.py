"""Operations of a model: plain PyTorch, or a faster implementation where device and sizes allow it. All implementations
of a function agree up to rounding; those of dropout draw other masks.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import native
from engine.kernels.build import instructions
from engine.machine import hardware

# Constants of the modern architecture, in model.py and in every format that engine/interop/ writes
SOFTCAP = 15  # bound of |logit|
ROPE_BASE = 10_000.0
# Factors of the two hashes (last three characters, last four), oldest first. Primes, small enough for exact sums in
# JavaScript.
NGRAM_FACTORS = (0, 1299709, 15485863, 982451653), (67867967, 275604541, 373587883, 573259391)

IGNORE = -1  # a target that is not scored; minGPT's convention
MIN_KERNEL_PRODUCTS = 2**17  # multiplications of a linear layer, below which torch's is faster
MIN_KERNEL_ROWS = 256  # of a linear layer in bfloat16, whose weight has to be rounded and reordered
MIN_KERNEL_ELEMENTS = 8192  # of a squared ReLU, below which torch's two operations are faster
MAX_PADDED = 256  # columns of a product that is padded; see `linear`
MAX_PLAIN_ATTENTION = 256  # characters; on a CPU matrix products are faster up to here


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
    given = [weight] if bias is None else [weight, bias]
    # FSDP2 gathers weights in the type that is computed in; the kernel's are float32.
    fits = all(_is_dense_float32(z) and z.shape == x.shape[-1:] for z in given)
    if fits and eps == native.LAYER_NORM_EPS and native.supports(x):
        return native.layer_norm(x, weight, bias)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021): rotates the pairs (x[i], x[i + D / 2]) of x
    (..., T, D) by the angles of their positions, given as cosines and sines (T, D / 2).
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    pairs = x.unflatten(-1, (2, -1))
    sines = torch.stack((sin, -sin), dim=-2)
    return torch.addcmul(pairs * cos.unsqueeze(-2), pairs.flip(-2), sines).flatten(-2)


def token_shift(x: Tensor, weight: Tensor, last: Tensor | None = None) -> Tensor:
    """Token shift (RWKV, Peng et al., 2023): x (B, T, C) plus `weight` (C,) times the previous position. `last`
    (B, 1, C), or zeros, precedes x.
    """
    fits = x.dim() == 3 and _is_dense_float32(weight) and weight.shape == x.shape[-1:]
    if last is None and fits and native.supports(x):
        return native.token_shift(x, weight)
    last = torch.zeros_like(x[:, :1]) if last is None else last
    before = torch.cat((last, x[:, :-1]), dim=1)
    return torch.addcmul(x, before, weight.to(x.dtype))


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU (So et al., "Primer", 2021): max(x, 0)^2."""
    if x.numel() >= MIN_KERNEL_ELEMENTS and native.supports(x):
        return native.squared_relu(x)
    positive = torch.relu(x)
    return positive * positive  # square() goes to float32 under autocast on a GPU


def gelu(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016), exact: x Phi(x)."""
    return native.gelu(x) if native.supports(x) else F.gelu(x)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout (Srivastava et al., 2014). Skipped where it does nothing; the call takes 4 % of `generate`."""
    if not (training and p):
        return x
    return native.dropout(x, p) if native.supports(x) else F.dropout(x, p)


def cross_entropy(logits: Tensor, targets: Tensor, softcap: float = 0) -> tuple[Tensor, Tensor]:
    """Capped logits (..., V) in float32, and their mean cross-entropy in nats over the `targets`
    (...), int64, that are not `IGNORE`. Both have gradients with respect to the uncapped logits; the loss has none with
    respect to the returned ones.
    """
    # The kernel takes integral caps only; its error grows with the cap.
    has_cap = 0 <= softcap <= 100 and softcap == int(softcap)
    fits = has_cap and targets.dtype is torch.int64 and targets.shape == logits.shape[:-1]
    if fits and native.holds_memory(targets) and native.supports(logits, multiple=1):
        return native.cross_entropy(logits, targets, int(softcap))
    logits = cap(logits, softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)
    return logits, loss


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Soft cap in float32 (Gemma Team, "Gemma 2", 2024): softcap tanh(logits / softcap), unless that is 0."""
    logits = logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# --- linear layers ---


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer: x (..., C) times `weight` (columns, C) transposed, plus `bias` (columns)."""
    if _linear_is_faster(x, weight, bias):
        return native.linear(x, weight, bias)
    columns = weight.size(0)
    extra = -columns % native.WIDTH
    is_large = x.numel() * columns >= MIN_KERNEL_PRODUCTS
    is_head = extra and columns < MAX_PADDED and bias is None  # of a small vocabulary
    if is_head and is_large and x.dtype is torch.float32 and x.is_cpu:
        # With few columns, not a multiple of 16, MKL's order of summation depends on the threads.
        return F.linear(x, F.pad(weight, (0, 0, 0, extra)))[..., :columns]
    return F.linear(x, weight, bias)


def _linear_is_faster(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can compute this and beats torch (benchmarks/experiments.md): large
    products only, in bfloat16 under its autocast, in float32 without autocast and gradients.
    """
    if torch.compiler.is_compiling() or x.numel() * weight.size(0) < MIN_KERNEL_PRODUCTS:
        return False
    if torch.is_autocast_enabled("cpu"):
        rows = x.numel() // x.size(-1)
        if rows < MIN_KERNEL_ROWS or rows % 8:
            return False
        computed = torch.get_autocast_dtype("cpu")
        of_columns, of_C = 2 * native.WIDTH, 2 * native.WIDTH  # multiples
    else:
        if torch.is_grad_enabled():
            return False
        computed = torch.float32
        of_columns, of_C = 4, native.WIDTH
    return (
        x.dtype is computed
        and native.supports(x, multiple=of_C)
        and weight.size(0) % of_columns == 0
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
    with Intel's MKL on an AMD CPU. Measured on a Zen 5, two threads.
    """
    if dtype is torch.bfloat16:
        return not torch.cpu._is_amx_tile_supported()
    by_amd = "AuthenticAMD" in hardware.cpuinfo()
    mkl = torch.backends.mkl.is_available()
    return by_amd and mkl and instructions(torch.float32) == "AVX512"


# --- attention ---


class KeysAndValues(Protocol):
    """Keys and values so far, (B, H, block_size, D) each, of which `length` characters are filled."""

    keys: Tensor
    values: Tensor
    length: int

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...


def causal_attention(
    qkv: Tensor, n_head: int, rotation: native.Rotation, cache: KeysAndValues | None, pdrop: float
) -> Tensor:
    """Causal attention (Vaswani et al., 2017): softmax(q k' / sqrt(D)) v, where each position attends to itself and
    earlier ones. Maps queries, keys and values (B, S, 3 C) of `n_head` heads to (B, S, C).

    With `rotation`, cosines and sines (S, D / 2), queries and keys are rotated and normalized. With a `cache`, an
    `engine.generation.LayerCache`, the S characters follow the cached ones. `pdrop` is the dropout probability of the
    attention weights.
    """
    return _choose_attention(qkv, n_head, rotation, cache, pdrop)(qkv, n_head, rotation, cache, pdrop)


def _choose_attention(
    qkv: Tensor, n_head: int, rotation: native.Rotation, cache: KeysAndValues | None, pdrop: float
) -> Callable[..., Tensor]:
    """The fastest implementation for these arguments."""
    S, width = qkv.size(1), qkv.size(2) // 3 // n_head
    length = S if cache is None else S + cache.length
    if 1 < S < length:
        return _plain_attention
    if not qkv.is_cpu:
        return _torch_attention
    if pdrop:  # on a CPU, torch's fused attention has no dropout
        return _plain_attention
    is_native = cache is None or (S == 1 and qkv.dtype is cache.keys.dtype and not torch.is_grad_enabled())
    has_width = width >= 2 * native.WIDTH and width % native.WIDTH == 0
    if is_native and has_width and native.supports(qkv) and _fits(rotation, S, width):
        return _native_attention
    return _torch_attention if length > MAX_PLAIN_ATTENTION else _plain_attention


def _fits(rotation: native.Rotation, S: int, width: int) -> bool:
    """Whether the kernels can read these tables: contiguous float32, no gradient required."""
    return rotation is None or all(
        _is_dense_float32(table) and table.numel() == S * width // 2 and not table.requires_grad for table in rotation
    )


def _plain_attention(
    qkv: Tensor, n_head: int, rotation: native.Rotation, cache: KeysAndValues | None, pdrop: float
) -> Tensor:
    B, S, _ = qkv.shape
    qkv = qkv.view(B, S, 3, n_head, -1).permute(2, 0, 3, 1, 4)
    if rotation is None:
        q, k, v = qkv.contiguous()  # (B, H, S, D) each; one copy for all three
    else:
        q, k = rms_norm(rotate(qkv[:2], *rotation))
        v = qkv[2]
    if cache is not None:
        k, v = cache.append(k, v)
    T, D = k.shape[2:]  # T characters so far; q has the last S
    mask = torch.full((S, T), float("-inf"), device=q.device, dtype=q.dtype).triu(1 + T - S)
    weights = ((q * D**-0.5) @ k.transpose(2, 3) + mask).softmax(dim=-1)  # (B, H, S, T)
    y = dropout(weights, pdrop) @ v
    return y.transpose(1, 2).reshape(B, S, -1)


def _native_attention(
    qkv: Tensor, n_head: int, rotation: native.Rotation, cache: KeysAndValues | None, pdrop: float
) -> Tensor:
    if cache is None:
        return native.attention(qkv, n_head, rotation)
    y = native.attention_step(qkv, n_head, rotation, cache.keys, cache.values, cache.length)
    cache.length += 1
    return y


def _torch_attention(
    qkv: Tensor, n_head: int, rotation: native.Rotation, cache: KeysAndValues | None, pdrop: float
) -> Tensor:
    """With torch's own fused kernels, for S = T or S = 1."""
    B, S, _ = qkv.shape
    # Split: the backward pass of a slice would fill the rest of the gradient with zeros, and add it.
    qk, v = qkv.view(B, S, 3, n_head, -1).split((2, 1), dim=2)
    if rotation is not None:
        qk = rms_norm(rotate(qk, *(table[:, None, None] for table in rotation)))
    q, k, v = (x.transpose(1, 2) for x in (*qk.unbind(2), v.squeeze(2)))  # (B, H, S, D)
    if cache is not None:
        k, v = cache.append(k, v)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=pdrop, is_causal=S > 1)
    return y.transpose(1, 2).reshape(B, S, -1)
