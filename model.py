"""GPT, a decoder-only transformer over characters, in two architectures.

    model = GPT(GPTConfig(model_type="gpt-mini", vocab_size=65, block_size=128))
    logits, loss = model(idx, targets)

`arch="gpt2"` is the model of Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019), with exact GELU. `arch="modern"` is the one of karpathy/nanochat as Transformers ships it:
rotary positions, RMSNorm without weights, normalised queries and keys, squared ReLU, an untied head
that starts at zero, and a soft cap on the logits. `token_shift` adds to either what neither has.

Shapes in comments: B sequences, T characters, C = n_embd, H heads of D = C / H, V = vocab_size.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from engine.errors import UserError
from engine.kernels import native as kernels
from engine.optim.optimizer import OptimizerConfig, create_optimizer
from engine.parallel import sharding

__all__ = ["GPT", "GPTConfig", "OptimizerConfig", "create_optimizer"]

# n_layer, n_head, n_embd of the named sizes; names and values as in karpathy/minGPT
SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "openai-gpt": (12, 12, 768),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}
# The fields of `GPTConfig`, beside the vocabulary, that say which weights fit.
ARCHITECTURE = (
    *("arch", "n_layer", "n_head", "n_embd", "block_size"),
    *("bias", "tie_weights", "token_shift"),
)
# |logit| stays below this whole number in the modern architecture (Gemma Team, "Gemma 2", 2024).
SOFTCAP = 15
ROPE_BASE = 10_000.0  # Su et al., "RoFormer", 2021
NORM_EPS = 1e-6
SHORT_ATTENTION = 256  # characters; up to here plain matrix products are faster on a CPU


@dataclass
class GPTConfig:
    """Architecture and size; the fields are explained in `conf/model/`.

    `n_layer`, `n_head` and `n_embd` come from `model_type` where they are not given. `vocab_size`
    and `block_size` come from the data set and must be set before a `GPT` is built.
    """

    arch: str = "gpt2"
    model_type: str | None = "gpt2"
    n_layer: int | None = None
    n_head: int | None = None
    n_embd: int | None = None
    vocab_size: int | None = None
    block_size: int | None = None
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    bias: bool | None = None
    tie_weights: bool | None = None
    token_shift: bool = False
    attention: str = "auto"
    activation_checkpointing: bool = False

    def __post_init__(self):
        if self.arch not in ("gpt2", "modern"):
            raise UserError(f"model.arch={self.arch}: must be gpt2 or modern")
        if self.attention not in ("auto", "sdpa", "matmul"):
            raise UserError(f"model.attention={self.attention}: must be auto, sdpa or matmul")
        if self.model_type is not None and self.model_type not in SIZES:
            raise UserError(
                f"model.model_type={self.model_type}: must be null or one of {', '.join(SIZES)}"
            )
        named = SIZES[self.model_type] if self.model_type is not None else (None, None, None)
        for name, size in zip(("n_layer", "n_head", "n_embd"), named, strict=True):
            if getattr(self, name) is None:
                setattr(self, name, size)
            if getattr(self, name) is None:
                raise UserError(
                    f"model.{name} is missing: set it, or name a size with model.model_type"
                )
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name}={value}: must be at least 1")
        assert self.n_embd is not None and self.n_head is not None  # as checked above
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd={self.n_embd}: must be divisible by model.n_head={self.n_head}"
            )
        for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"model.{name}={getattr(self, name)}: must be at least 0 and below 1"
                )
        if self.arch == "modern":
            if (self.n_embd // self.n_head) % 2:
                raise UserError(
                    f"model.n_embd={self.n_embd} / model.n_head={self.n_head} gives heads "
                    f"{self.n_embd // self.n_head} "
                    "wide: rotary positions (model.arch=modern) need an even width"
                )
            for name in ("bias", "tie_weights"):
                if getattr(self, name):
                    raise UserError(
                        f"model.{name}=true: model.arch=modern has none; leave it null, or use "
                        "arch=gpt2"
                    )
        for name in ("bias", "tie_weights"):
            if getattr(self, name) is None:
                setattr(self, name, self.arch == "gpt2")

    @classmethod
    def recorded(cls, values: dict[str, Any]) -> "GPTConfig":
        """The one with the `values` that a snapshot has. Raises `UserError` for one that is not a
        field.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in names]
        if unknown:
            raise UserError(
                f"the snapshot's model has model.{unknown[0]}, which GPTConfig does not have; was "
                "model.py changed since?"
            )
        return cls(**values)

    def complete(self) -> "CompleteConfig":
        """Itself; raises `UserError` if `vocab_size` or `block_size` is still missing."""
        for name in ("vocab_size", "block_size"):
            if getattr(self, name) is None:
                raise UserError(f"model.{name} is missing: take it from the data set")
        return cast(CompleteConfig, self)


