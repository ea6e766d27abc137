"""The machine fails, the run does not: processes killed, stopped, silent; other world sizes."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import chaos
import pytest
from conftest import ROOT, TINY, command, equal, metrics, start

from snapshot_files import load

LONG = [
    *TINY,
    "trainer.max_steps=100000",
    "trainer.max_epochs=null",
    "trainer.eval_every_steps=500",
    "trainer.log_every_steps=10",
]


def begin(*arguments: str, nproc: int = 0, script: str = "main.py") -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments, nproc=nproc, script=script),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(true, process: subprocess.Popen, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[0] or "")
        time.sleep(0.01)


def lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("processes, kills", [(2, 5), (0, 3)])
def test_whatever_is_killed_the_same_command_finishes_the_same_run(tmp_path, processes, kills):
    seed = random.SystemRandom().randrange(10**6)
    print(f"python tests/chaos.py kills={kills} seed={seed} processes={processes}")
    survived = chaos.chaos(tmp_path, kills, seed, processes, steps=400)
    assert survived.total() >= kills


def test_a_terminal_that_goes_away_stops_a_run_unless_nohup_says_no(tmp_path):
    for name, prefix in (("a", []), ("b", ["nohup"])):
        run = tmp_path / name
        process = subprocess.Popen(
            [*prefix, *command(*LONG, f"run_dir={run}")],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda run=run: lines(run) > 5, process)
        process.send_signal(signal.SIGHUP)
        if prefix:
            before = lines(run)
            wait_until(lambda run=run, before=before: lines(run) > before + 5, process)
            process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=30)
        assert status == 128 + (signal.SIGTERM if prefix else signal.SIGHUP)
        assert (run / "gpt_snapshot.pt").exists()


@pytest.mark.parametrize("to", ["torchrun", "rank 1"])
def test_a_run_asked_to_stop_says_so_and_goes_on_where_it_stopped(tmp_path, to):
    process = begin(*LONG, f"run_dir={tmp_path}", nproc=2)
    wait_until(lambda: lines(tmp_path) > 5, process)
    ranks = chaos.children(process.pid)
    os.kill(ranks[1] if to == "rank 1" else process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    step = load(str(tmp_path / "gpt_snapshot.pt")).step
    assert f"SIGTERM: stopped after step {step} of 100000; the same command goes on from" in out
    if to == "rank 1":
        assert "exitcode  : 143" in out  # of both ranks, as shells have it
    result = start(*LONG, f"trainer.max_steps={step + 5}", f"run_dir={tmp_path}", nproc=2)
    assert f"resuming from {tmp_path}/gpt_snapshot.pt, step {step}" in result.stdout


def test_a_second_sigint_stops_at_once_and_the_run_goes_on(tmp_path):
    process = begin(*LONG, f"run_dir={tmp_path}", "trainer.save_every_steps=1")
    wait_until(lambda: lines(tmp_path) > 5, process)
    process.send_signal(signal.SIGSTOP)  # so that both wait for it
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    step = load(str(tmp_path / "gpt_snapshot.pt")).step
    result = start(*LONG, f"trainer.max_steps={step + 5}", f"run_dir={tmp_path}")
    assert result.returncode == 0, result.stderr


def test_signals_before_training_and_to_loaders_lose_nothing(tmp_path):
    process = begin(*LONG, f"run_dir={tmp_path}", "trainer.data_loader_workers=2")
    wait_until(lambda: len(chaos.children(process.pid)) == 2, process)
    for pid in chaos.children(process.pid):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: lines(tmp_path) > 5, process)
    wait_until(lambda: (tmp_path / "gpt_snapshot.pt").exists(), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGUSR1: saving after step" in out and "SIGTERM: stopped after step" in out


def test_a_silent_rank_ends_the_run_and_is_named(tmp_path):
    process = begin(*LONG, f"run_dir={tmp_path}", "trainer.timeout_s=4", nproc=2)
    wait_until(lambda: lines(tmp_path) > 5, process)
    rank_0, rank_1 = chaos.children(process.pid)
    began = time.monotonic()
    os.kill(rank_1, signal.SIGSTOP)
    out = []
    reader = threading.Thread(target=lambda: out.append(process.stdout.read()))
    reader.start()
    deadline = time.monotonic() + 30
    while chaos.is_alive(rank_0) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() - began < 20  # 4 s and what it takes to ask around
    os.kill(rank_1, signal.SIGKILL)  # or torchrun would do so, 30 s later
    process.wait(timeout=30)
    reader.join(timeout=30)
    assert f"rank 1 (process {rank_1} on " in out[0] and "does not answer" in out[0]
    assert "error (rank 0): after step" in out[0]


def test_a_rank_that_never_arrives_is_not_waited_for_forever(tmp_path):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    result = start(*TINY, "trainer.timeout_s=3", f"run_dir={tmp_path}", env=env, timeout=60)
    assert result.returncode == 1
    assert "error (rank 0): the 2 processes did not find each other within 3 s" in result.stderr


@pytest.mark.slow
def test_a_first_compile_can_be_killed_and_a_stop_waits_for_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    settings = [*TINY, "trainer.compile=true"]
    run = tmp_path / "run"
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = begin(*settings, f"run_dir={run}")
        out = ""
        while "plan " not in out:
            out += process.stdout.readline()
            assert process.poll() is None, out
        time.sleep(1.5)
        assert not lines(run)  # the first step is still being compiled
        process.send_signal(number)
        out += process.communicate(timeout=120)[0]
        assert ("SIGTERM: stopped after step" in out) == (number == signal.SIGTERM), out
    assert load(str(run / "gpt_snapshot.pt")).step < 6
    for run_dir in (run, tmp_path / "whole"):
        result = start(*settings, f"run_dir={run_dir}", timeout=240)
        assert result.returncode == 0, result.stderr
    assert metrics(run) == metrics(tmp_path / "whole")
    for name in ("gpt_snapshot.pt", "gpt_snapshot.best.pt"):
        a, b = (chaos.settle(load(str(d / name))) for d in (run, tmp_path / "whole"))
        assert equal(a, b)


def test_a_full_disk_is_borne_until_there_is_room_again(tmp_path):
    settings = [*LONG, "trainer.max_steps=1500", "trainer.save_every_steps=100"]
    whole = start(*settings, f"run_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        run = disk / "run"
        process = begin(*settings, f"run_dir={run}", "trainer.max_save_failures=1000")
        wait_until(lambda: lines(run) > 20, process)
        process.send_signal(signal.SIGSTOP)
        with open(disk / "blocker", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        process.send_signal(signal.SIGCONT)
        out = ""
        while "was not written" not in out:
            out += process.stdout.readline()
            assert process.poll() is None, out
        (disk / "blocker").unlink()
        out += process.communicate(timeout=60)[0]
        assert process.returncode == 0, out
        assert not re.search(rf'File "{ROOT}/\w+\.py', out), out  # TensorBoard shows its own
        assert "No space left on device" in out
        assert metrics(run) == metrics(tmp_path / "whole")
        a, b = (load(str(d / "gpt_snapshot.pt")) for d in (run, tmp_path / "whole"))
        for snapshot in (a, b):
            snapshot.config = {}
        assert equal(a, b)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


AUDITED = """
import json, os, runpy, sys
sys.path.insert(0, {root!r})
import trainer
get = trainer.MicroBatches.__getitem__
def audited(self, k):
    order = []
    batch = self.dataset.batch
    self.dataset.batch = lambda indices: (order.extend(map(int, indices)), batch(indices))[1]
    try:
        return get(self, k)
    finally:
        self.dataset.batch = batch
        with open(os.environ["AUDIT"] + str(self.offset), "a") as file:
            file.write(json.dumps([k // self.accumulation, order]) + "\\n")
trainer.MicroBatches.__getitem__ = audited
sys.argv[0] = {main!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_2_then_1_then_3_processes_see_every_window_once_and_the_same_losses(tmp_path):
    script = tmp_path / "audited.py"
    script.write_text(AUDITED.format(root=str(ROOT), main=str(ROOT / "main.py")))
    exact = ["trainer.use_amp=false", *(f"model.{x}_pdrop=0" for x in ("embd", "resid", "attn"))]
    settings = [*TINY, *exact, "trainer.max_epochs=1", "trainer.max_steps=null"]
    settings += ["data.truncate=0.004", "trainer.eval_every_steps=40"]
    whole = start(*settings, f"run_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "run"
    audit = {"AUDIT": str(tmp_path / "audit-")}
    for nproc, until in ((2, 50), (1, 90), (3, None)):
        limit = [f"trainer.max_steps={until}"] if until else []
        result = start(
            *settings, *limit, f"run_dir={run}", nproc=nproc, script=str(script), env=audit
        )
        assert result.returncode == 0, result.stderr
    visits: dict[int, list[int]] = {}
    for path in tmp_path.glob("audit-*"):
        for line in path.read_text().splitlines():
            step, order = json.loads(line)
            visits.setdefault(step, []).extend(order)
    seen = [window for step in sorted(visits) for window in visits[step]]
    windows = int(whole.stdout.split(" windows, one from each")[0].split()[-1].replace(",", ""))
    assert all(len(order) == 12 for order in visits.values())  # the global batch
    assert sorted(seen[:windows]) == list(range(windows)) or set(seen) == set(range(windows))
    assert len(seen) - windows < 12 and set(seen) == set(range(windows))
    for split, tolerance in (("train", 1e-4), ("val", 1e-4)):
        a, b = (metrics(tmp_path / name, split) for name in ("whole", "run"))
        b = [line for line in b if line["step"] not in (50, 90) or split == "train"]
        assert [x["step"] for x in a] == [x["step"] for x in b]
        for one, other in zip(a, b, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
            assert one.get("tokens") == other.get("tokens")
