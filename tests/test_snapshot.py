import dataclasses
import os
import random

import pytest
import torch

import snapshot as snapshots
from errors import UserError
from snapshot import (
    Snapshot,
    SnapshotError,
    beside,
    family,
    find,
    replace_latest,
    set_aside,
    verify,
)


def some(step: int = 5) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    weights = {
        "a.weight": torch.randn(4, 3, generator=generator),
        "b": torch.randn(7, generator=generator),
    }
    state = {
        "a.weight": {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn(4, 3, generator=generator),
        }
    }
    return Snapshot(
        weights,
        state,
        finished_epoch=2,
        step=step,
        windows_seen=60,
        seed=1,
        best_loss=1.5,
        best_step=4,
        vocabulary="\n aé漢",
        text_digest="ab",
        choices={"compile": False},
        config={"model": {"n_layer": 2, "bias": None}},
    )


def equal(a: Snapshot, b: Snapshot) -> bool:
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    return plain(dataclasses.asdict(a)) == plain(dataclasses.asdict(b))


def test_what_is_saved_is_loaded(tmp_path):
    path = str(tmp_path / "s.pt")
    some().save(path)
    assert equal(Snapshot.load(path), some())


def test_torch_reads_the_file_without_trusting_it(tmp_path):
    path = tmp_path / "s.pt"
    some().save(str(path))
    fields = torch.load(path, weights_only=True)
    assert set(fields) == {f.name for f in dataclasses.fields(Snapshot)}
    assert torch.equal(fields["model_state"]["b"], some().model_state["b"])


def test_any_flipped_bit_is_found():
    content = some().to_bytes()
    chance = random.Random(0)
    for position in sorted({0, len(content) - 1, *chance.sample(range(len(content)), 400)}):
        damaged = bytearray(content)
        damaged[position] ^= 1 << chance.randrange(8)
        with pytest.raises(SnapshotError):
            verify(bytes(damaged), "x.pt")


def test_any_missing_end_is_found():
    content = bytes(some().to_bytes())
    for length in {0, 1, 64, 71, *range(0, len(content), 97), len(content) - 1}:
        with pytest.raises(SnapshotError):
            verify(content[:length], "x.pt")
    with pytest.raises(SnapshotError):
        verify(content + b"x", "x.pt")


@pytest.mark.parametrize("content", [b"", b"not a snapshot", os.urandom(5000), b"PK\x03\x04" * 50])
def test_another_file_is_called_by_its_name(content, tmp_path):
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"other\.pt: not a whole snapshot"):
        Snapshot.load(str(path))
    with pytest.raises(SnapshotError, match=r"nothing\.pt: no such snapshot"):
        Snapshot.load(str(tmp_path / "nothing.pt"))


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = str(tmp_path / "s.pt")
    some(1).save(path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(snapshots.os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                some(2).save(path)
        assert equal(Snapshot.load(path), some(1))
    assert os.listdir(tmp_path) == ["s.pt"]


def test_the_one_before_the_latest_is_kept_and_used_if_the_latest_is_damaged(tmp_path):
    path, warnings = str(tmp_path / "s.pt"), []
    for step in (1, 2, 3):
        replace_latest(path, some(step).to_bytes())
    assert Snapshot.load(path).step == 3 and Snapshot.load(beside(path, "prev")).step == 2
    with open(path, "r+b") as file:
        file.truncate(100)
    content, where = find(path, warnings.append)
    assert where == beside(path, "prev") and Snapshot.from_bytes(content, where).step == 2
    assert len(warnings) == 1 and "s.pt: not a whole snapshot" in warnings[0]
    # The damaged one is set aside, and the next save does not put it in place of the good one.
    assert sorted(os.listdir(tmp_path)) == ["s.damaged1.pt", "s.prev.pt"]
    replace_latest(path, some(4).to_bytes())
    assert [Snapshot.load(p).step for p in (path, beside(path, "prev"))] == [4, 2]


def test_damaged_snapshots_alone_are_an_error_and_none_at_all_is_a_start(tmp_path):
    path = str(tmp_path / "s.pt")
    assert find(path, pytest.fail) is None
    with open(path, "wb") as file:
        file.write(b"gone")
    with pytest.raises(SnapshotError, match=r"no good snapshot left: .*s\.pt"):
        find(path, pytest.fail)


def test_setting_aside_renames_and_never_overwrites(tmp_path):
    path = str(tmp_path / "s.pt")
    for round_number in (1, 2):
        for step in (1, 2):
            replace_latest(path, some(10 * round_number + step).to_bytes())
        assert set_aside(family(path)) == [
            str(tmp_path / f"s.old{round_number}.pt"),
            str(tmp_path / f"s.prev.old{round_number}.pt"),
        ]
    assert set_aside(family(path)) == []
    assert Snapshot.load(str(tmp_path / "s.old1.pt")).step == 12
    assert Snapshot.load(str(tmp_path / "s.prev.old2.pt")).step == 21


def test_snapshots_live_in_any_file_system():
    path = "memory://runs/s.pt"
    for step in (1, 2):
        replace_latest(path, some(step).to_bytes())
    assert Snapshot.load(path).step == 2
    assert Snapshot.load("memory://runs/s.prev.pt").step == 1


def test_only_a_change_that_would_alter_the_run_is_refused():
    saved = some()
    saved.config = {"model": {"n_layer": 2}, "trainer": {"batch_size": 8, "max_steps": 5}}
    now = {"model": {"n_layer": 2}, "trainer": {"batch_size": 8, "max_steps": 9}}
    snapshots.check_can_resume(saved, now, saved.vocabulary, "ab", "s.pt")
    now["model"]["n_layer"] = 3
    now["trainer"]["batch_size"] = 4
    with pytest.raises(
        UserError, match=r"model.n_layer was 2, is 3; trainer.batch_size was 8, is 4.*run_name="
    ):
        snapshots.check_can_resume(saved, now, saved.vocabulary, "ab", "s.pt")
    with pytest.raises(UserError, match="text has SHA-256"):
        snapshots.check_can_resume(saved, saved.config, saved.vocabulary, "cd", "s.pt")
