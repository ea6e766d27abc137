"""Held-out text that stands word for word in the training text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import repeats
from engine.repeats import WINDOW, find_repeats, repeated_share


def encoded(text: str) -> SimpleNamespace:
    vocabulary = "".join(sorted(set(text)))
    data = torch.tensor([*map(vocabulary.index, text)], dtype=torch.uint8)
    return SimpleNamespace(data=data, vocabulary=vocabulary, config=SimpleNamespace(separator="none"))


@pytest.mark.parametrize("chunk", [1, 7, 500, 10_000])
def test_the_share_of_repeated_windows_is_exact_whatever_the_chunks_and_vocabularies(chunk, monkeypatch):
    monkeypatch.setattr(repeats, "CHUNK", chunk)
    draw = np.random.default_rng(0)
    for length, size in ((1000, 20), (700, 3), (WINDOW, 1), (WINDOW - 1, 2), (300, 0)):
        train = "".join(draw.choice([*"ab\n"], length))
        held_out = "".join(draw.choice([*"ab\u20ac"], WINDOW * size))
        for i in range(0, size, 3):  # copies, one of which is off by a character
            start = draw.integers(0, max(length - WINDOW, 0) + 1)
            copied = train[start : start + WINDOW]
            held_out = held_out[: i * WINDOW] + copied + held_out[i * WINDOW + len(copied) :]
        windows = [held_out[i : i + WINDOW] for i in range(0, WINDOW * size, WINDOW)]
        expected = sum(window in train for window in windows) / max(size, 1)
        assert repeated_share(encoded(held_out), encoded(train), 60.0) == (pytest.approx(expected), 1.0)


def test_a_search_that_is_out_of_time_says_how_much_was_searched(monkeypatch):
    monkeypatch.setattr(repeats, "CHUNK", 100)
    text = encoded("".join(np.random.default_rng(0).choice([*"abcd"], 1000)))
    assert repeated_share(text, text, -1.0) == (0.0, 0.0)


@pytest.mark.parametrize("is_final", [False, True])
def test_text_that_is_mostly_repeated_gets_a_warning(is_final, caplog):
    text = encoded("".join(np.random.default_rng(0).choice([*"abcd"], 1000)))
    assert find_repeats(text, text, None, is_final) == 1.0
    assert ("The final loss is mostly that of text trained on: is data.test_path" in caplog.text) == is_final