class CompleteConfig(GPTConfig):
    """How type checkers see a `GPTConfig` that is complete: nothing a model needs is None."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool
    tie_weights: bool


class KVCache:
    """Keys and values of the characters seen so far, for one `generate` call.

    `keys` and `values` are (B, H, block_size, D) for each layer; `length` characters of them are
    filled. `rotation` is of all positions. The idea of tensors that are as long as the context will
    ever be is pytorch-labs/gpt-fast's. `last` is what each layer's `TokenShift` saw of the last
    character, (B, 1, C). Where `weights` is a list, every layer appends its attention weights to
    it, (B, H, S, length + S).
    """

    def __init__(
        self, config: CompleteConfig, batch_size: int, device: torch.device, dtype: torch.dtype
    ):
        width = config.n_embd // config.n_head
        shape = batch_size, config.n_head, config.block_size, width
        self.keys, self.values = (
            [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
            for _ in range(2)
        )
        self.last = [torch.zeros(batch_size, 1, config.n_embd, device=device, dtype=dtype)]
        self.last *= config.n_layer
        self.rotation = rotary(config.block_size, width, device)
        self.length = 0
        self.weights: list[torch.Tensor] | None = None

    def takes_one(self, count: int, dtype: torch.dtype) -> bool:
        """Whether a kernel may add the next `count` characters, numbers of `dtype`: a single one,
        without a gradient, whose weights nobody wants.
        """
        same = dtype is self.keys[0].dtype and not torch.is_grad_enabled()
        return count == 1 and same and self.weights is None

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores (B, H, S, D) keys and values behind those of `layer`; returns all of them, (B, H,
        length + S, D).
        """
        end = self.length + key.size(2)
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """x divided by the root mean square over its last dimension; same shape."""
    if kernels.fit(x):
        return kernels.rms_norm(x)
    # F.rms_norm would do, at twice the time where tensors are small, as in `generate`.
    mean = x.float().square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean + NORM_EPS).to(x.dtype)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    # Where there is less, torch's two operations take half as long as calling a kernel.
    if x.numel() >= 8192 and kernels.fit(x):
        return kernels.squared_relu(x)
    positive = F.relu(x)
    return positive * positive  # square() goes to float32 under autocast on a GPU


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the share of the normal distribution up to x."""
    return kernels.gelu(x) if kernels.fit(x) else F.gelu(x)


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """`F.dropout`, which takes 4 % of `generate` to do nothing."""
    return F.dropout(x, p) if training and p else x


class Linear(nn.Linear):
    """Without torch's own fresh weights, which `GPT.init_weights` would overwrite."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias  # looking them up takes as long as the question
        if kernels.fit_linear(x, weight, bias):
            return kernels.linear(x, weight, bias)
        return F.linear(x, weight, bias)


class Embedding(nn.Embedding):
    """Without torch's own fresh weights."""

    def reset_parameters(self) -> None:
        pass


