"""FSDP2 and sharded snapshots, in processes that are really started: gloo, this machine."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from conftest import EXACT, ROOT, TINY, latest, metrics, no_space, some_snapshot, start, succeed

from engine.errors import UserError
from engine.snapshots.manager import SnapshotManager
from engine.snapshots.sharded import load_full, remove_unused_shards
from engine.snapshots.state import State
from engine.snapshots.storage import beside, load, rename
from trainer import TrainerConfig

MUON = ["optimizer=muon", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
FSDP = "trainer.strategy=fsdp"
SHARDED = "trainer.snapshot_format=sharded"


@pytest.fixture(scope="module")
def seen() -> dict:
    """What `sharding_program.py` reports of 3 processes."""
    run = succeed(script="tests/sharding_program.py", nproc=3, env={"PYTHONPATH": str(ROOT)})
    return json.loads(run.stdout.splitlines()[-1])


# AdamW's first steps enlarge differences of rounding, where gradients are small; so does Muon, which computes in
# bfloat16 where the CPU does: by 2.1e-3 on a Zen 4.
@pytest.mark.parametrize(
    "case, of_losses, of_weights",
    [
        ("gpt2 muon", 2e-4, 3e-3),
        ("modern adamw", 5e-6, 5e-5),
        ("n-grams muon", 2e-4, 3e-3),
        ("bfloat16", 0.01, math.inf),
        ("float16", 0.01, math.inf),
    ],
)
def test_fsdp_takes_the_steps_of_an_unsharded_model_and_each_rank_holds_a_shard(seen, case, of_losses, of_weights):
    shared, plain = torch.tensor(seen[case]["steps"])
    assert seen[case]["fresh"] == 0  # the weights it starts from, bit for bit
    assert torch.allclose(shared, plain, rtol=of_losses)
    assert seen[case]["weights"] < of_weights
    for what in ("share_of_weights", "share_of_state"):
        assert seen[case][what] == pytest.approx(1 / 3, rel=0.05)


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(seen):
    assert seen["inf"] == {"moved": 0, "scales": [32768.0] * 3}


def begin(run, *settings, nproc):
    return succeed(*TINY, *EXACT, f"run_dir={run}", *settings, nproc=nproc).stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, undisturbed."""
    run = tmp_path_factory.mktemp("alone")
    begin(run, *MUON, nproc=0)
    return run


def test_a_run_resumes_under_either_strategy_and_format_with_any_number_of_processes(alone, tmp_path):
    run = tmp_path / "run"
    stages = [
        (1, 2, [FSDP]),
        (2, 3, ["trainer.strategy=ddp", SHARDED]),
        (4, 3, [FSDP, SHARDED, "trainer.micro_batch_size=2"]),
        (6, 0, []),
    ]
    before = None
    for last, nproc, settings in stages:
        out = begin(run, *MUON, f"trainer.max_steps={last}", *settings, nproc=nproc)
        assert (", sharded" in out) == (FSDP in settings)
        now = max(nproc, 1)
        changed = f"changed since the snapshot: processes was {before}, is {now}"
        assert (changed in out) == (before not in (None, now))
        before = now
    # Each end of a stage evaluates, too; what is logged at a step is the same.
    losses = {(line["step"], line["split"]): line["loss"] for line in metrics(run)}
    for line in metrics(alone):
        assert losses[line["step"], line["split"]] == pytest.approx(line["loss"], abs=1e-4)


def test_a_sharded_snapshot_is_exported_as_a_single_file(alone, tmp_path):
    run, out = tmp_path / "run", tmp_path / "single.pt"
    begin(run, *MUON, SHARDED, nproc=2)
    snapshot = run / "gpt_snapshot.pt"
    assert not load(str(snapshot)).model_state
    assert succeed(f"snapshot={snapshot}", f"out={out}", script="export.py").stderr == ""
    single, plain = load(str(out)), latest(alone)
    for path in (snapshot, out):  # what sample, export and init_from read
        whole = load_full(str(path))
        assert not whole.shards and whole.model_state.keys() == single.model_state.keys()
        assert all(torch.equal(whole.model_state[n], single.model_state[n]) for n in whole.model_state)
    assert whole.config == single.config
    assert single.model_state.keys() == plain.model_state.keys()
    assert single.optimizer_state.keys() == plain.optimizer_state.keys()
    for name, value in plain.model_state.items():
        assert torch.allclose(single.model_state[name], value, atol=2e-3)
    for name, values in plain.optimizer_state.items():
        assert single.optimizer_state[name].keys() == values.keys()


def test_damaged_shards_are_noticed_and_the_snapshot_before_is_used(tmp_path):
    run = tmp_path / "run"
    settings = [SHARDED, "trainer.save_every_steps=2"]
    begin(run, *settings, nproc=0)
    used = {run / load(str(path)).shards["folder"] for path in run.glob("gpt_snapshot*.pt")}
    assert set((run / "gpt_snapshot.pt.shards").iterdir()) == used
    shards = run / latest(run).shards["folder"]
    data = next(shards.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-9] + b"\0" + whole[-8:])  # a changed byte
    again = start(*TINY, *EXACT, *settings, f"run_dir={run}", "trainer.max_steps=8")
    assert again.returncode == 1
    assert f"error: {data}: damaged" in again.stderr and "move" in again.stderr
    data.write_bytes(whole[:-9])  # cut off
    out = begin(run, *settings, "trainer.max_steps=8", nproc=0)
    assert f"{data} is missing or cut off; renamed to" in out
    assert "step 4" in out.split("resuming from")[1].splitlines()[0]


