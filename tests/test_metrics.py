"""Watching a run: the live line, TensorBoard, Trackio and W&B, and what the metrics say of
memory.
"""

import errno
import fcntl
import json
import os
import pty
import re
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, command, start

from engine.errors import UserError
from engine.run import trackers
from engine.run.metrics import Metrics
from trainer import TrainerConfig

CONFIG = {"optimizer": {"learning_rate": 3e-4, "decay": None}, "run_name": "a", "betas": [0.9, 0.5]}


def events(run_dir: Path):
    """What TensorBoard reads in the directory of a run."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return module.EventAccumulator(str(run_dir / "tensorboard")).Reload()


def log_run(run_dir: Path, names: list[str], resumed_from: int, steps: range) -> None:
    """Logs the loss of `steps`, and at each even one the held-out loss."""
    metrics = Metrics(
        str(run_dir), resumed_from, evaluated=True, trackers=names, config={**CONFIG, "step": 0}
    )
    for step in steps:
        metrics.log(step, 0.1, "train", step + resumed_from / 10, memory=7, samples=["a\nb", "c"])
        if step % 2 == 0:
            metrics.log(step, 0.1, "val", 10.0 + step)
    metrics.close()


# --- TensorBoard ---


def test_tensorboard_has_all_that_a_run_measures(tmp_path):
    pytest.importorskip("tensorboard")
    result = start(*TINY, f"run_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
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


def test_the_configuration_is_shown_as_hyperparameters_once_also_after_a_resume(tmp_path):
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    for resumed_from, steps in ((0, range(1, 5)), (2, range(3, 7))):
        log_run(tmp_path, ["tensorboard"], resumed_from, steps)
    content = events(tmp_path).PluginTagToContent("hparams")
    assert set(content) == {metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG}
    started = metadata.parse_session_start_info_plugin_data(
        content[metadata.SESSION_START_INFO_TAG]
    )
    shown = {k: getattr(v, v.WhichOneof("kind")) for k, v in started.hparams.items()}
    assert shown == {
        "optimizer.learning_rate": 3e-4,
        "optimizer.decay": "None",
        "run_name": "a",
        "betas": "[0.9, 0.5]",
        "step": 0,
    }
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    measured = {metric.name.tag for metric in experiment.metric_infos}
    assert measured == {"train/loss", "val/loss"} <= set(events(tmp_path).Tags()["scalars"])
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    written = [
        value.tag
        for file in (tmp_path / "tensorboard").iterdir()
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert written.count(metadata.SESSION_START_INFO_TAG) == 1


def test_a_run_that_begins_anew_shows_its_own_hyperparameters(tmp_path):
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    for rate in ("1e-3", "3e-3"):
        result = start(
            *TINY, f"run_dir={tmp_path}", f"optimizer.learning_rate={rate}", "trainer.resume=never"
        )
        assert result.returncode == 0, result.stderr
        content = events(tmp_path).PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
        shown = metadata.parse_session_start_info_plugin_data(content).hparams
        assert shown["optimizer.learning_rate"].number_value == float(rate)
    assert any((tmp_path / "tensorboard.old1").iterdir())


def test_a_file_of_somebody_elses_stays_where_the_events_of_an_earlier_start_go(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.1").touch()
    (folder / "mine.txt").touch()
    trackers.Trackers(["tensorboard"], str(tmp_path), {}, 0, (0, False)).close()
    assert (folder / "mine.txt").exists() and not (folder / "events.out.tfevents.1").exists()


# --- Trackio and W&B ---


def trackio_rows(run_dir: Path) -> dict[str, list[tuple[int, dict]]]:
    """Of each run by its id, the step and the values of every row."""
    runs: dict[str, list] = {}
    with sqlite3.connect(run_dir / "trackio" / f"{trackers.PROJECT}.db") as database:
        for run, step, row in database.execute(
            "SELECT run_id, step, metrics FROM metrics ORDER BY id"
        ):
            runs.setdefault(run, []).append((step, json.loads(row)))
    return runs


def wandb_rows(run_dir: Path) -> dict[str, list[tuple[int, dict]]]:
    """The same of W&B's files: a log in LevelDB's format, of records in W&B's own."""
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
                    row = {
                        "/".join(x.nested_key) or x.key: json.loads(x.value_json)
                        for x in record.history.item
                    }
                    rows.append((record.history.step.num, row))
    return runs


