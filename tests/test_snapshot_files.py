"""Snapshot files: each write is atomic, whatever happens meanwhile; saving in the background."""

import dataclasses
import io
import math
import os
import shutil
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from conftest import equal, no_space, some_snapshot

import engine.files
from engine.errors import UserError
from engine.snapshots import storage
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.snapshot import Snapshot, SnapshotError
from engine.snapshots.state import State
from engine.snapshots.storage import SnapshotStorage, beside, load, locate, rename, snapshot_path
from trainer import TrainerConfig


def write(files: SnapshotStorage, step: int, is_best: bool = False, is_numbered: bool = True) -> None:
    files.write(some_snapshot(step).to_bytes(), step, is_best, is_numbered)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "s.pt")


def test_every_snapshot_becomes_the_latest_and_may_be_the_best_and_the_newest_numbered_ones_are_kept(tmp_path, path):
    files = SnapshotStorage(path, keep=2)
    for step in range(1, 6):
        write(files, step, is_best=step == 2)
        assert files.recover()[1] == path and load(path).step == step
    kept = {"s.pt": 5, "s.prev.pt": 4, "s.best.pt": 2, "s.step00000004.pt": 4, "s.step00000005.pt": 5}
    assert {name: load(str(tmp_path / name)).step for name in names(tmp_path)} == kept


def test_an_older_snapshot_copied_over_the_latest_changes_no_other(path):
    files = SnapshotStorage(path, keep=2)
    write(files, 1)
    write(files, 2, is_best=True)
    shutil.copyfile(beside(path, "step00000001"), path)  # writes into the file, as cp does
    assert [load(p).step for p in (path, files.best_path, beside(path, "step00000002"))] == [1, 2, 2]


def test_numbered_snapshots_later_than_the_one_that_a_run_went_back_to_are_renamed(tmp_path, path):
    for step in (1, 2, 3):
        write(SnapshotStorage(path, keep=3), step)
    shutil.copyfile(beside(path, "step00000001"), path)
    files = SnapshotStorage(path, keep=1)
    files.rename_later(1)
    write(files, 2)
    old = ["s.step00000002.old1.pt", "s.step00000003.old1.pt"]
    assert names(tmp_path) == ["s.prev.pt", "s.pt", old[0], "s.step00000002.pt", old[1]]
    Path(path).write_bytes(b"damaged")
    assert files.recover()[0].step == 2


def scored(step: int, loss: float = 1.5) -> Snapshot:
    return dataclasses.replace(some_snapshot(step), loss=loss, loss_step=step)


@pytest.mark.parametrize(
    "present, source",
    [
        ({"best": scored(1), "prev": scored(1), "latest": scored(2)}, "best"),
        ({"latest": scored(1)}, "latest"),  # killed between the latest and the best
        ({"best": scored(3), "prev": scored(1), "latest": scored(2)}, "prev"),  # went back to 2
        ({"best": scored(3), "latest": scored(2), "step00000001": scored(1)}, "step00000001"),
        ({"best": scored(1, loss=1.4), "latest": scored(1)}, "latest"),  # of the same step, but another branch
        ({"best": scored(3), "latest": scored(2), "step00000001": scored(1, loss=1.4)}, None),
        ({"best": some_snapshot(1), "latest": scored(2)}, None),
    ],
)
def test_the_best_snapshot_is_the_one_that_the_latest_names(tmp_path, path, present, source, caplog):
    files, best = SnapshotStorage(path), beside(path, "best")
    for kind, snapshot in present.items():
        Path(path if kind == "latest" else beside(path, kind)).write_bytes(snapshot.to_bytes())
    assert files.recover_best(1.5, 1) == (source is not None)
    if source is None:
        assert not os.path.exists(best)
    else:
        assert equal(load(best), present[source])
    moved = tmp_path / "s.best.old1.pt"
    assert moved.exists() == ("best" in present and source != "best") == (f"renamed to {moved}" in caplog.text)


