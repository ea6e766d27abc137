"""Repeats: how much of a held-out text stands word for word in the training text."""

import time
from typing import Protocol

import numpy as np
import torch

WINDOW = 64  # characters; what two texts share by chance is shorter
MOST_WINDOWS = 100_000  # of the held-out text
CHUNK = 2**19  # characters of the training text at once
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
SLOTS = 2**22  # of a table by hash, in which most windows differ: one look-up each


class Encoded(Protocol):
    """A text as ids, the positions of its characters in a vocabulary."""

    data: torch.Tensor
    vocabulary: str


def repeated_share(held_out: Encoded, train: Encoded, seconds: float) -> tuple[float, float]:
    """The share of the held-out windows of `WINDOW` characters, laid end to end, that occur anywhere in the training
    text; and the share of that text that was searched, chunks at random, within `seconds`.

    Windows are compared by a rolling hash (Karp and Rabin, 1987) modulo 2^64.
    """
    deadline = time.monotonic() + seconds
    number = len(held_out.data) // WINDOW
    chunks = -(-(len(train.data) - WINDOW + 1) // CHUNK)
    if number == 0 or chunks <= 0:
        return 0.0, 1.0
    powers, inverses = (
        np.cumprod(np.full(CHUNK + 2 * WINDOW, base, np.uint64)) for base in (BASE, pow(BASE, -1, 2**64))
    )
    starts = np.arange(0, number * WINDOW, WINDOW * -(-number // MOST_WINDOWS))
    windows = held_out.data.cpu().numpy()[starts[:, None] + np.arange(WINDOW)]
    wanted = mixed((code_points(held_out)[windows] * powers[WINDOW - 1 :: -1]).sum(axis=1, dtype=np.uint64))
    is_wanted = np.zeros(SLOTS, bool)
    is_wanted[wanted % SLOTS] = True
    found, codes, searched = np.zeros(0, np.uint64), code_points(train), 0
    for chunk in np.random.default_rng(0).permutation(chunks):
        if time.monotonic() > deadline:
            break
        first = chunk * CHUNK
        points = codes[train.data[first : first + CHUNK + WINDOW - 1].cpu().numpy()]
        # Sums of code point x BASE^-position: the hash of a window is the difference of two, times a power.
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(points * inverses[: len(points)], dtype=np.uint64)))
        hashes = mixed((sums[WINDOW:] - sums[:-WINDOW]) * powers[WINDOW : len(sums)])
        likely = hashes[is_wanted[hashes % SLOTS]]
        found = np.union1d(found, likely[np.isin(likely, wanted)])
        searched += 1
    return float(np.isin(wanted, found).mean()), searched / chunks


def code_points(text: Encoded) -> np.ndarray:
    """The code point of each id."""
    return np.array([ord(character) for character in text.vocabulary], np.uint64)


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Spreads the high bits over the low ones."""
    return hashes ^ (hashes >> np.uint64(31))
