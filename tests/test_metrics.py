"""Watching a run: `metrics.jsonl`, TensorBoard, and W&B."""

import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, no_space, succeed

from engine.errors import UserError
from engine.run import trackers
from engine.run.log import RunLog
from engine.run.metrics import MetricsFile, read_lines
from engine.run.plan import Plan
from engine.snapshots.state import State
from trainer import TrainerConfig


def events(run_dir: Path):
    """What TensorBoard reads in the directory of a run."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return module.EventAccumulator(str(run_dir / "tensorboard")).Reload()


def log_run(run_dir: Path, names: list[str], resumed_from: int, steps: range, **settings) -> None:
    """Logs the loss of `steps`, and at each even one the held-out loss."""
    state = State(step=resumed_from, loss_step=resumed_from)
    plan = Plan(100, 8, 10, 1, 1, 10)
    config, scaler = TrainerConfig(trackers=names), torch.amp.GradScaler(enabled=False)
    log = RunLog(config, plan, state, 1.0, "character", scaler, None)
    log.open(str(run_dir), settings)
    for state.step in steps:
        log._write("train", state.step + resumed_from / 10, memory=7, samples=["a\nb", "c"])
        if state.step % 2 == 0:
            log._write("val", 10.0 + state.step)
    log.close()


# --- metrics.jsonl ---


def test_lines_past_the_restored_step_are_dropped(tmp_path):
    for resumed_from, evaluated, expected in (
        (0, True, [(1, "train"), (2, "train"), (2, "val"), (3, "train")]),
        (2, True, [(1, "train"), (2, "train"), (2, "val"), (3, "train"), (4, "train"), (4, "val")]),
        (4, False, [(1, "train"), (2, "train"), (2, "val"), (3, "train"), (4, "train")]),
    ):
        metrics = MetricsFile(str(tmp_path), resumed_from, evaluated)
        for step, split in expected[metrics.lines :]:
            metrics.log(step, 0.1, split, 2.0, seconds=0.5)
        assert metrics.lines == len(expected)
        metrics.close()
        lines = read_lines(str(tmp_path / "metrics.jsonl"))
        assert [(line["step"], line["split"]) for line in lines] == expected


def test_damaged_lines_matter_only_before_good_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_run(tmp_path, [], 0, range(1, 4))
    good = path.read_bytes()
    path.write_bytes(good + b'\xff\xfe\n{"step": 4, "spl')
    log_run(tmp_path, [], 3, range(4, 4))
    assert path.read_bytes() == good
    for line in (b"\xff\xfe", b"3", b'{"step": 1}', b'{"step": "1", "split": "val"}'):
        path.write_bytes(line + b"\n" + good)
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: damaged; correct it"):
            MetricsFile(str(tmp_path), 3)


def test_metrics_are_json_whatever_the_numbers(tmp_path):
    metrics = MetricsFile(str(tmp_path))
    metrics.log(1, 0.1, "train", float("nan"), 0.5, grad_norm=float("inf"))
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None and line["grad_norm"] is None


def test_half_a_line_does_not_stay_on_a_full_disk(tmp_path, monkeypatch, caplog):
    metrics, room = MetricsFile(str(tmp_path)), [5]
    write = metrics.file.write

    with monkeypatch.context() as patch:
        patch.setattr(metrics.file, "write", lambda data: write(data[: room.pop()]) if room else no_space())
        for step in (1, 2, 3):
            metrics.log(step, 0.1, "train", 3.0, 0.5)
    assert caplog.text.count("metrics.jsonl (No space left on device); will retry") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    metrics.log(4, 0.2, "train", 2.0, 0.6)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        metrics.flush(sync=True)
    assert caplog.text.count("metrics.jsonl (No space left on device); will retry") == 2  # once for each time
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


# --- TensorBoard ---


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    succeed(*TINY, "samples=true", f"run_dir={tmp_path}")
    read = events(tmp_path)
    lines = [json.loads(line) for line in open(tmp_path / "metrics.jsonl")]
    for split, names in (
        ("train", ("loss", "bpc", "epoch", "lr", "grad_norm", "tokens_per_s", "memory")),
        ("val", ("loss", "bpc", "epoch", "tokens")),
    ):
        for name in names:
            shown = [(event.step, event.value) for event in read.Scalars(f"{split}/{name}")]
            kept = [(x["step"], pytest.approx(x[name])) for x in lines if x["split"] == split]
            assert shown == kept, name
    drawn = {line["step"]: line["samples"] for line in lines if "samples" in line}
    texts = {event.step: event.tensor_proto for event in read.Tensors("train/samples/text_summary")}
    assert drawn and texts.keys() == drawn.keys()
    for step, proto in texts.items():
        for text in drawn[step]:
            assert text.replace("\n", "\n    ") in proto.string_val[0].decode()


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    log_run(tmp_path, ["tensorboard"], 0, range(1, 7))  # killed past its snapshot
    log_run(tmp_path, ["tensorboard"], 4, range(5, 9))
    seen = [(event.step, round(event.value, 3)) for event in events(tmp_path).Scalars("train/loss")]
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5.4), (6, 6.4), (7, 7.4), (8, 8.4)]


# --- W&B ---


def wandb_rows(run_dir: Path) -> dict[str, list[tuple[int, dict]]]:
    """Of each W&B run by its id, the step and the values of every row, from W&B's files: a log in
    LevelDB's format, of records in W&B's own.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, list] = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        rows = runs.setdefault(path.stem.removeprefix("run-"), [])
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no room for a header: padding to the next block
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record, parts = Record.FromString(parts), b""
                if record.WhichOneof("record_type") == "history":
                    row = {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in record.history.item}
                    rows.append((record.history.step.num, row))
    return runs