def test_glob_characters_in_a_path_are_literal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("s.pt", "run [1]*/s.pt"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        files = SnapshotStorage(path, keep=1)
        write(files, 1)
        write(files, 2)
        assert files.all() == [path, files.previous_path, beside(path, "step00000002")]


class InPieces(io.FileIO):
    """A file that is written in pieces, as the kernel may do it."""

    def write(self, content):
        for start in range(0, len(content), 1000):
            os.write(self.fileno(), content[start : start + 1000])


def save_and_die(files: SnapshotStorage, calls: int) -> NoReturn:
    """Saves step 5; ends this process with status 9 in place of the call after so many that change files."""
    left = iter(range(calls))

    def counting(call):
        def counted(*args):
            if next(left, None) is None:
                os._exit(9)
            return call(*args)

        return counted

    for name in ("link", "replace", "remove", "fsync", "write"):
        setattr(os, name, counting(getattr(os, name)))
    for module in (engine.files, storage):
        module.open = lambda path, mode, **_: (counting(InPieces) if mode == "wb" else open)(path, mode)
    write(files, 5, is_best=True)
    os._exit(0)


def test_a_process_killed_after_any_call_of_a_save_leaves_a_good_snapshot(tmp_path):
    outcomes = []
    for calls in range(200):
        folder = tmp_path / str(calls)
        folder.mkdir()
        files = SnapshotStorage(str(folder / "s.pt"), keep=2)
        for step in (2, 3, 4):
            write(files, step, is_best=step == 3)
        child = os.fork()
        if not child:
            try:
                save_and_die(files, calls)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        snapshot, where = files.recover()  # nothing is damaged, whatever was going on
        outcomes.append(snapshot.step)
        assert where == files.path
        assert load(files.best_path).step in (3, 5) and load(files.previous_path).step in (3, 4)
        before = set(names(folder))
        files.prepare()
        assert set(names(folder)) == {name for name in before if "tmp" not in name}
        if status == 0:
            break
    assert calls > 15 and outcomes == sorted(outcomes) and set(outcomes) == {4, 5}


@pytest.mark.parametrize("call", ["fsync", "replace", "link", "_put"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, path, monkeypatch, call):
    files = SnapshotStorage(path)
    write(files, 1)
    write(files, 2)
    put = files._put
    with monkeypatch.context() as patch:
        if call == "_put":  # a disk that loses some of it
            patch.setattr(files, "_put", lambda path, content: put(path, content[:-1]))
        else:
            patch.setattr(os, call, no_space)
        if call == "link":  # there are file systems that have none
            write(files, 3)
        else:
            with pytest.raises(OSError, match=r"No space left on device|differs from what was written"):
                write(files, 3)
    assert equal(load(path), some_snapshot(3 if call == "link" else 2))
    assert names(tmp_path) == ["s.prev.pt", "s.pt"]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, replace_by_a_dangling_link])
def test_the_newest_good_snapshot_is_used_and_damaged_ones_are_renamed(tmp_path, path, caplog, damage):
    files = SnapshotStorage(path, keep=9)
    for step in (1, 2, 3, 4):
        write(files, step, is_best=step == 1, is_numbered=step > 1)
    for name in ("s.pt", "s.step00000004.pt"):
        damage(tmp_path / name)
    snapshot, where = files.recover()
    assert snapshot.step == 3 and where in (files.previous_path, beside(path, "step00000003"))
    assert [f"renamed to {tmp_path}/{name}; using {where} instead" in caplog.text for name in names(tmp_path)] == [
        name.endswith("damaged1.pt") for name in names(tmp_path)
    ]
    assert load(path).step == 3  # also for who samples from it
    write(files, 5)  # does not put the damaged one in place of the good one
    assert [load(p).step for p in (path, files.previous_path)] == [5, 3]
    for left in (2, 1):  # the numbered one, then the best one
        for bad in filter(lambda bad: load(bad).step > left, files.all()):
            damage(Path(bad))
        assert files.recover()[0].step == left


def test_only_damaged_snapshots_are_an_error_and_none_is_a_fresh_start(tmp_path, path):
    files = SnapshotStorage(path)
    assert files.recover() is None
    (tmp_path / "s.pt").write_bytes(b"gone")
    (tmp_path / "s.best.pt").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"no undamaged snapshot left: .*s\.pt.*s\.best\.pt"):
        files.recover()
    assert names(tmp_path) == ["s.best.pt", "s.pt"]


def test_a_path_may_be_a_url_or_have_windows_separators(monkeypatch):
    for prefix in ("file", "local"):
        assert TrainerConfig(snapshot_path=f"{prefix}:///a/b.pt").snapshot_path == "/a/b.pt"
    monkeypatch.setattr("os.sep", "\\")
    assert snapshot_path("s.pt", r"runs\x") == "runs/x/s.pt"
    assert "\\" not in locate(r"runs\x\s.pt")[1]


def test_an_unreadable_snapshot_is_neither_renamed_nor_skipped(tmp_path, path, monkeypatch):
    files = SnapshotStorage(path)
    write(files, 1)
    later = dataclasses.replace(some_snapshot(2), format=9)
    files.write(later.to_bytes(), 2, True, False)
    before = names(tmp_path)
    with pytest.raises(UserError, match=r"s\.pt: snapshot format 9"):
        files.recover()
    monkeypatch.setattr(type(files.file_system), "cat_file", no_space)
    with pytest.raises(UserError, match=r"s\.pt: cannot be reached: .*No space left"):
        files.recover()
    assert names(tmp_path) == before


