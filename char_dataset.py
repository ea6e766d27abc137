"""Text for a character-level model: vocabulary, split, windows, their order, and batches of them.

    dataset = CharDataset(DataConfig(path="data/input.txt", block_size=128))
    train_dataset, test_dataset = dataset.split()

A text is encoded once, into the smallest unsigned integer type that holds its vocabulary, and cut
into batches by one vectorized gather. Large texts are memory-mapped.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import Dataset

from engine.config.schema import DataConfig
from engine.errors import UserError
from engine.kernels.ops import IGNORE
from engine.run.dataset import Windows
from engine.run.plan import MicroBatch, Plan
from engine.text.documents import from_text, to_text, unit_of
from engine.text.encoding import open_text

MAX_COUNTED = 2**26  # characters


class CharDataset(Dataset):
    """All windows of `block_size` characters of a text: `dataset[i]` is `(x, y)`, int64 of shape `(block_size,)` each,
    `y` being `x` one character later. Raises `UserError` for a text that is missing, empty, too short, or in another
    encoding.

    Attributes:
        vocabulary: the distinct characters of the text, sorted; positions are ids (`stoi`, `itos`, as in minGPT).
        data: the ids of the text, 1-D, uint8, uint16 or uint32. If large, memory-mapped: never copy all of it.
        digest: SHA-256 of the text, as truncated and shuffled; hexadecimal.
        unit: what an id stands for, "character" or "byte".
    """

    def __init__(self, config: DataConfig):
        self.block_size = config.block_size or 1  # until it is chosen
        self.vocabulary, self.data, self.digest, separator, self.parts = open_text(config)
        used, held_out, _ = self.parts
        self.in_sight = used + held_out  # characters of data.path and data.val_path
        if held_out:
            config = replace(config, train_split=used / self.in_sight)
        self.config = config = replace(config, separator=separator)
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
            split = " or another data.train_split" * (self.config.val_path is None)
            raise UserError(
                f"data.block_size={self.block_size}: the {name} has {len(self.data):,} characters{share}, "
                f"but a window needs {self.block_size + 1:,}; use a longer text, a smaller data.block_size{split}"
            )

    def split(self) -> tuple["CharDataset", "CharDataset"]:
        """(training part, held-out part): the text cut once at `int(characters * train_split)`, or where the text of
        `data.val_path` begins, before windowing, so that no character is in both; both have the vocabulary of the whole
        text. Raises `UserError` if either part is shorter than one window.
        """
        share = self.config.train_split
        if share is None or self.config.block_size is None:
            name = "train_split" if share is None else "block_size"
            raise UserError(f"data.{name}=null: main.py chooses it; give CharDataset a number")
        final = self._final_start()
        cut, end = self.config.held_out or (self.parts[0] if self.parts[1] else int(self.in_sight * share), final)
        if not 0 <= cut <= end <= final:
            raise UserError(f"data.held_out=[{cut},{end}]: must be a part of the first {final:,} characters")
        train, held_out = self._part(0, cut), self._part(cut, end)
        if end < final:  # held out in the middle of the text
            train.data = torch.cat((train.data, self.data[end:final]))
        train._check_length("training part")
        held_out._check_length("held-out part")
        return train, held_out

    def final_part(self) -> "CharDataset | None":
        """The final part, the last `final_split` of the text, in neither part of `split`; None if 0. Raises `UserError`
        if it is shorter than two characters.
        """
        if not self.config.final_split and not self.parts[2]:
            return None
        final = self._part(self._final_start(), len(self.data))
        if len(final.data) < 2:
            name = "test_path" if self.parts[2] else "final_split"
            raise UserError(f"data.{name}={getattr(self.config, name)}: too short to be scored")
        return final

    def _final_start(self) -> int:
        return self.in_sight if self.parts[2] else len(self.data) - int(len(self.data) * self.config.final_split)

    def _part(self, start: int, end: int) -> "CharDataset":
        part = copy.copy(self)
        part.data = self.data[start:end]
        vars(part).pop("counts", None)
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

    def begins_with(self, length: int, digest: str) -> bool:
        """Whether `digest` is the SHA-256 of the first `length` characters."""
        hashed = hashlib.sha256()
        for ids in self.data[:length].split(2**20):
            hashed.update(self._characters(ids).encode())
        return hashed.hexdigest() == digest

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        """How often each character occurs, int64 of shape (vocab_size,), in the first `MAX_COUNTED` ones."""
        pieces = self.data[:MAX_COUNTED].cpu().split(2**20)
        return torch.stack([ids.long().bincount(minlength=self.vocab_size) for ids in pieces]).sum(dim=0)

    def unseen_share(self, train: "CharDataset") -> float:
        """The fraction of these characters that do not occur in `train`, or 0 if that is too long to count."""
        share = self.counts[train.counts == 0].sum() / self.counts.sum()
        return share.item() if len(train.data) <= MAX_COUNTED else 0.0

    def unigram_loss(self, train: "CharDataset") -> float:
        """Cross-entropy of these characters, in nats, of an add-one-smoothed unigram model of `train`."""
        frequency = (train.counts + 1.0).double() / (train.counts + 1).sum()
        return -(self.counts.double() / self.counts.sum() * frequency.log()).sum().item()

    def encode(self, text: str) -> torch.Tensor:
        """The ids of `text`, int64, one for each character, or for each byte of its UTF-8. Raises `UserError` for
        an unknown one.
        """
        encoding = self.config.encoding
        return encode(from_text(text, encoding), self.vocabulary, encoding)

    def decode(self, ids) -> str:
        """The inverse of `encode`; bytes that are not UTF-8 become U+FFFD."""
        ids = torch.as_tensor(ids, dtype=None if len(ids) else torch.int64)  # of an empty list, it would be float32
        return to_text(self._characters(ids), self.config.encoding)

    def _characters(self, ids: torch.Tensor) -> str:
        points = np.frombuffer(self.vocabulary.encode("utf-32-le"), np.uint32)
        return points[ids.cpu().numpy()].tobytes().decode("utf-32-le")


def encode(text: str, vocabulary: str, encoding: str) -> torch.Tensor:
    """The ids of `text`, int64 of shape (len(text),): positions in `vocabulary`. With the `encoding` "bytes" the
    characters of both are bytes. Raises `UserError`, naming the first unknown character.
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
    shown = f"0x{ord(character):02x}" if unit == "byte" else f"{character!r} (U+{ord(character):04X})"
    where = f"at position {text.index(character)}"
    raise UserError(f"{unit} {shown} {where} is not among the {len(vocabulary)} {unit}s of the training text")


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

