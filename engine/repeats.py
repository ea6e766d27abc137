"""Repeats: how much of a held-out text stands word for word in the training text."""

import logging
import math
import time
from typing import Protocol

import numpy as np
import torch

from engine.config.schema import DataConfig
from engine.text.documents import separator_text

log = logging.getLogger("gpt")
SECONDS = 2.0  # for a search, or 3 % of the time limit of the run if that is less
MOSTLY_REPEATED = 0.5  # share of the held-out text that stands in the training text
REPEATED = "The held-out loss is mostly that of text trained on: is a text in data.path twice?"
FINAL_REPEATED = "The final loss is mostly that of text trained on: is data.test_path also in data.path?"
MOST_WITH_DOCUMENTS = 2**23  # characters of a text whose documents are compared, which takes a third of a second
WINDOW = 64  # characters; what two texts share by chance is shorter
MOST_WINDOWS = 100_000  # of the held-out text
CHUNK = 2**19  # characters of the training text at once
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
SLOTS = 2**22  # of a table by hash, in which most windows differ: one look-up each


class Encoded(Protocol):
    """A text as ids, the positions of its characters in a vocabulary: a `CharDataset`."""

    config: DataConfig
    data: torch.Tensor
    vocabulary: str

    def decode(self, ids: torch.Tensor) -> str: ...


def find_repeats(train: Encoded, held_out: Encoded, max_minutes: float | None, is_final: bool = False) -> float:
    """The share of the held-out text that stands word for word in the training text: logged from 1 % on, with a warning
    from a half on. In ordinary logs, tables and code it is about a tenth. `is_final`: of the text of data.test_path.
    """
    share, searched = known_share(held_out, train, min(SECONDS, 0.03 * 60 * (max_minutes or math.inf)))
    of = f"; {searched:.0%} of that text was searched" if searched < 1 else ""
    if share >= 0.01:
        log.info(
            "repeats     %.0f %% of the %s text is also in the training text, word for word%s",
            100 * share, "final" if is_final else "held-out", of,
        )  # fmt: skip
    if share >= MOSTLY_REPEATED:
        log.warning("%s", FINAL_REPEATED if is_final else REPEATED)
    return share


def known_share(held_out: Encoded, text: Encoded, seconds: float = SECONDS) -> tuple[float, float]:
    """The share of the held-out text that stands word for word in `text`, in pieces of it (`repeated_share`) or, if
    documents are separated, in whole ones; and the share of `text` that was searched, within about `seconds`.
    """
    share, searched = repeated_share(held_out, text, seconds)
    end, own_end = (separator_text(each.config.separator) for each in (text, held_out))
    if end and own_end and max(len(text.data), len(held_out.data)) <= MOST_WITH_DOCUMENTS:
        known, own = {*text.decode(text.data).split(end)}, held_out.decode(held_out.data).split(own_end)
        share = max(share, sum(len(each) for each in own if each in known) / max(1, sum(map(len, own))))
    return share, searched


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
