import hashlib
import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from char_dataset import IGNORE, CharDataset, DataConfig, window_order
from engine.errors import UserError


def test_windows_are_stride_1_and_targets_are_one_character_later(text_file):
    text = text_file.read_text()
    data = CharDataset(DataConfig(path=str(text_file), block_size=8))
    assert len(data) == len(text) - 8
    assert data.vocab_size == len(set(text)) and data.block_size == 8
    assert [data.itos[i] for i in range(data.vocab_size)] == sorted(set(text))
    for i in (0, 1, 777, len(data) - 1, -1):
        x, y = data[i]
        i %= len(data)
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (8,)
        assert data.decode(x) == text[i : i + 8] and data.decode(y) == text[i + 1 : i + 9]
        assert torch.equal(data.encode(text[i : i + 8]), x)
    with pytest.raises(IndexError):
        data[len(data)]


def test_the_text_is_truncated_then_cut_once_before_windowing(text_file):
    text = text_file.read_text()[:1000]
    data = CharDataset(DataConfig(path=str(text_file), block_size=8, truncate=0.5, train_split=0.83))
    train, test = data.split()
    assert train.decode(train.data) == text[:830] and test.decode(test.data) == text[830:]
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(text)))
    assert train.digest == test.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("block_size", [1, 7, 8, 199])
def test_evaluation_windows_score_every_held_out_character_but_the_first_once(text_file, block_size):
    _, test = CharDataset(DataConfig(path=str(text_file), block_size=block_size)).split()
    x, y = test.eval_windows(0, test.num_eval_windows)
    assert x.shape == y.shape == (test.num_eval_windows, block_size)
    assert torch.equal(y[y != IGNORE], test.data[1:].long())
    assert torch.equal(x[y != IGNORE], test.data[:-1].long())
    past_x, past_y = test.eval_windows(test.num_eval_windows, test.num_eval_windows + 2)
    assert (past_y == IGNORE).all() and past_x.shape == (2, block_size)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(-50, 50), st.sampled_from([1, 7, 64]))
@example(1, 0, 0, 1024)
@example(961, 0, 0, 63)  # a square, and a stride that does not divide it
def test_every_epoch_is_a_permutation_of_all_windows(num_windows, seed, epoch, stride):
    positions = np.arange(epoch * num_windows, (epoch + 1) * num_windows)
    order = window_order(positions, num_windows, seed, stride)
    assert sorted(order) == list(range(num_windows))


def test_every_pass_of_an_epoch_takes_each_character_once():
    n, stride = 1777, 32
    order = window_order(np.arange(3 * n), n, seed=3, stride=stride).reshape(3, n)
    firsts = []
    for epoch in order:
        while len(epoch):
            first = epoch[0] % stride
            firsts.append(first)
            size = len(range(first, n, stride))
            assert sorted(epoch[:size]) == list(range(first, n, stride))
            epoch = epoch[size:]
    assert [sorted(firsts[i : i + stride]) for i in (0, 32, 64)] == [list(range(stride))] * 3
    assert firsts[:32] != firsts[32:64] and firsts[:32] != sorted(firsts[:32])


@pytest.mark.parametrize("stride", [1, 64])
def test_epochs_and_seeds_are_ordered_differently_and_well_mixed(stride):
    n = 100_000
    orders = [window_order(np.arange(n) + start, n, seed, stride) for start, seed in ((0, 1), (n, 1), (0, 2))]
    natural = np.arange(n)
    for i, a in enumerate(orders):
        for b in [natural, *orders[:i]]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.02  # 6 standard deviations of chance
            assert (a == b).sum() < 12  # chance expects one
        assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.02  # neighbours
        share = np.histogram(a[: n // 10], bins=20)[0] / (n // 200)
        assert share.min() > 0.7 and share.max() < 1.3  # the first tenth comes from everywhere


def test_every_pass_shuffles_in_an_order_of_its_own():
    n, stride = 64_000, 64
    order = window_order(np.arange(n), n, seed=1, stride=stride).reshape(stride, -1) // stride
    for a, b in itertools.pairwise(order):
        assert (a == b).sum() < 12 and abs(np.corrcoef(a, b)[0, 1]) < 0.2


@pytest.mark.parametrize("stride", [1, 128])
def test_a_billion_windows_are_mixed_without_repeats_in_little_memory(stride):
    """Of a fixed sample, to four standard deviations of chance."""
    n, bins = 10**9, 1000
    drawn, first = np.random.default_rng(7).integers(0, n, 10**5), np.arange(10**5)
    positions = np.unique(np.concatenate([first, drawn, n - 1 - first]))
    tracemalloc.start()
    order = window_order(positions, n, 11, stride)
    assert tracemalloc.get_traced_memory()[1] < 2**27  # not 8 GB
    tracemalloc.stop()
    assert len(np.unique(order)) == len(positions)
    assert order.min() >= 0 and order.max() < n

    for taken in (order[: 10**5], order):
        expected = len(taken) / bins
        chi_square = ((np.bincount(taken // (n // bins), minlength=bins) - expected) ** 2).sum()
        assert abs(chi_square / expected - (bins - 1)) < 4 * np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize(
    "length, train_split, part", [(16, 0.5, "training part"), (80, 0.9, "held-out part"), (8, 0.5, "text")]
)
def test_a_part_shorter_than_a_window_is_refused_by_name(length, train_split, part, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a" * length)
    with pytest.raises(UserError, match=f"data.block_size=8: the {part}.* has 8 characters"):
        CharDataset(DataConfig(path=str(path), block_size=8, train_split=train_split)).split()


def test_paths_are_kept_as_plain_text():
    kept = OmegaConf.to_container(OmegaConf.structured(DataConfig(path=["a.txt", 1984])))
    assert kept["path"] == ["a.txt", "1984"] and DataConfig(path=1984).path == "1984"


def test_a_split_with_null_sizes_is_refused(text_file):
    for null in ("block_size", "train_split"):
        dataset = CharDataset(DataConfig(path=str(text_file), **{null: None}))
        with pytest.raises(UserError, match=rf"data\.{null}=null"):
            dataset.split()


def test_the_final_part_is_in_neither_part_of_the_split(text_file):
    config = DataConfig(path=str(text_file), block_size=8, train_split=0.5, final_split=0.25)
    whole = CharDataset(config)
    train, held_out = whole.split()
    final = whole.final_part()
    parts = [part.decode(part.data) for part in (train, held_out, final)]
    assert "".join(parts) == text_file.read_text() and len(parts[2]) == len(whole.data) // 4
    with pytest.raises(UserError, match="must add up to less than 1"):
        DataConfig(path="x", train_split=0.9, final_split=0.1)


def test_unseen_share_and_unigram_loss(tmp_path):
    (tmp_path / "text.txt").write_text("aaab" * 10 + "abcd" * 5)
    config = DataConfig(path=str(tmp_path / "text.txt"), block_size=4, train_split=2 / 3)
    train, held_out = CharDataset(config).split()
    assert held_out.unseen_share(train) == 0.5
    counts = [31, 11, 1, 1]  # one more than seen
    assert held_out.unigram_loss(train) == pytest.approx(sum(-math.log(count / 44) for count in counts) / 4)
