"""GPT, a decoder-only transformer over characters, in two architectures.

    model = GPT(GPTConfig(model_type="gpt-mini", vocab_size=65, block_size=128))
    logits, loss = model(idx, targets)

`arch="gpt2"` is Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), with
exact GELU. `arch="modern"` follows nanochat, in the variant that Transformers implements: rotary positions, RMSNorm
without weights, normalized queries and keys, squared ReLU, an untied head that starts at zero, and
a soft cap on the logits.

Shapes in comments: B sequences, T characters, C = n_embd, H heads of D = C / H, V = vocab_size.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine import generation
from engine.config.schema import CompleteGPTConfig, GPTConfig, OptimizerConfig
from engine.errors import UserError
from engine.generation import LayerCache
from engine.kernels import ops
from engine.kernels.native import Rotation
from engine.kernels.ops import NGRAM_FACTORS, ROPE_BASE, SOFTCAP
from engine.optim import create_optimizer
from engine.parallel import sharding

__all__ = ["GPT", "GPTConfig", "OptimizerConfig", "create_optimizer"]


class Linear(nn.Linear):
    """Linear layer without torch's initial weights: `GPT.init_weights` sets them."""

    def reset_parameters(self) -> None:  # called by torch's constructor
        pass

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Embedding without torch's initial weights: `GPT.init_weights` sets them."""

    def reset_parameters(self) -> None:
        pass


class NgramEmbedding(nn.Module):
    """Hashed n-gram embeddings (Huang et al., "Over-Tokenized Transformer", 2025): the sum of one vector for the last
    three characters and one for the last four, each hashed to one of `rows` rows.

    `codes` (V,) int64: the number of each character in the hash; 0 is padding before the text. A persistent buffer, so
    that fine-tuning on another vocabulary finds the same rows.
    """

    codes: Tensor
    factors: Tensor

    def __init__(self, config: CompleteGPTConfig):
        super().__init__()
        self.rows = rows = config.ngram_rows
        self.weight = nn.Parameter(torch.empty(2 * rows, config.n_embd))
        self.register_buffer("codes", torch.empty(config.vocab_size, dtype=torch.int64))
        self.register_buffer("factors", torch.empty(2, 4, dtype=torch.int64), persistent=False)

    def init_buffers(self) -> None:
        self.codes.copy_(torch.arange(1, 1 + len(self.codes)))
        self.factors.copy_(torch.tensor(NGRAM_FACTORS))

    def forward(self, idx: Tensor, cache: LayerCache | None = None) -> Tensor:
        """The embeddings (B, T, C) of `idx` (B, T)."""
        codes = self.codes[idx]
        before = codes.new_zeros(len(idx), 3) if cache is None else cache.codes
        codes = torch.cat((before, codes), dim=1)
        if cache is not None:
            cache.codes = codes[:, -3:]
        last = codes.unfold(1, 4, 1)[:, :, None]  # (B, T, 1, 4), oldest first
        rows = (last * self.factors).sum(3) % self.rows  # (B, T, 2)
        rows[..., 1] += self.rows  # in the second table
        return F.embedding(rows, self.weight).sum(2)


class LayerNorm(nn.LayerNorm):
    """Layer normalization, with weights."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square normalization, without weights, as in nanochat."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x)


def make_norm(config: CompleteGPTConfig) -> nn.Module:
    return RMSNorm() if config.arch == "modern" else LayerNorm(config.n_embd, bias=config.bias)


def rotary(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al., "RoFormer", 2021): cosines and sines, float32 (length, D / 2) each, for the
    positions below `length`.
    """
    half = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = position[:, None] * ROPE_BASE ** -(half / width)
    return angle.cos(), angle.sin()


# Cached: recomputing it for each character would take 5 % of `generate`.
rotary_table = functools.lru_cache(4)(rotary)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention (Vaswani et al., 2017)."""

    def __init__(self, config: CompleteGPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.attn_pdrop = config.attn_pdrop
        self.resid_pdrop = config.resid_pdrop
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        pdrop = self.attn_pdrop if self.training else 0.0
        y = ops.causal_attention(self.c_attn(x), self.n_head, rotation, cache, pdrop)
        return ops.dropout(self.c_proj(y), self.resid_pdrop, self.training)


class MLP(nn.Module):
    """Feed-forward network of hidden size 4 C, with GELU or squared ReLU."""

    def __init__(self, config: CompleteGPTConfig):
        super().__init__()
        self.activation = ops.squared_relu if config.arch == "modern" else ops.gelu
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.resid_pdrop = config.resid_pdrop

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.c_fc(x))
        return ops.dropout(self.c_proj(x), self.resid_pdrop, self.training)


class TokenShift(nn.Module):
    """Token shift (RWKV, Peng et al., 2023): adds the previous position, scaled per channel."""

    def __init__(self, config: CompleteGPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        if cache is None:
            return ops.token_shift(x, self.weight)
        last, cache.last = cache.last, x[:, -1:]
        return ops.token_shift(x, self.weight, last)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (pre-norm)."""

    def __init__(self, config: CompleteGPTConfig):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.shift = TokenShift(config) if config.token_shift else None
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation, cache)
        y = self.ln_2(x)
        if self.shift is not None:
            y = self.shift(y, cache)
        return x + self.mlp(y)