class LayerNorm(nn.LayerNorm):
    """Ba et al., "Layer Normalization" (2016)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # FSDP2 gathers the weights in the type that is computed in; the kernel's are float32.
        fits = self.weight.dtype is torch.float32 and x.size(-1) == self.weight.size(0)
        if fits and self.eps == kernels.LAYER_NORM_EPS and kernels.fit(x):
            return kernels.layer_norm(x, self.weight, self.bias)
        return super().forward(x)


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last dimension (Zhang and Sennrich, 2019), without
    weights.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x)


def make_norm(config: CompleteConfig) -> nn.Module:
    return RMSNorm() if config.arch == "modern" else LayerNorm(config.n_embd, bias=config.bias)


def rotary(length: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 (T, D / 2) each, for positions 0 to `length` (Su et al., 2021)."""
    half = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = position[:, None] * ROPE_BASE ** -(half / width)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (x[i], x[i + D / 2]) of x (B, H, T, D) by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a character sees itself and those before it (Vaswani et al.,
    2017).
    """

    def __init__(self, config: CompleteConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.modern = config.arch == "modern"
        self.attention = config.attention
        self.attn_pdrop = config.attn_pdrop
        self.resid_pdrop = config.resid_pdrop
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, rotation, cache: KVCache | None) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x)
        plain = self.attention != "auto" or (self.training and self.attn_pdrop)
        if cache is not None:
            plain = plain or not cache.takes_one(T, qkv.dtype)
        if not plain and kernels.fit(qkv, C // self.n_head):
            if cache is None:
                y = kernels.attention(qkv, self.n_head, rotation)
            else:
                keys, values = cache.keys[self.layer], cache.values[self.layer]
                y = kernels.attention_step(qkv, self.n_head, rotation, keys, values, cache.length)
            return dropout(self.c_proj(y), self.resid_pdrop, self.training)
        qkv = qkv.view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        if self.modern:
            q, k = rms_norm(rotate(qkv[:2], *rotation))  # (B, H, T, D) each
            v = qkv[2]
        else:
            q, k, v = qkv.contiguous()  # (B, H, T, D) each; one copy for all three
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        weights = cache.weights if cache is not None else None
        y = self.attend(q, k, v, weights).transpose(1, 2).reshape(B, T, C)
        return dropout(self.c_proj(y), self.resid_pdrop, self.training)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """softmax(q k' / sqrt(D)) v for the last S of T characters, each of which sees itself and
        those before it: (B, H, S, D), as q is, from k and v (B, H, T, D). The softmax, (B, H, S,
        T), is appended to `keep` if that is given.
        """
        B, H, S, D = q.shape
        T = k.size(2)
        pdrop = self.attn_pdrop if self.training else 0.0
        short = q.device.type == "cpu" and T <= SHORT_ATTENTION
        fused = self.attention == "sdpa" or (self.attention == "auto" and not short)
        if fused and keep is None and S == T:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=pdrop, is_causal=True)
        mask = torch.full((S, T), float("-inf"), device=q.device, dtype=q.dtype).triu(1 + T - S)
        if fused and keep is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=pdrop)
        # The mask is what the product is added to: neither scaling nor masking is a pass over
        # memory. Shapes are (B * H, S, T) from here.
        q, k, v = (z.reshape(B * H, -1, D) for z in (q, k, v))
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=D**-0.5).softmax(dim=-1)
        if keep is not None:
            keep.append(weights.view(B, H, S, T))
        if pdrop:
            weights = F.dropout(weights, pdrop)
        return torch.bmm(weights.to(v.dtype), v).view(B, H, S, D)


class MLP(nn.Module):
    """Two linear layers, four times as wide between, with GELU or squared ReLU (So et al.,
    "Primer", 2021).
    """

    def __init__(self, config: CompleteConfig):
        super().__init__()
        self.modern = config.arch == "modern"
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.resid_pdrop = config.resid_pdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        x = squared_relu(x) if self.modern else gelu(x)
        return dropout(self.c_proj(x), self.resid_pdrop, self.training)


class TokenShift(nn.Module):
    """Adds to each character the one before it, times a learned factor for each channel: x (B, T,
    C), same shape. The idea is RWKV's (Peng et al., 2023), which mixes the two. To look at the
    character before, an attention head has to learn first where it is.
    """

    def __init__(self, config: CompleteConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(config.n_embd))

    def forward(self, x: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        if cache is None:
            before = F.pad(x[:, :-1], (0, 0, 1, 0))
        else:
            before = cache.last[self.layer]
            if x.size(1) > 1:
                before = torch.cat((before, x[:, :-1]), dim=1)
            cache.last[self.layer] = x[:, -1:]
        return torch.addcmul(x, before, self.weight.to(x.dtype))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (pre-norm)."""

    def __init__(self, config: CompleteConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.shift = TokenShift(config, layer) if config.token_shift else None
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rotation, cache: KVCache | None = None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), rotation, cache)
        y = self.ln_2(x)
        if self.shift is not None:
            y = self.shift(y, cache)
        return x + self.mlp(y)