@pytest.mark.slow
def test_fsdp_resumes_bit_for_bit(tmp_path):
    settings = [FSDP, *MUON, "model=modern", "model.n_layer=2", "model.n_head=2"]
    settings += ["model.n_embd=16", "model.model_type=null"]
    begin(tmp_path / "whole", *settings, nproc=2)
    begin(tmp_path / "parts", *settings, "trainer.max_steps=3", nproc=2)
    begin(tmp_path / "parts", *settings, nproc=2)
    first, second = (latest(tmp_path / name) for name in ("whole", "parts"))
    for name, value in first.model_state.items():
        assert torch.equal(value, second.model_state[name]), name


@pytest.mark.slow
def test_fsdp_compiles(alone, tmp_path):
    begin(tmp_path, *MUON, FSDP, "trainer.compile=true", nproc=2)
    for one, other in zip(metrics(alone), metrics(tmp_path), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


def test_shards_in_an_object_store_are_refused():
    with pytest.raises(UserError, match="needs a folder that all hosts see"):
        TrainerConfig(snapshot_format="sharded", snapshot_path="memory://x/a.pt")


# --- which shards belong to whom ---


def save(snapshots: SnapshotManager, step: int, is_best: bool = False) -> None:
    scored = dataclasses.replace(some_snapshot(step), loss=2.0, loss_step=step, since_best=1 - is_best)
    snapshots.save(scored, True, loss=1.0)
    snapshots.wait(State())


def kept(snapshots: SnapshotManager) -> list[int]:
    """The steps of the shards that exist once the unused ones are removed."""
    remove_unused_shards(snapshots.storage)
    folder = f"{snapshots.path}.shards"
    return sorted(int(name.split("-")[0]) for name in os.listdir(folder))


def manager(path: Path) -> SnapshotManager:
    config = TrainerConfig(snapshot_path=str(path), snapshot_format="sharded")
    return SnapshotManager(config, str(path.parent))


@pytest.fixture
def snapshots(tmp_path) -> SnapshotManager:
    return manager(tmp_path / "lr0.001.pt")


@pytest.mark.parametrize("name", ["lr0.003.pt", "lr0.001.ckpt", "lr0"])
def test_runs_in_one_folder_keep_their_own_shards(tmp_path, snapshots, name):
    other = manager(tmp_path / name)
    for step in (1, 2, 3):
        for each in (snapshots, other):
            save(each, step, is_best=step == 1)
            assert kept(each) == list(range(1, step + 1))
    for each in (snapshots, other):
        storage = each.storage
        for path in storage.all():
            load(path)
        assert storage.all() == [storage.path, storage.best_path, storage.previous_path]


def test_numbered_snapshots_and_renamed_ones_keep_their_shards(snapshots):
    snapshots.storage.keep = 1
    for step in (1, 2):
        save(snapshots, step)
    rename(snapshots.storage.all())
    for step in (3, 4, 5):
        save(snapshots, step)
    assert kept(snapshots) == [1, 2, 4, 5]


def test_shards_that_cannot_be_written_are_a_failed_save(snapshots, monkeypatch, caplog):
    save(snapshots, 1, is_best=True)
    with monkeypatch.context() as patch:
        patch.setattr("engine.snapshots.manager.save_shards", no_space)
        save(snapshots, 2)
    assert snapshots.last_error and snapshots.saved_step == 1
    assert "step 2: the snapshot was not written" in caplog.text
    save(snapshots, 3)
    assert not snapshots.last_error and snapshots.saved_step == 3 and kept(snapshots) == [1, 3]


def test_a_disk_that_not_all_ranks_see_is_a_failed_save(snapshots, monkeypatch, caplog):
    listings = []

    def gather(value):
        if not isinstance(value, list):
            return [value]
        listings.append(value)
        return [value, ["__1_0.distcp"]]

    monkeypatch.setattr("engine.snapshots.sharded.all_gather", gather)
    save(snapshots, 1)
    assert len(listings[0]) == 2 and snapshots.last_error
    assert "not every rank can read the same files" in caplog.text


@pytest.mark.parametrize("kind", ["prev", "damaged1"])
def test_nothing_is_removed_while_a_snapshot_cannot_be_read(snapshots, caplog, kind):
    for step in (2, 3):
        save(snapshots, step)
    os.mkdir(f"{snapshots.path}.shards/00000001-unused")
    path = Path(beside(snapshots.path, kind))
    path.write_bytes(b"damaged")
    assert kept(snapshots) == [1, 2, 3]
    assert f"{path}: not a complete snapshot" in caplog.text
    path.unlink()
    assert kept(snapshots) == ([3] if kind == "prev" else [2, 3])
