"""Text for a character-level model: vocabulary, split, windows, and the order of training windows.

    CharDataset(DataConfig(path="data/input.txt", block_size=128))

A text is read once, encoded once into the smallest unsigned integer type that holds its vocabulary,
and cut into batches by one vectorised gather, without a loop over characters or windows in Python.
A text larger than memory stays on the disk, mapped into memory (`text_cache.py`).
"""

import hashlib
import math

import numpy as np
import torch
from torch.utils.data import Dataset

from engine.errors import UserError
from engine.text.encoding import EncodedText, open_text
from engine.text.sources import DataConfig

IGNORE = -1  # a target with this value is not scored; minGPT's convention


class CharDataset(Dataset):
    """Every window of `block_size` characters of a text, each with the characters that follow.

    `len(dataset) == characters - block_size`; `dataset[i]` is `(x, y)`, two int64 tensors of shape
    `(block_size,)`, `y` being `x` one character later. `batch(indices)` is the same for many
    windows at once. `split()` gives the training and the held-out part.

    Attributes:
        vocabulary: the distinct characters of the whole (truncated) text, sorted; their positions
            are the ids.
        stoi, itos: character to id and back, as in minGPT.
        data: the encoded characters, a 1-D tensor of uint8, uint16 or uint32. Of a large text it is
            mapped from a file and read only; never to be copied whole.
        digest: SHA-256 of the truncated text, hexadecimal: which text this is.

    `text` is used in place of what is at `config.path`, where it has been read already.

    Raises `UserError` for a text that is missing, empty, not UTF-8 or shorter than one window.
    """

    def __init__(self, config: DataConfig, text: str | None = None):
        found = open_text(config) if text is None else text
        if isinstance(found, str):
            found = encode_text(found[: int(len(found) * config.truncate)])
        if not len(found.data):
            raise UserError(
                f"data.path={config.path}: the text is empty (data.truncate={config.truncate})"
            )
        self._init(config, *found, name="text")

    def _init(
        self, config: DataConfig, vocabulary: str, data: torch.Tensor, digest: str, name: str
    ):
        if len(data) <= config.block_size:
            raise UserError(
                f"data.block_size={config.block_size}: the {name} has {len(data):,} characters, "
                "but a window needs "
                f"{config.block_size + 1:,}; use a longer text, a smaller data.block_size or "
                "another data.train_split"
            )
        self.config = config
        self.block_size = config.block_size
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.stoi = {character: i for i, character in enumerate(vocabulary)}
        self.itos = dict(enumerate(vocabulary))
        self.data = data
        self.digest = digest

    def split(self) -> tuple["CharDataset", "CharDataset"]:
        """(training part, held-out part): the text cut once at `int(characters * train_split)`,
        before windowing.

        No character is in both, and both have the vocabulary of the whole text. Raises `UserError`
        if either part is shorter than one window.
        """
        cut = int(len(self.data) * self.config.train_split)
        parts = []
        for name, data in (("training part", self.data[:cut]), ("held-out part", self.data[cut:])):
            part = CharDataset.__new__(CharDataset)
            part._init(self.config, self.vocabulary, data, self.digest, name)
            parts.append(part)
        return parts[0], parts[1]

    def to(self, device: torch.device | str) -> "CharDataset":
        """Moves the encoded text to `device`, so that batches are cut there; returns self."""
        self.data = self.data.to(device)
        return self

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        x, y = self.batch(np.array([index % len(self)]))
        return x[0], y[0]

    def batch(self, indices: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows `indices` (B,) as `(x, y)`, int64 of shape (B, block_size) each, on the device of
        the text.
        """
        starts = torch.as_tensor(indices, dtype=torch.int64).to(self.data.device, non_blocking=True)
        offsets = torch.arange(self.block_size + 1, device=self.data.device)
        windows = self._ids(starts[:, None] + offsets)  # (B, T + 1)
        # In one piece each: a GPU's driver copies only that without waiting.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def eval_windows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows `first` to `last` (excluded) of the text laid end to end: every character is a
        target once.

        Returns `(x, y)`, int64 of shape (last - first, block_size). What lies beyond the end of the
        text has the target `IGNORE`, so the last window may be a short one, and windows past the
        end are wholly ignored.
        """
        positions = torch.arange(
            first * self.block_size, last * self.block_size, device=self.data.device
        )
        end = len(self.data) - 1
        x = self._ids(positions.clamp(max=end - 1))
        y = self._ids((positions + 1).clamp(max=end)).masked_fill(positions >= end, IGNORE)
        return x.view(-1, self.block_size), y.view(-1, self.block_size)

    @property
    def num_eval_windows(self) -> int:
        """How many windows `eval_windows` has before they run off the end of the text."""
        return -(-(len(self.data) - 1) // self.block_size)

    def _ids(self, positions: torch.Tensor) -> torch.Tensor:
        # torch gathers from few unsigned types; a signed view has the same bits, and the mask
        # removes its sign.
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.data.element_size()]
        ids = self.data.view(signed)[positions].long()
        return ids if signed is torch.uint8 else ids & (256 ** self.data.element_size() - 1)

    def encode(self, text: str) -> torch.Tensor:
        """The ids of `text`, int64 of shape (len(text),). Raises `UserError` naming a character it
        does not know.
        """
        return encode(text, self.vocabulary)

    def decode(self, ids) -> str:
        """The text of a sequence of ids."""
        return "".join(self.itos[int(i)] for i in ids)


def encode_text(text: str) -> EncodedText:
    """A text that is in memory, encoded."""
    codes = code_points(text)
    present = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    present[codes] = True
    distinct = np.flatnonzero(present)
    smallest = np.min_scalar_type(max(0, len(distinct) - 1))
    id_of_code = np.zeros(len(present), dtype=smallest)
    id_of_code[distinct] = np.arange(len(distinct), dtype=smallest)
    return EncodedText(
        "".join(map(chr, distinct)),
        torch.from_numpy(id_of_code[codes]),
        hashlib.sha256(text.encode("utf-8")).hexdigest(),
    )


def encode(text: str, vocabulary: str, start: int = 0) -> torch.Tensor:
    """The ids of `text`, int64, the positions of its characters in `vocabulary`; `UserError` names
    the first character that is not in it, and its position, `start` being that of the first.
    """
    codes, known = (code_points(characters) for characters in (text, vocabulary))
    order = np.argsort(known)
    places = np.searchsorted(known, codes, sorter=order)
    ids = order[np.minimum(places, len(known) - 1)]
    if len(unknown := np.flatnonzero(known[ids] != codes)):
        at = int(unknown[0])
        raise UserError(
            f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {start + at} is not in "
            f"the vocabulary of {len(vocabulary)}: {vocabulary[:200]!r}"
            f"{'...' * (len(vocabulary) > 200)}"
        )
    return torch.from_numpy(ids)


def code_points(text: str) -> np.ndarray:
    """The Unicode code points of `text`, uint32 of shape (len(text),)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


# --------------------------------------------------------------------------------------------------
# The order of training windows


def window_order(positions: np.ndarray, num_windows: int, seed: int, stride: int = 1) -> np.ndarray:
    """Which window stands at each of `positions` (int64) of the endless training stream.

    Position p lies in epoch `p // num_windows`, and every epoch takes all windows once. It is made
    of `stride` passes over the text, in random order, of windows that start `stride` characters
    apart, in random order: with the block size as the stride, a pass sees every character once,
    but for less than a window at either end, where windows drawn freely would miss a third of the
    text. benchmarks/experiments.md has what that is worth.

    The order is a pure function of (seed, epoch, position): nothing is stored, any position can be
    asked for, and neither the number of processes nor a restart can change it. The memory it takes
    does not depend on the number of windows.
    """
    positions = np.asarray(positions, dtype=np.int64)
    stride = min(stride, num_windows)
    epochs, value = np.divmod(positions, num_windows)
    order = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        key = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch))
        keys = _mix(key ^ np.arange(1, stride + 1, dtype=np.uint64))  # one a pass
        first = np.argsort(keys)  # window of each pass
        sizes = (num_windows - first + stride - 1) // stride
        ends = np.cumsum(sizes)
        number = np.searchsorted(ends, value[here], side="right")
        within = value[here] - (ends - sizes)[number]
        order[here] = first[number] + stride * _shuffled(
            within, sizes[number], keys[number], largest=-(-num_windows // stride)
        )
    return order


def _shuffled(value: np.ndarray, sizes: np.ndarray, keys: np.ndarray, largest: int) -> np.ndarray:
    """Where each value goes in the permutation of the numbers below its size that its key names.

    A Feistel network over a domain a x b barely larger than the `largest` size there is, which must
    not depend on what is asked for, walked until it falls inside (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002: methods "generalised Feistel" and "cycle walking"), with the
    mixer of SplitMix64 (Steele, Lea and Flood, 2014) as its round function.
    """
    side = math.isqrt(largest - 1) + 1
    a, b = np.uint64(side), np.uint64(-(-largest // side))
    value, sizes = value.astype(np.uint64), sizes.astype(np.uint64)
    value = _permute(value, a, b, keys)
    while (outside := value >= sizes).any():
        value[outside] = _permute(value[outside], a, b, keys[outside])
    return value.astype(np.int64)


def _permute(value: np.ndarray, a: np.uint64, b: np.uint64, key: np.ndarray) -> np.ndarray:
    left: np.ndarray = value // b
    right: np.ndarray = value % b
    # Each round adds a hash of one half to the other: a bijection.
    for round_number in range(0, 6, 2):
        left = (left + _mix(right ^ _mix(key + np.uint64(round_number))) % a) % a
        right = (right + _mix(left ^ _mix(key + np.uint64(round_number + 1))) % b) % b
    return left * b + right


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