class GPT(nn.Module):
    """GPT, a decoder-only transformer. Raises `UserError` if a size or a dropout of `config` is still None."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = complete = config.complete()
        self.tok_emb = Embedding(complete.vocab_size, complete.n_embd)
        is_gpt2 = complete.arch == "gpt2"
        self.pos_emb = Embedding(complete.block_size, complete.n_embd) if is_gpt2 else None
        self.ngrams = NgramEmbedding(complete) if complete.ngram_rows else None
        self.blocks = nn.ModuleList(Block(complete) for _ in range(complete.n_layer))
        self.ln_f = make_norm(complete)
        self.head = Linear(complete.n_embd, complete.vocab_size, bias=False)
        if complete.tie_weights:
            self.head.weight = self.tok_emb.weight
        self.softcap = 0 if is_gpt2 else SOFTCAP
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Sets the initial weights, from torch's global generator. A parameter not named `weight` or `bias` keeps its
        own values; under FSDP, it has none, and `UserError` is raised.
        """
        if self.ngrams is not None:
            self.ngrams.init_buffers()
        for name, parameter in self.named_parameters():
            if name.endswith((".weight", ".bias")):
                if not parameter.is_meta:
                    full = self.initial_weights(name, parameter.shape)
                    parameter.copy_(sharding.shard_like(full, parameter))
            elif parameter.is_meta:
                raise UserError(f"{name}: FSDP constructs parameters without values; set its own in GPT.init_weights")

    def initial_weights(self, name: str, shape: torch.Size) -> Tensor:
        """Initial weights of a parameter, unsharded, on the CPU: the same on any device and world size. Norms are 1,
        biases and `TokenShift` 0; for the matrices, comments name the source.
        """
        full = torch.empty(shape, device="cpu")
        onto_residual_stream = name.endswith("c_proj.weight")
        if len(shape) < 2:
            is_norm = name.endswith("weight") and ".shift." not in name
            return full.fill_(1.0 if is_norm else 0.0)
        if name == "ngrams.weight":  # no effect at first
            return full.zero_()
        if self.config.arch == "gpt2":  # Radford et al., 2019, section 2.3
            scale = math.sqrt(2 * self.config.n_layer) if onto_residual_stream else 1.0
            return full.normal_(std=0.02 / scale)
        if onto_residual_stream or name == "head.weight":  # from here as in karpathy/nanochat
            return full.zero_()
        if "emb" in name:
            return full.normal_()
        limit = math.sqrt(3 / self.config.n_embd)  # deviation C^-1/2
        return full.uniform_(-limit, limit)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: list[LayerCache] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) in float32 for `idx` (B, T) int64, and if `targets` (B, T) are given, the mean cross-entropy
        in nats over those that are not -1 (as in minGPT). Do not take the gradient of this loss with
        respect to the returned logits: a kernel computes both from uncapped ones. With a `cache`, `idx` follows the
        characters in it. Raises ValueError if the context would exceed `block_size`.
        """
        (_, T), block_size = idx.shape, self.config.block_size
        past = cache[0].length if cache is not None else 0
        if past + T > block_size:
            raise ValueError(f"{past + T} characters of context, but block_size is {block_size}")
        x = self.tok_emb(idx)  # (B, T, C)
        if self.ngrams is not None:
            x = x + self.ngrams(idx, None if cache is None else cache[0])
        if self.pos_emb is not None:
            x = x + self.pos_emb.weight[past : past + T]
        x = ops.dropout(x, self.config.embd_pdrop, self.training)
        if torch.is_autocast_enabled(x.device.type):
            # Cast the residual stream: otherwise each addition would promote it to float32.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rotation: Rotation = None
        if self.config.arch == "modern":
            x = ops.rms_norm(x)
            width = self.config.n_embd // self.config.n_head
            if cache is None:
                rotation = rotary(T, width, x.device)
            else:
                cos, sin = rotary_table(block_size, width, x.device)
                rotation = cos[past : past + T], sin[past : past + T]
        recompute = self.config.activation_checkpointing and torch.is_grad_enabled() and cache is None
        for i, block in enumerate(self.blocks):
            if recompute:
                x = checkpoint(block, x, rotation, use_reentrant=False)
            elif targets is not None and cache is None:
                x = block(x, rotation)
            else:  # past torch.compile, which replaces `__call__` alone: each new length would be compiled
                x = block._call_impl(x, rotation, None if cache is None else cache[i])
        logits = self.head(self.ln_f(x))  # (B, T, V)
        if targets is None:
            return ops.cap(logits, self.softcap), None
        return ops.cross_entropy(logits, targets, self.softcap)

    def compile(self, *args, **kwargs) -> None:
        """Compiles each block instead of the whole model. Blocks share the compiled code, which halves compile time;
        steps are at most 5 % slower.
        """
        for block in self.blocks:
            block.compile(*args, **kwargs)

    def flops_per_character(self) -> float:
        """Floating-point operations of training per character (Chowdhery et al., "PaLM", 2022,
        appendix B): 6 per weight of a matrix, 12 L C T for attention, none for look-ups.
        """
        parameters = [*self.blocks.parameters(), self.head.weight]
        matrices = sum(p.numel() for p in parameters if p.dim() == 2)
        return 6 * matrices + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    # generate(idx, max_new_tokens, ...) -> (B, T + max_new_tokens); `stream` yields the ids
    generate, stream = generation.generate, generation.stream