class GPT(nn.Module):
    """The model. Raises `UserError` if `vocab_size` or `block_size` is still missing."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config = config.complete()
        self.tok_emb = Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = (
            Embedding(config.block_size, config.n_embd) if config.arch == "gpt2" else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.tok_emb.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights from torch's global generator.

        gpt2: normal with deviation 0.02, the two projections that end on the residual stream 0.02 /
        sqrt(2 n_layer) (Radford et al., 2019, section 2.3). modern: what ends on the residual
        stream, and the head, at zero; the other matrices uniform with deviation C^-1/2; embeddings
        normal with deviation 1 (karpathy/nanochat). A `TokenShift` begins at zero. What is called
        neither weight nor bias keeps the values it was made with.

        Raises `UserError` for such a parameter on the meta device, where it has none.
        """
        modern, config = self.config.arch == "modern", self.config
        for name, parameter in self.named_parameters():
            if not name.endswith((".weight", ".bias")):
                if parameter.is_meta:
                    raise UserError(
                        f"{name}: trainer.strategy=fsdp makes a model without its values; set "
                        "those of this parameter in GPT.init_weights"
                    )
                continue
            if parameter.is_meta:
                continue
            # Drawn whole and on the CPU: the same weights on any device, however sharded.
            fresh = torch.empty(parameter.shape, device="cpu")
            if parameter.dim() == 1:
                # a norm's weight 1; every bias 0, and every factor of a shift
                one = name.endswith("weight") and not name.endswith(".shift.weight")
                nn.init.constant_(fresh, float(one))
            elif modern and (name.endswith("c_proj.weight") or name == "head.weight"):
                nn.init.zeros_(fresh)
            elif modern and "emb" not in name:
                limit = math.sqrt(3 / config.n_embd)
                nn.init.uniform_(fresh, -limit, limit)
            elif modern:
                nn.init.normal_(fresh, std=1.0)
            else:
                scale = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(fresh, std=0.02 / scale)
            parameter.copy_(sharding.shard_like(fresh, parameter))

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (B, T, V) in float32 for `idx` (B, T) int64, and the loss if `targets` (B, T) are
        given.

        The loss is the mean cross-entropy in nats over the targets that are not -1 (as in minGPT);
        take gradients of it with respect to anything but these logits.
        With a `cache`, `idx` holds the characters after those in it. Raises ValueError if the
        context would exceed `block_size`.
        """
        T, past = idx.size(1), cache.length if cache is not None else 0
        if past + T > self.config.block_size:
            raise ValueError(
                f"{past + T} characters of context, but block_size is {self.config.block_size}"
            )
        x = self.tok_emb(idx)  # (B, T, C)
        if self.pos_emb is not None:
            x = x + self.pos_emb.weight[past : past + T]
        x = dropout(x, self.config.embd_pdrop, self.training)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream too, or each addition would go back to float32.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rotation = None
        if self.pos_emb is None:
            x = self.ln_f(x)  # has no weights: one norm for after the embedding and before the head
            width = self.config.n_embd // self.config.n_head
            cos, sin = cache.rotation if cache is not None else rotary(T, width, x.device)
            rotation = cos[past : past + T], sin[past : past + T]
        recompute = self.config.activation_checkpointing and cache is None
        recompute = recompute and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation, cache)
        if cache is not None:
            cache.length += T
        logits = self.head(self.ln_f(x))  # (B, T, V)
        softcap = SOFTCAP if self.config.arch == "modern" else 0
        if targets is not None and kernels.fit(logits, multiple=1):
            return kernels.cross_entropy(logits, targets, softcap)
        logits = logits.float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
            )
        return logits, loss

    def compile(self, *args, **kwargs) -> None:
        """Compiles the model: as a whole on a GPU, where what matters is how many operations are
        launched; elsewhere, and where each block is sharded or computed again for itself, the
        blocks, which share one piece of generated code, in two thirds of the time
        (benchmarks/experiments.md).
        """
        by_blocks = sharding.is_sharded(self) or self.config.activation_checkpointing
        if self.tok_emb.weight.is_cuda and not by_blocks:
            super().compile(*args, **kwargs)
            return
        for block in self.blocks:
            block.compile(*args, **kwargs)

    @torch.no_grad()
    def inspect(self, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (T, V) and attention weights (L, H, T, T) for one context `idx` (T,) int64, where
        row t of a head is what character t takes from characters 0 to t.

        By plain matrix products, the only path that has the weights at hand. Raises ValueError if T
        exceeds `block_size`.
        """
        cache = KVCache(self.config, 1, idx.device, self.tok_emb.weight.dtype)
        cache.weights = []
        logits, _ = self(idx[None], cache=cache)
        return logits[0], torch.cat(cache.weights)

    def flops_per_token(self) -> float:
        """Floating-point operations of training per character: 6 per weight of a matrix, 12 L C T
        for attention.

        Chowdhery et al., "PaLM" (2022), appendix B; look-ups in embedding tables count nothing.
        """
        matrices = (
            sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
            + self.head.weight.numel()
        )
        return 6 * matrices + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    def generate(self, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
        """Continues `idx` (B, T >= 1) by `max_new_tokens` characters; returns (B, T +
        max_new_tokens). `options` and errors are those of `stream`.
        """
        made = [ids[:, None] for ids in self.stream(idx, max_new_tokens, **options)]
        return torch.cat((idx, *made), dim=1)

    @torch.no_grad()
    def stream(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        first_row: int = 0,
        use_cache: bool = True,
    ) -> Iterator[torch.Tensor]:
        """The `max_new_tokens` characters that continue `idx` (B, T >= 1), as they are made: the
        next id of each row, int64 (B,), at a time.

        The model sees the last `block_size` characters. Greedy unless `do_sample`; then characters
        are drawn from the softmax of logits / `temperature`, among the `top_k` likeliest, and among
        the fewest whose probabilities reach `top_p` (Holtzman et al., 2019). What row i draws
        follows from `seed` and `first_row` + i alone, on any device, so that the rows may come in
        one batch or in several: the same, but where rounding, which depends on the batch, decides.
        Without a `seed`, torch's global generator gives one; with it, that is left alone.
        `use_cache=False` recomputes everything at each character: the same result, slower.

        Raises ValueError, when the first character is asked for, for an empty `idx`, a negative
        `max_new_tokens`, a temperature not above 0, a top_k below 1, or a top_p not in (0, 1].
        """
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError("generate needs at least one character to start from, of shape (B, T)")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must not be negative")
        if do_sample and not temperature > 0:
            raise ValueError(f"temperature={temperature}: must be above 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k}: must be at least 1")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
        block_size, (B, T) = self.config.block_size, idx.shape
        generators = []
        if do_sample:
            seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
            generators = [np.random.default_rng((seed, first_row + row)) for row in range(B)]
        device, dtype = idx.device, self.tok_emb.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        cache = KVCache(self.config, B, device, dtype) if use_cache else None
        was_training = self.training
        self.eval()
        try:
            fresh = idx[:, -block_size:]
            context = deque(fresh.split(1, dim=1), maxlen=block_size)
            for length in range(T, T + max_new_tokens):
                if cache is not None and length <= block_size:
                    logits, _ = self(fresh, cache=cache)
                else:
                    # Past block_size the window slides: every position moves, and what a key has
                    # seen has changed with it, so nothing cached is still true.
                    logits, _ = self(torch.cat([*context], dim=1))
                ids = pick(logits[:, -1], temperature, top_k, top_p, generators)
                yield ids
                fresh = ids[:, None]
                context.append(fresh)
        finally:
            self.train(was_training)


def pick(
    logits: torch.Tensor, temperature: float, top_k, top_p, generators: list[np.random.Generator]
) -> torch.Tensor:
    """One id (B,) per row of `logits` (B, V), drawn with the generator of the row, or the likeliest
    where there are none; see `GPT.stream` for the rest.
    """
    if not generators:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        # The likeliest has 0 before it, so one always stays.
        before = probability.cumsum(dim=-1) - probability
        logits = logits.masked_fill(
            (before >= top_p).scatter(1, order, before >= top_p), float("-inf")
        )
    # Of exponential variables with these rates the first to come is each with its probability,
    # which is how torch.multinomial draws, too.
    times = np.empty(logits.shape)
    for generator, row in zip(generators, times, strict=True):
        generator.standard_exponential(out=row)
    return (logits.softmax(dim=-1) / torch.from_numpy(times).to(logits.device)).argmax(dim=-1)