@pytest.mark.parametrize("name, rows", [("trackio", trackio_rows), ("wandb", wandb_rows)])
def test_a_resumed_run_goes_on_in_the_same_run_with_each_step_once(
    tmp_path, name, rows, monkeypatch
):
    pytest.importorskip(name)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run(tmp_path, [name], 0, range(1, 7))  # killed past its snapshot
    log_run(tmp_path, [name], 4, range(5, 9))
    deadline = time.monotonic() + 20  # W&B's own process may write a moment after it has answered
    while sum(map(len, rows(tmp_path).values())) < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    (run,) = rows(tmp_path).values()
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
    log_run(tmp_path, [name], 0, range(1, 3))
    assert len(rows(tmp_path)) == 2  # one that begins is another
    log_run(tmp_path / "job", [name], 0, range(1, 3))  # of the same sweep
    assert len(rows(tmp_path)) == 2 and len(rows(tmp_path / "job")) == 1


@pytest.mark.parametrize("name, rows", [("trackio", trackio_rows), ("wandb", wandb_rows)])
def test_the_program_reports_to_it_within_the_run_directory(tmp_path, name, rows):
    pytest.importorskip(name)
    result = start(
        *TINY,
        f"run_dir={tmp_path / 'run'}",
        f"trainer.trackers=[{name}]",
        "trainer.data_loader_workers=1",
        nproc=2,
        cwd=tmp_path,
        env={"TRACKIO_DIR": "", "WANDB_MODE": "offline"},
    )
    assert result.returncode == 0, result.stderr
    (run,) = rows(tmp_path / "run").values()
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    for split in ("train", "val"):
        key = f"{split}/loss"
        shown = [(step, row[key]) for step, row in run if key in row]
        assert shown == [(x["step"], x["loss"]) for x in lines if x["split"] == split]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not (tmp_path / "run" / "tensorboard").exists()
    package = "Trackio" if name == "trackio" else name
    assert package not in result.stdout  # the run's own lines alone


# --- what is asked for and cannot be had ---


def test_half_a_line_does_not_stay_on_a_full_disk(tmp_path, monkeypatch, caplog):
    metrics, write, room = Metrics(str(tmp_path), 0, trackers=()), os.write, [5]

    def full(file, data):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: room.pop()])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        metrics.log(1, 0.1, "train", 3.0)
    assert "No space left on device" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    metrics.log(2, 0.2, "train", 2.0)
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_an_unknown_tracker_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="mlflow is not one of them; choose from tensorboard, trac"):
        TrainerConfig(trackers=["tensorboard", "mlflow"])
    (tmp_path / "wandb").mkdir()  # as W&B leaves them, and no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name in ("trackio", "wandb"):
        with pytest.raises(UserError, match=f"{name} is not installed: pip install {name}"):
            TrainerConfig(trackers=[name])
    TrainerConfig(trackers=[])


def test_a_wrong_list_of_trackers_is_one_line_and_leaves_nothing(tmp_path):
    for value in ("[mlflow]", "wandb"):
        result = start(*TINY, f"run_dir={tmp_path / 'run'}", f"trainer.trackers={value}")
        assert result.returncode == 1
        assert "trainer.trackers" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "gpt")
    monkeypatch.setattr(trackers, "is_installed", lambda name: False)
    log_run(tmp_path, ["tensorboard"], 0, range(1, 4))
    assert caplog.messages == ["tensorboard is not installed: metrics go to metrics.jsonl alone"]


def test_a_tracker_that_fails_gets_no_more_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    calls = []

    class Failing:
        def __init__(self, *_):
            pass

        def log(self, step, values, texts):
            calls.append(step)
            if step == 2:
                raise ConnectionError("no route\nto host")

        def close(self):
            calls.append("closed")

    monkeypatch.setattr(trackers, "Hosted", Failing)
    monkeypatch.setattr(trackers, "is_installed", lambda name: True)
    log_run(tmp_path, ["wandb", "tensorboard"], 0, range(1, 5))
    assert calls == [1, 2]
    assert caplog.messages == ["wandb: no route to host; disabled for this run"]
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4]


# --- the live line ---


def on_a_terminal(
    arguments: list[str], columns: int = 120, rows: int = 40, key: bytes = b"", **kwargs
):
    """Runs a command on a terminal of its own; returns its exit status and all it wrote.

    `key` is pressed once the live line has a loss. Fails after a minute and a half.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        **kwargs,
    )
    os.close(theirs)
    written, deadline = b"", time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                written += os.read(ours, 65536)
            except OSError:  # all of its processes have closed it
                return process.wait(timeout=30), written.decode()
            if key and re.search(rb"left \| loss \d", written):
                os.write(ours, key)
                key = b""
        pytest.fail(f"still running after a minute and a half: {written.decode()}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
        os.close(ours)


def screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end, the last that with the cursor."""
    assert "\x1b" not in written
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