def test_a_resumed_run_is_the_same_wandb_run_with_each_step_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run(tmp_path, ["wandb"], 0, range(1, 7))  # killed past its snapshot
    log_run(tmp_path, ["wandb"], 4, range(5, 9))
    deadline = time.monotonic() + 20  # W&B's own process may write a moment after it has answered
    while sum(map(len, wandb_rows(tmp_path).values())) < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    (run,) = wandb_rows(tmp_path).values()
    seen = {
        key: [(step, row[key]) for step, row in run if key in row]
        for key in ("train/loss", "train/memory", "val/loss", "train/samples")
    }
    first, second = range(1, 7), range(7, 9)
    assert seen == {
        "train/loss": [*((s, s) for s in first), *((s, pytest.approx(s + 0.4)) for s in second)],
        "train/memory": [(step, 7) for step in (*first, *second)],
        "val/loss": [(step, 10 + step) for step in (2, 4, 6, 8)],
        "train/samples": [(step, "a\nb\n---\nc") for step in (*first, *second)],
    }
    log_run(tmp_path, ["wandb"], 0, range(1, 3))
    assert len(wandb_rows(tmp_path)) == 2  # a new run is another one
    log_run(tmp_path / "job", ["wandb"], 0, range(1, 3))  # of the same sweep
    assert len(wandb_rows(tmp_path)) == 2 and len(wandb_rows(tmp_path / "job")) == 1


def test_wandb_gets_the_metrics_within_the_run_directory(tmp_path):
    pytest.importorskip("wandb")
    run_dir, offline = tmp_path / "run", {"WANDB_MODE": "offline"}
    result = succeed(*TINY, "trainer.trackers=[wandb]", f"run_dir={run_dir}", cwd=tmp_path, env=offline)
    (run,) = wandb_rows(run_dir).values()
    assert run[-1][0] == 6 and {"train/loss", "val/loss"} <= {key for _, row in run for key in row}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not (run_dir / "tensorboard").exists()
    assert "wandb:" not in result.stdout


def test_the_environment_of_wandb_is_honoured(tmp_path, monkeypatch):
    pytest.importorskip("wandb").teardown()  # it keeps the environment of earlier runs
    (tmp_path / "elsewhere").mkdir()
    given = {"PROJECT": "bard", "ENTITY": "ada", "NAME": "first", "RUN_ID": "mine"}
    given |= {"DIR": str(tmp_path / "elsewhere"), "MODE": "offline"}
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracker = trackers.WandB()
    tracker.start(str(tmp_path / "run"), {}, 0, (0, False))
    run = tracker.run
    assert (run.project, run.entity, run.name, run.id) == ("bard", "ada", "first", "mine")
    assert given["DIR"] in run.dir
    tracker.close()


# --- trackers that are missing or fail ---


def test_an_unknown_tracker_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="trackers=mlflow: must be one of tensorboard, wandb"):
        TrainerConfig(trackers=["tensorboard", "mlflow"])
    (tmp_path / "wandb").mkdir()  # a folder as W&B leaves it, and no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="wandb is not installed: pip install wandb"):
        TrainerConfig(trackers=["wandb"])
    assert TrainerConfig(trackers=[]).trackers == []


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "gpt")
    monkeypatch.setattr("engine.run.log.is_installed", lambda name: False)
    log_run(tmp_path, ["tensorboard"], 0, range(1, 4))
    assert caplog.messages == ["tensorboard is not installed (pip install tensorboard): not logging to it"]


def test_a_tracker_that_fails_is_disabled_and_the_others_continue(tmp_path, monkeypatch, caplog):
    calls = []

    class Failing:
        def start(self, *_):
            pass

        def log(self, line):
            calls.append(line["step"])
            if line["step"] == 2:
                raise ConnectionError("no route\nto host")

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setattr("engine.run.log.is_installed", lambda name: True)
    log_run(tmp_path, ["wandb", "tensorboard"], 0, range(1, 5))
    assert calls == [1, 2]
    assert caplog.messages == ["wandb: no route to host; disabled for this run"]
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4]
