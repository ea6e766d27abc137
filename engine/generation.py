"""Autoregressive sampling with a KV cache.

    for ids in stream(model, idx, 500, do_sample=True, top_k=20, seed=7): ...

Of a model it uses the call `model(idx, cache=cache) -> (logits, loss)` and the sizes `n_layer`,
`n_head`, `n_embd` and `block_size` of its `config`. B: texts, T: characters, V: vocabulary.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.config.schema import CompleteGPTConfig
from engine.errors import UserError, check_range
from engine.precision import evaluating
from engine.text.documents import from_text, to_text

MIN_THREADED_WORK = 10_000_000  # texts x parameters, below which one CPU thread is faster


class LayerCache:
    """Keys and values of one layer, (B, H, block_size, D) each, of which `length` characters are filled.

    `last` (B, 1, C): the token shift's input at the previous position, initially zero. `codes` (B, 3), in the first
    layer only: the n-gram codes of the last three characters.
    """

    def __init__(self, config: CompleteGPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype):
        width = config.n_embd // config.n_head
        shape = batch_size, config.n_head, config.block_size, width
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.last = torch.zeros(batch_size, 1, config.n_embd, device=device, dtype=dtype)
        self.codes = torch.zeros(batch_size, 3, device=device, dtype=torch.int64)
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values (B, H, S, D); returns all so far, (B, H, length, D)."""
        start, self.length = self.length, self.length + key.size(2)
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def generate(model: torch.nn.Module, idx: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """Continues `idx` (B, T) as `stream` does, with its options: (B, T + max_new_tokens)."""
    with evaluating(model):  # once, not for each character
        new = [ids[:, None] for ids in stream(model, idx, max_new_tokens, **options)]
    return torch.cat((idx, *new), dim=1)


@torch.no_grad()
def stream(
    model: torch.nn.Module,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    do_sample: bool = False,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    first_row: int = 0,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yields the characters that continue `idx` (B, T >= 1), as they are drawn: the next id of each row, int64 (B,),
    `max_new_tokens` times. The model is in evaluation mode while it computes, and sees at most the last `block_size`
    characters: when the context is full, its last half is encoded again, and the cache grows from there.

    Args:
        do_sample: draw from the softmax of logits / `temperature`; otherwise, or if that is 0, take the likeliest.
        top_k: draw among the k likeliest.
        top_p: draw among the fewest whose probabilities reach p (Holtzman et al., 2019).
        seed: row i is drawn with a generator of (seed, first_row + i), so that it depends neither
            on the device nor on the batch, except for rounding. None: taken from torch's global
            generator, which is otherwise not used.
        use_cache: False recomputes the whole context for each character: the same result, slower.

    Raises `UserError`, a ValueError, at the first character, for an empty `idx` or an impossible value.
    """
    if idx.dim() != 2 or idx.size(1) == 0:
        raise UserError(f"generate: idx must have shape (B, T) with T >= 1, not {tuple(idx.shape)}")
    check_range("max_new_tokens", max_new_tokens, 0)
    check_range("temperature", temperature, 0)
    check_range("top_k", top_k, 1)
    check_range("top_p", top_p, above=0, high=1)
    config = cast(CompleteGPTConfig, model.config)
    B = len(idx)
    generators = []
    if do_sample and temperature > 0:
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        generators = [np.random.default_rng((seed, first_row + row)) for row in range(B)]
    device, dtype = idx.device, next(model.parameters()).dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    context = deque(idx[:, -config.block_size :].split(1, dim=1), maxlen=config.block_size)
    seen, cache = len(context), None  # characters that the model sees
    for _ in range(max_new_tokens):
        if seen > config.block_size:
            seen, cache = max(1, config.block_size // 2), None
        if cache is None:
            new = torch.cat([*context][-seen:], dim=1)
            layers = range(config.n_layer if use_cache else 0)
            cache = [LayerCache(config, B, device, dtype) for _ in layers] or None
        # Not while the caller has a character: it may train the model meanwhile.
        with evaluating(model) if model.training else contextlib.nullcontext():
            logits, _ = model(new, cache=cache)
        ids = pick(logits[:, -1], temperature, top_k, top_p, generators)
        yield ids
        new = ids[:, None]
        context.append(new)
        seen += 1


def pick(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generators: list[np.random.Generator]
) -> Tensor:
    """One id (B,) per row of `logits` (B, V), drawn with the row's generator, or the likeliest if
    there are no generators; see `stream`.
    """
    if not generators:
        return logits.argmax(dim=-1)
    logits = logits / max(temperature, 1e-30)  # less could overflow or underflow in float32
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability
        before[:, 0] = -1  # the likeliest is kept, even if top_p underflows
        excluded = before.scatter(1, order, before) >= top_p
        logits = logits.masked_fill(excluded, float("-inf"))
    # Exponential race: argmax(p / Exp(1)) is distributed as p; torch.multinomial does the same.
    times = np.empty(logits.shape)
    for generator, row in zip(generators, times, strict=True):
        generator.standard_exponential(out=row)
    return (logits.softmax(dim=-1) / torch.from_numpy(times).float().to(logits.device)).argmax(dim=-1)


@contextlib.contextmanager
def enough_threads(model: torch.nn.Module, num_texts: int) -> Iterator[None]:
    """A context that uses one thread if a step of `num_texts` texts is too little work for several."""
    threads = torch.get_num_threads()
    if num_texts * sum(p.numel() for p in model.get_submodule("blocks").parameters()) < MIN_THREADED_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def default_prompt(vocabulary: str) -> str:
    """A newline, or the first character of a model that has none."""
    return "\n" if "\n" in vocabulary else vocabulary[0]


def draw_samples(model: torch.nn.Module, vocabulary: str, encoding: str, separator: str = "") -> list[str]:
    """Draws two short texts from a model during training, always with the same seed; they follow the `separator`, if
    there is one. Changes no state. All ranks of a sharded model must call it.
    """
    num_texts, num_characters = 2, 120
    prompt = [vocabulary.index(character) for character in from_text(separator, encoding) or default_prompt(vocabulary)]
    idx = torch.tensor([prompt] * num_texts, device=next(model.parameters()).device)
    with enough_threads(model, num_texts):
        out = generate(model, idx, num_characters, temperature=0.8, do_sample=True, seed=1337)
    # A model may have more ids than characters, for its speed.
    drawn = ("".join(vocabulary[i : i + 1] or "?" for i in row[len(prompt) :]) for row in out.tolist())
    return [to_text(text, encoding) for text in drawn]
