"""Snapshots of each earlier format resume, sample and export."""

import shutil

import pytest
from conftest import ROOT, UNREAD, metrics, succeed

import export
from engine.snapshots.storage import load
from sample import SampleConfig, sample

# Written after 6 steps by the revisions 7265151, a0fb587 and 17c2260, with the settings below.
OLD = sorted((ROOT / "tests" / "fixtures").glob("snapshot_format_*"))
SETTINGS = [
    *UNREAD,
    "data.block_size=16",
    "model=modern",
    "model.resid_pdrop=0.1",
    "optimizer=muon",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "trainer.use_amp=false",
    "samples=false",
    "trainer.trackers=[]",
]
# What those revisions logged at steps 7 and 8 of a run that was not interrupted.
LOSSES = [("train", 3.0597784519), ("train", 3.0328981876), ("val", 3.0100255013)]


@pytest.fixture(params=OLD, ids=lambda path: path.name)
def run(tmp_path, text_file, request):
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    shutil.copy(request.param, folder / "gpt_snapshot.pt")
    return folder


def test_an_old_snapshot_resumes(run, text_file):
    plain = {"CC": "/nowhere/cc"}  # the kernel of dropout, which is newer, draws other masks
    result = succeed(*SETTINGS, f"data.path={text_file}", "trainer.max_steps=8", f"run_dir={run}", env=plain)
    assert "resuming from" in result.stdout and "step 6" in result.stdout
    changed = {line.split(": ")[1].split()[0] for line in result.stdout.splitlines() if "changed since" in line}
    assert "trainer.max_steps" in changed  # and the recorded use_amp=false is amp_dtype=float32
    assert not changed & {"trainer.use_amp", "trainer.amp_dtype", "trainer.max_save_failures"}
    found = [(line["split"], line["loss"]) for line in metrics(run)]
    assert [split for split, _ in found] == [split for split, _ in LOSSES]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in LOSSES], abs=1e-4)


def test_an_old_snapshot_is_sampled_and_exported(run):
    snapshot = load(str(run / "gpt_snapshot.pt"))
    [text] = sample(SampleConfig(max_new_tokens=20, device="cpu"), snapshot)
    assert len("".join(text)) == 21
    pytest.importorskip("safetensors")
    export.main([f"run_dir={run}", f"out={run.parents[1] / 'model'}"])
    assert (run.parents[1] / "model" / "model.safetensors").exists()