LONG = [*TINY, "trainer.max_steps=100000", "trainer.max_epochs=null", "trainer.log_every_steps=50"]
LINE = re.compile(r"\d+% .*\d+/\d+ \| [\d:?]+ left")


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"[\d.,:e+-]+", "#", line) for line in lines]


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_on_a_terminal_a_live_line_stays_below_the_log_and_is_gone_at_the_end(tmp_path, processes):
    pytest.importorskip("tqdm")
    run = (*TINY, f"run_dir={tmp_path / 'run'}")
    status, written = on_a_terminal(command(*run, nproc=processes))
    assert status == 0
    assert LINE.search(written)
    plain = start(*run[:-1], f"run_dir={tmp_path / 'two'}", nproc=processes)
    assert "\r" not in plain.stdout and "next evaluation" not in plain.stdout
    shown = [line for line in screen(written) if not LINE.search(line)]
    assert shown == screen(written)  # nothing of it is left
    assert shown[-1] == ""  # and the cursor is at the beginning of a line
    ours = [line.replace("/run", "/two") for line in shown]
    begun = next(i for i, line in enumerate(ours) if line.startswith("run  "))
    # The words, for the numbers are of another moment.
    assert without_numbers(ours[begun:-1]) == without_numbers(plain.stdout.splitlines())


def test_the_live_line_tells_the_next_evaluation(tmp_path):
    pytest.importorskip("tqdm")
    _, written = on_a_terminal(command(*TINY, "trainer.log_every_steps=6", f"run_dir={tmp_path}"))
    told = re.findall(r"(\d+)/6 \|.*?next evaluation at (\d+)", written)
    assert told
    assert all(int(step) <= int(next_one) and next_one in "36" for step, next_one in told)


def test_the_live_line_of_a_narrow_terminal_has_whole_words(tmp_path):
    pytest.importorskip("tqdm")
    _, written = on_a_terminal(command(*TINY, f"run_dir={tmp_path}"), columns=80)
    assert "characters/s" in written and "next" not in written


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_the_terminal_clean(tmp_path, processes):
    pytest.importorskip("tqdm")
    run = command(*LONG, f"run_dir={tmp_path}", nproc=processes)
    status, written = on_a_terminal(run, key=b"\x03")
    assert status == (1 if processes else 130)
    lines = screen(written)
    assert any(re.match(r"SIGINT: stopped after step \d+", line) for line in lines)
    # torchrun says in between, wherever the cursor is, that it has had the signal.
    assert not any(LINE.search(line) and "death signal" not in line for line in lines)
    assert lines[-1] == ""


def test_an_error_leaves_the_terminal_clean(tmp_path):
    pytest.importorskip("tqdm")
    diverging = ["optimizer.learning_rate=1e30", "trainer.use_amp=false"]
    status, written = on_a_terminal(command(*LONG, *diverging, f"run_dir={tmp_path}"))
    lines = screen(written)
    assert status == 1 and LINE.search(written)
    assert lines[-2].startswith("error: step ") and lines[-1] == ""
    assert not any(LINE.search(line) for line in lines)


def test_a_narrow_terminal_gets_one_line_too(tmp_path):
    pytest.importorskip("tqdm")
    status, written = on_a_terminal(command(*TINY, f"run_dir={tmp_path}"), columns=40)
    assert status == 0
    live = [x for x in re.split(r"[\r\n]", written) if re.match(r" *\d+% .*\d+/6", x)]
    assert live and max(map(len, live)) <= 40


def test_a_terminal_that_does_not_know_its_size_gets_one_of_the_usual_width(tmp_path):
    pytest.importorskip("tqdm")
    _, written = on_a_terminal(command(*TINY, f"run_dir={tmp_path}"), columns=0, rows=0)
    live = [x for x in re.split(r"[\r\n]", written) if re.match(r" *\d+% .*\d+/6", x)]
    assert live and max(map(len, live)) <= 80


def test_without_tqdm_a_terminal_gets_plain_lines_and_a_hint(tmp_path):
    (tmp_path / "tqdm.py").write_text("raise ImportError\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = command(*TINY, "samples=false", "trainer.trackers=[]", f"run_dir={tmp_path / 'run'}")
    status, written = on_a_terminal(run, env=environment)
    assert status == 0, written
    assert "tqdm is not installed: no progress bar (pip install tqdm)\r\n" in written
    assert not LINE.search(written)


def test_a_terminal_that_goes_away_takes_the_line_and_not_the_run(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    settings = [*TINY, "trainer.max_steps=300", "trainer.log_every_steps=20"]
    process = subprocess.Popen(
        command(*settings, f"run_dir={tmp_path}"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # not its controlling terminal: there is no SIGHUP
    )
    os.close(theirs)
    try:
        written = b""
        while b"plan  " not in written:
            assert select.select([ours], [], [], 90)[0]
            written += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(timeout=90) == 0
    finally:
        process.kill()
        process.wait(timeout=30)
    assert "step 300/300" in (tmp_path / "main.log").read_text()
