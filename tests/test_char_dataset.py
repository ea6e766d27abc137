import hashlib

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from char_dataset import (
    IGNORE,
    PYDOC,
    SHAKESPEARE_SHA256,
    CharDataset,
    DataConfig,
    fetch,
    window_order,
)
from errors import UserError


def dataset(text: str, tmp_path, **config) -> CharDataset:
    path = tmp_path / "some.txt"
    path.write_bytes(text.encode())
    return CharDataset(DataConfig(path=str(path), **config))


# --- the tutorial's names ---


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
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_batch_is_its_windows(text_file):
    data = CharDataset(DataConfig(path=str(text_file), block_size=8))
    x, y = data.batch(np.array([5, 900, 5]))
    for row, i in enumerate((5, 900, 5)):
        assert torch.equal(x[row], data[i][0]) and torch.equal(y[row], data[i][1])


@pytest.mark.parametrize(
    "name, text, dtype",
    [
        ("chinese", "".join(chr(0x4E00 + i % 300) for i in range(900)), torch.uint16),
        ("spanish", "El niño comió piñas; ¿cuántas? ¡Muchísimas! " * 20, torch.uint8),
        ("emoji", "🙂🚀 é e\u0301 \U0010ffff\r\n\x00" * 60, torch.uint8),
        ("70,000 characters", "".join(map(chr, [*range(0x10000, 0x10000 + 70_000)])), torch.uint32),
    ],
)
def test_any_script_is_encoded_into_the_smallest_unsigned_type(name, text, dtype, tmp_path):
    data = dataset(text, tmp_path, block_size=4)
    assert data.data.dtype == dtype and data.vocab_size == len(set(text))
    i = len(data) - 1
    x, y = data.batch(np.array([0, i]))
    assert data.decode(x[0]) == text[:4] and data.decode(y[1]) == text[i + 1 : i + 5]
    assert data.decode(data.encode(text[:50])) == text[:50]


# --- split ---


def test_the_text_is_truncated_then_cut_once_before_windowing(text_file):
    text = text_file.read_text()[:1000]
    data = CharDataset(
        DataConfig(path=str(text_file), block_size=8, truncate=0.5, train_split=0.83)
    )
    train, test = data.split()
    assert train.decode(train.data) == text[:830] and test.decode(test.data) == text[830:]
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(text)))
    assert train.digest == test.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("block_size", [1, 7, 8, 199])
def test_tiles_score_every_held_out_character_but_the_first_once(text_file, block_size):
    _, test = CharDataset(DataConfig(path=str(text_file), block_size=block_size)).split()
    x, y = test.tiles(0, test.num_tiles)
    assert x.shape == y.shape == (test.num_tiles, block_size)
    assert torch.equal(y[y != IGNORE], test.data[1:].long())
    assert torch.equal(x[y != IGNORE], test.data[:-1].long())
    past_x, past_y = test.tiles(test.num_tiles, test.num_tiles + 2)
    assert (past_y == IGNORE).all() and past_x.shape == (2, block_size)


