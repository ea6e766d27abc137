"""Text for a character-level model: vocabulary, split, windows, their order, and batches of them.

    dataset = CharDataset(DataConfig(path="data/input.txt", block_size=128))
    train_dataset, test_dataset = dataset.split()

A text is encoded once, into the smallest unsigned integer type that holds its vocabulary, and cut
into batches by one vectorized gather. Large texts are memory-mapped.
"""

import copy
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING
from torch.utils.data import Dataset

from engine.errors import UserError, check_option, check_range
from engine.kernels.graph import MicroBatch
from engine.kernels.ops import IGNORE
from engine.run.plan import Plan
from engine.text import SHAKESPEARE_URL, from_text, open_text, to_text, unit_of

MAX_COUNTED = 2**26  # characters


@dataclass
class DataConfig:
    """Text, split and context."""

    # fmt: off
    path: Any = MISSING  # the text, UTF-8: a path, URL or pattern ('books/*.txt'), or a list of them; may be compressed
    url: str | None = None  # downloaded from here if path does not exist; null: path must exist
    sha256: str | None = None  # SHA-256 of the files, decompressed, hexadecimal; null: any text
    block_size: int | None = 128  # characters of context: the length of a window; null: chosen, see docs/own-text.md
    train_split: float | None = 0.9  # share of the text to train on, from its start; the rest is held out; null: chosen
    final_split: float = 0.0  # share of the text, at its end, that is scored once, after training
    truncate: float = 1.0  # share of the text to use, from its start
    shuffle: str | None = None  # lines, paragraphs or files: shuffle these before the split; null: keep the order
    encoding: str = "utf-8"  # utf-8; bytes: any file; each byte is a character of the model
    cache_dir: str = "data/cache"  # local directory for encoded copies of texts, except small local files
    # fmt: on

    def __post_init__(self):
        several = isinstance(self.path, list)
        paths = self.path if several else [self.path]
        if not paths or any(path in (None, "") or isinstance(path, list | dict) for path in paths):
            raise UserError(f"data.path={self.path}: must be a path or URL, or a list of these")
        paths = [os.path.expanduser(str(path)) for path in paths]
        self.path = paths if several else paths[0]
        if self.url == SHAKESPEARE_URL and self.path != "data/input.txt":
            raise UserError(
                f"data.path={self.path}: data.url and data.sha256 are those of data=shakespeare; for "
                f"another text: data=text data.path={self.path}"
            )
        if self.url is not None and several:
            raise UserError(f"data.url={self.url}: needs a single data.path; set data.url=null")
        check_range("data.block_size", self.block_size, 1)
        check_range("data.train_split", self.train_split, above=0, below=1)
        check_range("data.truncate", self.truncate, above=0, high=1)
        check_range("data.final_split", self.final_split, 0, below=1)
        if (self.train_split or 0) + self.final_split >= 1:
            raise UserError(
                f"data.train_split={self.train_split}, data.final_split={self.final_split}: must add up to less than 1"
            )
        if self.shuffle is not None:
            check_option("data.shuffle", self.shuffle, ("lines", "paragraphs", "files"))
        self.encoding = {"utf8": "utf-8"}.get(self.encoding.lower(), self.encoding.lower())
        check_option("data.encoding", self.encoding, ("utf-8", "bytes"))
        self.cache_dir = os.path.expanduser(self.cache_dir)
        if not self.cache_dir or "://" in self.cache_dir:
            raise UserError(f"data.cache_dir={self.cache_dir}: must be a local directory")