# Steps and windows per call of `window_order`, at most: a few steps cost little more than one.
ORDER_STEPS, ORDER_WINDOWS = 64, 2**16


class MicroBatches:
    """Item k is the k-th micro-batch `(x, y, weight)` of `rank`, counted from the start of the run, on `device`.
    Prefetch: with `workers`, as many threads prepare the next ones.

    A step takes the next `batch_size` windows of the stream, and splits them in order into `world_size * accumulation`
    micro-batches, `accumulation` per rank, whose sizes differ by at most one window. The run's first
    window is at `plan.first_position` of the stream.

    The weight is windows * world_size / batch_size: a rank's weighted mean losses, summed, then averaged over ranks,
    are the mean over the step's windows. An empty micro-batch computes the next window with weight 0, so that all ranks
    run the same collectives.
    """

    def __init__(
        self,
        dataset: Windows,
        seed: int,
        plan: Plan,
        rank: int = 0,
        workers: int = 0,
        device: torch.device | None = None,
    ):
        self.dataset, self.seed, self.plan, self.rank = dataset, seed, plan, rank
        self.workers, self.device = workers, device or torch.device("cpu")
        self.chunk_steps = max(1, min(ORDER_STEPS, ORDER_WINDOWS // plan.batch_size))
        # Two chunks: prefetch threads may be cutting batches of one and of the next.
        self.chunk_order = functools.lru_cache(maxsize=2)(self._chunk_order)
        self.pool = ThreadPoolExecutor(workers, "batches") if workers else None
        self.ahead: dict[int, Future[MicroBatch]] = {}

    def __getitem__(self, k: int) -> MicroBatch:
        if self.pool is None:
            x, y, weight = self._cut(k)
        else:
            for i in range(k, k + 2 * self.workers):
                if i not in self.ahead:
                    self.ahead[i] = self.pool.submit(self._cut, i)
            x, y, weight = self.ahead.pop(k).result()
        is_cuda = self.device.type == "cuda"
        return x.to(self.device, non_blocking=is_cuda), y.to(self.device, non_blocking=is_cuda), weight

    def close(self) -> None:
        """Ends the threads, until the next micro-batch."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool, self.ahead = ThreadPoolExecutor(self.workers, "batches"), {}

    def _cut(self, k: int) -> MicroBatch:
        plan = self.plan
        step, i = divmod(k, plan.accumulation)
        # Of the step's windows, those from `first` to `last` (exclusive).
        parts, part = plan.world_size * plan.accumulation, self.rank * plan.accumulation + i
        first, last = plan.batch_size * part // parts, plan.batch_size * (part + 1) // parts
        chunk, step_in_chunk = divmod(step, self.chunk_steps)
        start = step_in_chunk * plan.batch_size
        windows = self.chunk_order(chunk)[start + first : start + max(last, first + 1)]
        x, y = self.dataset.batch(windows)
        if self.pool is not None and self.device.type == "cuda":  # pinned memory is copied asynchronously
            x, y = x.pin_memory(), y.pin_memory()
        return x, y, (last - first) * plan.world_size / plan.batch_size

    def _chunk_order(self, chunk: int) -> torch.Tensor:
        """Window indices of `chunk_steps` steps, int64, on the device of the text."""
        size = self.chunk_steps * self.plan.batch_size
        positions = np.arange(chunk * size, (chunk + 1) * size) + self.plan.first_position
        order = window_order(positions, len(self.dataset), self.seed, self.dataset.block_size)
        return torch.from_numpy(order).to(self.dataset.data.device, non_blocking=True)


def move_if_small(datasets: Sequence[Windows], device: torch.device) -> None:
    """Moves the texts to the GPU if they fit into a tenth of its memory; batches are then gathered there."""
    memory = torch.cuda.get_device_properties(device).total_memory
    if sum(dataset.data.nbytes for dataset in datasets) <= memory / 10:
        for dataset in datasets:
            dataset.data = dataset.data.to(device)