def test_renaming_never_overwrites(tmp_path, path):
    files = SnapshotStorage(path)
    for round_number in (1, 2):
        for step in (1, 2):
            write(files, 10 * round_number + step)
        assert rename(files.all()) == [
            str(tmp_path / f"s.old{round_number}.pt"),
            str(tmp_path / f"s.prev.old{round_number}.pt"),
        ]
    assert load(str(tmp_path / "s.old1.pt")).step == 12
    assert load(str(tmp_path / "s.prev.old2.pt")).step == 21


def test_an_unknown_file_system_and_a_pipe_are_named(tmp_path):
    with pytest.raises(UserError, match=r"trainer\.snapshot_path=floppy://s\.pt: .*floppy"):
        SnapshotStorage("floppy://s.pt")
    with pytest.raises(SnapshotError, match=r"nothing\.pt: no such snapshot"):
        load("nothing.pt")
    with pytest.raises(SnapshotError, match=r"s\.pt: no such snapshot: Cannot connect to host"):
        load("http://127.0.0.1:1/s.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(SnapshotError, match=r"pipe\.pt: no regular file"):
        load(str(tmp_path / "pipe.pt"))


def test_temporary_files_of_a_killed_save_are_removed_and_not_written_into(tmp_path, path):
    files = SnapshotStorage(path, keep=2)
    for step in (1, 2):
        write(files, step, is_best=True)
    for action in (files.prepare, lambda: write(files, 3)):
        os.link(path, f"{path}.link.tmp")
        for name in ("s.pt", "s.best.pt", "s.step00000002.pt"):
            (tmp_path / f"{name}.tmp").write_bytes(b"half")
        action()
        assert not [name for name in names(tmp_path) if "tmp" in name]
    assert [load(p).step for p in (path, files.previous_path, files.best_path)] == [3, 2, 2]


def manager(path: str, **settings) -> SnapshotManager:
    config = TrainerConfig(snapshot_path=path, **settings)
    return SnapshotManager(config, os.path.dirname(path))


def test_a_save_writes_the_state_at_the_moment_of_the_call(path):
    snapshots = manager(path)
    snapshot, may_write = some_snapshot(1), threading.Event()
    put = snapshots.storage._put

    def late(*args):
        assert may_write.wait(30)
        put(*args)

    snapshots.storage._put = late
    snapshots.save(snapshot, True, loss=1.0)
    snapshot.model_state["b"].zero_()
    assert not os.path.exists(path)  # the call does not wait
    may_write.set()
    snapshots.wait(State())
    assert torch.equal(load(path).model_state["b"], some_snapshot(1).model_state["b"])


def test_the_best_snapshot_is_the_lowest_loss_that_was_written(path, monkeypatch, caplog):
    snapshots, state = manager(path), State()
    for step, is_best, fails in ((1, False, ""), (2, True, "_put"), (3, True, ""), (4, True, "_copy"), (5, False, "")):
        own = {"loss": 9.0 - step, "loss_step": step, "since_best": 1 - is_best}
        before = {"best_loss": state.best_loss, "best_step": state.best_step}
        best = {"best_loss": 9.0 - step, "best_step": step} if is_best else before
        with monkeypatch.context() as full:
            if fails:
                full.setattr(snapshots.storage, fails, no_space)
            snapshots.save(dataclasses.replace(some_snapshot(step), **own, **best), True, loss=1.0)
            snapshots.wait(state)
        assert ("No space left" in snapshots.last_error) == bool(fails) and snapshots.saved_step == step - bool(fails)
        assert vars(state) == vars(State()) | (before if fails else best)
        assert (f"step {step}: the snapshot was not written" in caplog.text) == bool(fails)
        assert load(path).step == step - bool(fails)
    assert (load(path).best_step, load(snapshots.storage.best_path).step) == (3, 3)


def test_a_save_that_fails_while_another_error_ends_the_run_is_logged(path, monkeypatch, caplog):
    snapshots = manager(path)
    monkeypatch.setattr(snapshots.storage, "_put", lambda *_: 1 / 0)
    snapshots.save(some_snapshot(1), True, loss=1.0)
    snapshots.close()
    assert "step 1: the snapshot was not written" in caplog.text


@pytest.mark.parametrize(
    "names, value, is_refused",
    [(["b"], math.inf, True), (["a.weight"], math.inf, False), ([], math.inf, False), ([], math.nan, True)],
)
def test_a_snapshot_with_a_parameter_that_is_not_finite_is_refused_and_passed_over(
    path, caplog, names, value, is_refused
):
    files = SnapshotStorage(path)
    write(files, 1)
    snapshot = dataclasses.replace(some_snapshot(2), parameters=names)
    snapshot.model_state["b"][0] = value  # a buffer, unless named
    files.write(snapshot.to_bytes(), 2, False, True)
    found, _ = files.recover()
    assert found.step == (1 if is_refused else 2)
    assert ("b is not finite: the run diverged" in caplog.text) == is_refused