# --- order ---


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 50), st.sampled_from([1, 7, 64])
)
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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 100), st.integers(1, 700), st.integers(0, 10**6))
def test_the_order_is_a_function_of_the_position_alone(num_windows, stride, size, first):
    """Positions asked for in blocks, or one by one, give what they give together."""
    positions = np.arange(2000) + first
    whole = window_order(positions, num_windows, 3, stride)
    parts = [
        window_order(positions[i : i + size], num_windows, 3, stride) for i in range(0, 2000, size)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert window_order(positions[77:78], num_windows, 3, stride)[0] == whole[77]


@pytest.mark.parametrize("stride", [1, 64])
def test_epochs_and_seeds_are_ordered_differently_and_well_mixed(stride):
    n = 100_000
    orders = [
        window_order(np.arange(n) + start, n, seed, stride)
        for start, seed in ((0, 1), (n, 1), (0, 2))
    ]
    natural = np.arange(n)
    for i, a in enumerate(orders):
        for b in [natural, *orders[:i]]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.02  # 6 standard deviations of chance
            assert (a == b).sum() < 12  # chance expects one
        assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.02  # neighbours
        share = np.histogram(a[: n // 10], bins=20)[0] / (n // 200)
        assert share.min() > 0.7 and share.max() < 1.3  # the first tenth comes from everywhere


def test_the_order_of_a_billion_windows_costs_only_what_is_asked_for():
    order = window_order(np.arange(10**9 - 500, 10**9 + 500), 10**9, seed=1, stride=1024)
    assert order.min() >= 0 and order.max() < 10**9 and len(set(order[:500])) == 500


# --- getting a text ---


def test_a_text_is_read_through_fsspec():
    with fsspec.open("memory://texts/a.txt", "wb") as file:
        file.write("naïve text".encode() * 10)
    data = CharDataset(DataConfig(path="memory://texts/a.txt", block_size=4))
    assert data.decode(data.data) == "naïve text" * 10


def test_a_text_is_fetched_once_checked_and_moved_into_place_whole(text_file, tmp_path):
    digest = hashlib.sha256(text_file.read_bytes()).hexdigest()
    path = tmp_path / "new" / "input.txt"
    config = DataConfig(path=str(path), url=str(text_file), sha256=digest)
    assert fetch(config) == str(path) and path.read_bytes() == text_file.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["input.txt"]
    text_file.unlink()
    assert fetch(config) == str(path)  # is there: nothing to fetch


def test_a_text_with_another_digest_is_refused_and_not_kept(text_file, tmp_path):
    path = tmp_path / "input.txt"
    config = DataConfig(path=str(path), url=str(text_file), sha256="0" * 64)
    with pytest.raises(UserError, match=r"SHA-256 is [0-9a-f]{64}.*data.sha256=0{64}"):
        fetch(config)
    assert not path.exists()
    path.write_text("something else")
    with pytest.raises(UserError, match="SHA-256"):
        CharDataset(config)
    assert path.read_text() == "something else"


def test_only_a_text_that_has_a_fallback_falls_back(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    config = DataConfig(path=str(tmp_path / "input.txt"), url=nowhere, fallback=PYDOC)
    assert fetch(config) == PYDOC
    with pytest.raises(UserError, match="nowhere: no such file"):
        fetch(DataConfig(path=config.path, url=nowhere))


def test_the_embedded_text_needs_nothing():
    data = CharDataset(DataConfig(path=PYDOC))
    assert len(data.data) > 300_000 and data.vocab_size > 80


def test_shakespeare_is_the_text_that_its_digest_promises(shakespeare):
    config = DataConfig(path=str(shakespeare), sha256=SHAKESPEARE_SHA256)
    data = CharDataset(config)
    assert (len(data.data), data.vocab_size) == (1_115_394, 65)


# --- bad texts and settings ---


def test_invalid_utf_8_is_refused_with_its_offset(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xc3\xa9 text \xff and more")
    with pytest.raises(UserError, match=r"not UTF-8: byte 0xff at offset 13"):
        CharDataset(DataConfig(path=str(path), block_size=4))


def test_an_empty_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="empty"):
        dataset("", tmp_path)


@pytest.mark.parametrize(
    "length, train_split, part",
    [(16, 0.5, "training part"), (80, 0.9, "held-out part"), (8, 0.5, "text")],
)
def test_a_part_shorter_than_a_window_is_refused_by_name(length, train_split, part, tmp_path):
    with pytest.raises(UserError, match=f"data.block_size=8: the {part} has 8 characters"):
        dataset("a" * length, tmp_path, block_size=8, train_split=train_split).split()


@pytest.mark.parametrize(
    "setting",
    [
        {"train_split": 0.0},
        {"train_split": 1.0},
        {"truncate": 0.0},
        {"truncate": 1.5},
        {"block_size": 0},
    ],
)
def test_an_impossible_setting_is_named(setting):
    (name, value), *_ = setting.items()
    with pytest.raises(UserError, match=f"data.{name}={value}"):
        DataConfig(**setting)


def test_an_unknown_character_is_named(text_file):
    data = CharDataset(DataConfig(path=str(text_file), block_size=8))
    with pytest.raises(UserError, match=r"'É' \(U\+00C9\) at position 2"):
        data.encode("abÉ")