class CharDataset(Dataset):
    """All windows of `block_size` characters of a text: `dataset[i]` is `(x, y)`, int64 of shape `(block_size,)` each,
    `y` being `x` one character later. Raises `UserError` for a text that is missing, empty, not UTF-8 or too short.

    Attributes:
        vocabulary: the distinct characters of the text, sorted; positions are ids (`stoi`, `itos`, as in minGPT).
        data: the ids of the text, 1-D, uint8, uint16 or uint32. If large, memory-mapped: never copy all of it.
        digest: SHA-256 of the text, as truncated and shuffled; hexadecimal.
        unit: what an id stands for, "character" or "byte".
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.block_size = config.block_size or 1  # until it is chosen
        self.vocabulary, self.data, self.digest = open_text(config)
        self.vocab_size = len(self.vocabulary)
        self.unit = unit_of(config.encoding)
        self.stoi = {character: i for i, character in enumerate(self.vocabulary)}
        self.itos = dict(enumerate(self.vocabulary))
        self._check_length(f"text, {config.path},")

    def with_config(self, config: DataConfig) -> "CharDataset":
        """The same text with the `block_size` and the split of `config`."""
        dataset = copy.copy(self)
        dataset.config, dataset.block_size = config, config.block_size or 1
        return dataset

    def _check_length(self, name: str) -> None:
        if self.config.block_size is not None and len(self.data) <= self.block_size:
            used = self.config.truncate
            share = f" (data.truncate={used:g} leaves out the rest)" if used < 1 else ""
            raise UserError(
                f"data.block_size={self.block_size}: the {name} has {len(self.data):,} characters{share}, "
                f"but a window needs {self.block_size + 1:,}; use a longer text, a smaller "
                "data.block_size or another data.train_split"
            )

    def split(self) -> tuple["CharDataset", "CharDataset"]:
        """(training part, held-out part): the text cut once at `int(characters * train_split)`,
        before windowing, so that no character is in both; both have the vocabulary of the whole text.
        Raises `UserError` if either part is shorter than one window.
        """
        share = self.config.train_split
        if share is None or self.config.block_size is None:
            name = "train_split" if share is None else "block_size"
            raise UserError(f"data.{name}=null: main.py chooses it; give CharDataset a number")
        cut, end = int(len(self.data) * share), self._final_start()
        train, held_out = self._part(0, cut), self._part(cut, end)
        train._check_length("training part")
        held_out._check_length("held-out part")
        return train, held_out

    def final_part(self) -> "CharDataset | None":
        """The final part, the last `final_split` of the text, in neither part of `split`; None if 0. Raises `UserError`
        if it is shorter than two characters.
        """
        if not self.config.final_split:
            return None
        final = self._part(self._final_start(), len(self.data))
        if len(final.data) < 2:
            raise UserError(f"data.final_split={self.config.final_split}: too short to be scored")
        return final

    def _final_start(self) -> int:
        return len(self.data) - int(len(self.data) * self.config.final_split)

    def _part(self, start: int, end: int) -> "CharDataset":
        part = copy.copy(self)
        part.data = self.data[start:end]
        return part

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.batch(np.array([range(len(self))[index]]))  # IndexError ends iteration
        return x[0], y[0]

    def batch(self, indices: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows `indices` (B,) as `(x, y)`, int64 (B, block_size) each, on the device of the text."""
        starts = torch.as_tensor(indices, dtype=torch.int64).to(self.data.device, non_blocking=True)
        offsets = torch.arange(self.block_size + 1, device=self.data.device)
        windows = self._ids(starts[:, None] + offsets)  # (B, T + 1)
        # Contiguous: others are not copied to a GPU asynchronously.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def eval_windows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows `first` to `last` (exclusive) of the `num_eval_windows` non-overlapping ones. Every character but the
        first is a target once; past the end, the target is `IGNORE`.

        Returns `(x, y)`, int64 of shape (last - first, block_size).
        """
        size, end = self.block_size, len(self.data) - 1
        positions = torch.arange(first * size, last * size, device=self.data.device)
        x = self._ids(positions.clamp(max=end - 1))
        y = self._ids((positions + 1).clamp(max=end)).masked_fill(positions >= end, IGNORE)
        return x.view(-1, size), y.view(-1, size)

    @property
    def num_eval_windows(self) -> int:
        return -(-(len(self.data) - 1) // self.block_size)

    def _ids(self, positions: torch.Tensor) -> torch.Tensor:
        # torch gathers from few unsigned types; a signed view has the same bits, and the mask removes its sign.
        size = self.data.element_size()
        view = self.data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
        return view[positions].long() & (256**size - 1)

    def encode(self, text: str) -> torch.Tensor:
        """The ids of `text`, int64, one for each character, or for each byte of its UTF-8. Raises `UserError` for
        an unknown one.
        """
        encoding = self.config.encoding
        return encode(from_text(text, encoding), self.vocabulary, encoding)

    def decode(self, ids) -> str:
        """The inverse of `encode`; bytes that are not UTF-8 become U+FFFD."""
        return to_text("".join(self.itos[int(i)] for i in ids), self.config.encoding)


def unseen_share_and_unigram_loss(train: CharDataset, held_out: CharDataset) -> tuple[float, float]:
    """(fraction of held-out characters that do not occur in training, 0 if the training part is too long to count;
    held-out cross-entropy, in nats, of an add-one-smoothed unigram model). Counts the first `MAX_COUNTED` characters of
    each part.
    """
    trained, scored = (
        sum(ids.long().bincount(minlength=train.vocab_size) for ids in dataset.data[:MAX_COUNTED].cpu().split(2**20))
        for dataset in (train, held_out)
    )
    share = scored.double() / scored.sum()
    frequency = (trained + 1.0).double() / (trained + 1).sum()
    unseen = share[trained == 0].sum().item() if len(train.data) <= MAX_COUNTED else 0.0
    return unseen, -(share * frequency.log()).sum().item()


def encode(text: str, vocabulary: str, encoding: str) -> torch.Tensor:
    """The ids of `text`, int64 of shape (len(text),): positions in `vocabulary`. With the `encoding` "bytes" the
    characters of both are bytes.

    Raises `UserError` naming the first unknown character and its position.
    """
    # Bytes of a command line that are not UTF-8 arrive as surrogates.
    content = (part.encode("utf-32-le", "surrogatepass") for part in (vocabulary, text))
    known, points = (np.frombuffer(part, np.uint32) for part in content)
    id_of = np.full(0x110000, -1)  # of every code point
    id_of[known] = np.arange(len(known))
    ids = id_of[points]
    if (ids >= 0).all():
        return torch.from_numpy(ids)
    character, unit = text[int((ids < 0).argmax())], unit_of(encoding)
    code = f"0x{ord(character):02x}" if unit == "byte" else f"U+{ord(character):04X}"
    is_part = unit == "byte" and not character.isascii()  # of a multi-byte character
    shown = code if is_part else f"{character!r} ({code})"
    raise UserError(
        f"{unit} {shown} at position {text.index(character)} is not among the {len(vocabulary)} {unit}s of "
        "the training text"
    )


# --- the order of training windows ---


def window_order(positions: np.ndarray, num_windows: int, seed: int, stride: int = 1) -> np.ndarray:
    """Window indices at `positions` (int64, may be negative) of the shuffled, endless stream of training windows.

    An epoch of `num_windows` positions visits all windows once, in `stride` passes over the text, in random order. A
    pass visits the windows that start `stride` characters apart, in random order: with the block size as the stride, it
    sees every character once; independent draws would miss a third of the text (benchmarks/experiments.md).

    The order is a pure function of seed and position, so that neither the number of processes nor a
    restart changes it. Its memory does not depend on the number of windows.
    """
    positions = np.asarray(positions, dtype=np.int64)
    stride = min(stride, num_windows)
    epochs, within_epoch = np.divmod(positions, num_windows)
    order = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        epoch_key = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ epoch.astype(np.uint64))
        keys = _mix(epoch_key ^ np.arange(1, stride + 1, dtype=np.uint64))  # one per pass
        # Pass i visits the windows `offsets[i] + stride * k` for k below `sizes[i]`; the passes are in random order.
        offsets = np.argsort(keys)
        sizes = -(-(num_windows - offsets) // stride)
        ends = np.cumsum(sizes)
        passes = np.searchsorted(ends, within_epoch[in_epoch], side="right")
        within_pass = within_epoch[in_epoch] - (ends - sizes)[passes]
        k = _shuffled(within_pass, sizes[passes], keys[passes], largest=-(-num_windows // stride))
        order[in_epoch] = offsets[passes] + stride * k
    return order


def _shuffled(value: np.ndarray, sizes: np.ndarray, keys: np.ndarray, largest: int) -> np.ndarray:
    """Keyed pseudorandom permutation of the numbers below each size (Feistel, cycle walking).

    A Feistel network over a domain a x b barely larger than the `largest` size, repeated until the value is below its
    size (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), with the mixer of SplitMix64 (Steele, Lea
    and Flood, 2014) as its round function.
    """
    side = math.isqrt(largest - 1) + 1
    a, b = np.uint64(side), np.uint64(-(-largest // side))
    value, sizes = value.astype(np.uint64), sizes.astype(np.uint64)
    outside = np.full(len(value), True)
    while outside.any():
        left, right, key = value[outside] // b, value[outside] % b, keys[outside]
        # Each round adds a hash of one half to the other: a bijection.
        for number in range(0, 6, 2):
            left = (left + _mix(right ^ _mix(key + np.uint64(number))) % a) % a
            right = (right + _mix(left ^ _mix(key + np.uint64(number + 1))) % b) % b
        value[outside] = left * b + right
        outside = value >= sizes
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- batches ---

ORDER_STEPS = 64  # steps per call of `window_order`, at little more than the cost of one


class MicroBatches:
    """Item k is the k-th micro-batch `(x, y, weight)` of `rank`, counted from the start of the run.

    A step takes the next `batch_size` windows of the stream, and splits them in order into `world_size * accumulation`
    micro-batches, `accumulation` per rank, whose sizes differ by at most one window. The run's first
    window is at `plan.first_position` of the stream.

    The weight is windows * world_size / batch_size: a rank's weighted mean losses, summed, then averaged over ranks,
    are the mean over the step's windows. An empty micro-batch computes the next window with weight 0, so that all ranks
    run the same collectives.
    """

    def __init__(self, dataset: Any, seed: int, plan: Plan, rank: int = 0):
        self.dataset, self.seed, self.plan, self.rank = dataset, seed, plan, rank
        # Two chunks: prefetch threads may be cutting batches of one and of the next.
        self.chunk_order = functools.lru_cache(maxsize=2)(self._chunk_order)

    def __getitem__(self, k: int) -> MicroBatch:
        plan = self.plan
        step, i = divmod(k, plan.accumulation)
        # Of the step's windows, those from `first` to `last` (exclusive).
        parts, part = plan.world_size * plan.accumulation, self.rank * plan.accumulation + i
        first, last = plan.batch_size * part // parts, plan.batch_size * (part + 1) // parts
        chunk, step_in_chunk = divmod(step, ORDER_STEPS)
        start = step_in_chunk * plan.batch_size
        windows = self.chunk_order(chunk)[start + first : start + max(last, first + 1)]
        x, y = self.dataset.batch(windows)
        return x, y, (last - first) * plan.world_size / plan.batch_size

    def _chunk_order(self, chunk: int) -> torch.Tensor:
        """Window indices of `ORDER_STEPS` steps, int64, on the device of the text."""
        size = ORDER_STEPS * self.plan.batch_size
        positions = np.arange(chunk * size, (chunk + 1) * size) + self.plan.first_position
        order = window_order(positions, len(self.dataset), self.seed, self.dataset.block_size)
        return torch.from_numpy(order).to(self.dataset.data.device, non_blocking=True)


def prefetch(batches: MicroBatches, first: int, workers: int, device: torch.device) -> Generator[MicroBatch]:
    """Prefetch: yields micro-batches from `first` on, without end, on `device`, prepared two per thread ahead, or on
    demand without `workers`. Closing the generator ends its threads.
    """
    is_cuda = device.type == "cuda"

    def cut(k: int) -> MicroBatch:
        x, y, weight = batches[k]
        if is_cuda and workers:  # pinned memory is copied asynchronously
            x, y = x.pin_memory(), y.pin_memory()
        return x, y, weight

    def move(batch: MicroBatch) -> MicroBatch:
        x, y, weight = batch
        return x.to(device, non_blocking=is_cuda), y.to(device, non_blocking=is_cuda), weight

    if not workers:
        yield from (move(cut(k)) for k in itertools.count(first))
        return
    pool = ThreadPoolExecutor(workers, "batches")
    try:
        pending: deque[Future[MicroBatch]] = deque()
        for k in itertools.count(first):
            pending.append(pool.submit(cut, k))
            if len(pending) == 2 * workers:
                yield move(pending.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)


def move_if_small(datasets: list[Any], device: torch.device) -> None:
    """Moves the texts to the GPU if they fit into a tenth of its memory; batches are then gathered there."""
    memory = torch.cuda.get_device_properties(device).total_memory
    if sum(dataset.data.nbytes for dataset in datasets) <= memory / 10:
        for dataset in datasets:
            dataset.data = dataset.data.to(device)
