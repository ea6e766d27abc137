"""Runs survive failures: processes killed, stopped or hanging; other world sizes."""

import contextlib
import ctypes
import functools
import glob
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import chaos
import pytest
from conftest import (
    LONG,
    RUN_FILES,
    TINY,
    best,
    command,
    equal,
    latest,
    lines,
    metrics,
    patched_main,
    read_until,
    shows_code,
    small_disk,
    start,
    succeed,
    wait_until,
)


@pytest.mark.parametrize("processes, kills", [(0, 1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_same_metrics(tmp_path, processes, kills):
    seed = random.SystemRandom().randrange(10**6)
    print(f"python tests/chaos.py kills={kills} seed={seed} processes={processes}")
    chaos.chaos(tmp_path, kills, seed, processes, steps=150)  # fails unless the metrics are the same


@pytest.mark.parametrize("to", ["all", pytest.param("rank 1", marks=pytest.mark.slow)])
def test_two_processes_save_by_the_clock_and_when_stopped_and_the_run_resumes_there(tmp_path, begin, to):
    clock = ["trainer.eval_every_steps=null", "trainer.save_every_minutes=0.01", "trainer.keep_snapshots=9"]
    process = begin(*LONG, *clock, f"run_dir={tmp_path}", nproc=2, start_new_session=True)
    wait_until(lambda: (tmp_path / "gpt_snapshot.prev.pt").exists() and lines(tmp_path) > 5, process)
    if to == "all":  # Ctrl-C in a terminal
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(chaos.children(process.pid)[1], signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    step = latest(tmp_path).step
    assert f": stopped after step {step} of 100000; the same command resumes from" in out
    log = (tmp_path / "main.log").read_text()
    assert ": stopped after step" in log and "ERROR" not in log and "SIGUSR1" not in log
    assert len(list(tmp_path.glob("*.step*"))) <= 1  # of the stop, unless the clock has saved its step
    result = start(*LONG, f"trainer.max_steps={step + 5}", f"run_dir={tmp_path}")
    assert f"resuming from {tmp_path}/gpt_snapshot.pt, step {step}" in result.stdout


def test_a_second_sigint_stops_at_once_and_the_run_resumes(tmp_path, begin):
    process = begin(*LONG, f"run_dir={tmp_path}", "trainer.save_every_steps=1")
    wait_until(lambda: lines(tmp_path) > 5, process)
    process.send_signal(signal.SIGSTOP)  # so that both wait for it
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(random.uniform(0, 0.05))  # while it trains on, saves, or leaves
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT), out
    succeed(*LONG, f"trainer.max_steps={latest(tmp_path).step + 5}", f"run_dir={tmp_path}")


@pytest.mark.parametrize("nohup", [[], ["nohup"]])
def test_sigusr1_saves_and_before_training_is_harmless_and_sighup_stops_without_nohup(tmp_path, spawn, nohup):
    # As on a terminal, also where the tests themselves run under nohup.
    hup = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    line = [*nohup, *command(*LONG, f"run_dir={tmp_path}", "trainer.data_loader_workers=2")]
    process = spawn(line, stdin=subprocess.DEVNULL, preexec_fn=hup)
    wait_until(lambda: (tmp_path / "main.log").exists(), process)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: lines(tmp_path) > 5, process)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: (tmp_path / "gpt_snapshot.pt").exists(), process)
    process.send_signal(signal.SIGHUP)
    if nohup:
        before = lines(tmp_path)
        wait_until(lambda: lines(tmp_path) > before + 5, process)
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    by = signal.SIGTERM if nohup else signal.SIGHUP
    assert process.returncode == 128 + by
    assert "SIGUSR1: saving after step" in out and f"{by.name}: stopped after step" in out


@pytest.mark.parametrize("when", [pytest.param("starting", marks=pytest.mark.slow), "training"])
def test_an_unresponsive_rank_ends_the_run_and_is_named(tmp_path, begin, when):
    process = begin(*LONG, f"run_dir={tmp_path}", "trainer.timeout_s=4", nproc=2)
    out = read_until(process, "run         run in")
    if when == "training":
        wait_until(lambda: lines(tmp_path) > 5, process)
    rank_1 = chaos.children(process.pid)[1]
    os.kill(rank_1, signal.SIGSTOP)
    out += read_until(process, "error (rank 0)")
    os.kill(rank_1, signal.SIGKILL)  # or torchrun would do so, 30 s later
    out += process.communicate(timeout=60)[0]
    assert f"no answer from rank 1 (process {rank_1} on " in out
    assert ("error (rank 0): after step" in out) == (when == "training")
    assert not shows_code(out), out


def test_waiting_for_a_missing_rank_times_out(tmp_path):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    result = start(*TINY, "trainer.timeout_s=1", f"run_dir={tmp_path}", env=env, timeout=60)
    assert result.returncode == 1
    assert "error (rank 0): the 2 processes could not be connected (trainer.timeout_s=1)" in result.stderr


def files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


@pytest.mark.slow
def test_a_run_killed_or_stopped_while_compiling_resumes(tmp_path, begin, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    settings = [*TINY, "trainer.compile=true"]
    run = tmp_path / "run"
    for number in (signal.SIGKILL, signal.SIGTERM):
        process, before = begin(*settings, f"run_dir={run}"), files(cache)
        out = read_until(process, "plan ")
        wait_until(lambda before=before: files(cache) > before, process)
        assert not lines(run)  # the first step is still being compiled
        process.send_signal(number)
        out += process.communicate(timeout=120)[0]
        assert ("SIGTERM: stopped after step" in out) == (number == signal.SIGTERM), out
    assert latest(run).step < 6
    for run_dir in (run, tmp_path / "whole"):
        succeed(*settings, f"run_dir={run_dir}", timeout=240)
    assert metrics(run) == metrics(tmp_path / "whole")
    for of in (latest, best):
        assert equal(*(chaos.settle(of(run_dir)) for run_dir in (run, tmp_path / "whole")))


def test_a_full_disk_costs_warnings_until_there_is_room_again(tmp_path, begin):
    settings = [*LONG, "trainer.max_steps=300", "trainer.save_every_steps=25"]
    succeed(*settings, f"run_dir={tmp_path / 'whole'}")
    with small_disk(tmp_path, "8m") as disk:
        run = disk / "run"
        process = begin(*settings, f"run_dir={run}")
        wait_until(lambda: lines(run) > 20, process)
        process.send_signal(signal.SIGSTOP)
        fill(disk)
        process.send_signal(signal.SIGCONT)
        out = read_until(process, "was not written")
        assert latest(run).step > 0  # what was there is spared
        (disk / "blocker").unlink()
        out += process.communicate(timeout=60)[0]
        assert process.returncode == 0, out
        assert "No space left on device" in out and not shows_code(out), out
        assert metrics(run) == metrics(tmp_path / "whole")
        assert equal(*(chaos.settle(latest(run_dir)) for run_dir in (run, tmp_path / "whole")))


def fill(disk: Path) -> None:
    with open(disk / "blocker", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def test_the_last_save_waits_for_room_and_a_signal_has_it_write_elsewhere(tmp_path, begin):
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    settings = [*LONG, "trainer.max_steps=500", "trainer.save_every=null"]
    with small_disk(tmp_path, "8m") as disk:
        run = disk / "run"
        process = begin(*settings, f"run_dir={run}", nproc=2, start_new_session=True, env=environment)
        wait_until(lambda: lines(run) > 5, process)
        os.killpg(process.pid, signal.SIGSTOP)
        fill(disk)
        os.killpg(process.pid, signal.SIGCONT)
        out = read_until(process, "trying again in 30 s")
        os.kill(chaos.children(process.pid)[1], signal.SIGTERM)
        out += process.communicate(timeout=30)[0]
        assert process.returncode == 1 and not shows_code(out), out
        rescued = Path(re.search(r"step 500 was not written: .*No space left on device.*; it is in (\S+):", out)[1])
        assert rescued.parents[1] == tmp_path / "tmp"
        (disk / "blocker").unlink()
        shutil.move(rescued, run / "gpt_snapshot.pt")
        result = start(*settings, f"run_dir={run}")
        assert "this run is finished: it has 500 steps of 500" in result.stdout, result.stderr


def remove(run: Path) -> None:
    """Removes a directory at once: its run may be writing into it."""
    run.rename(run.with_name("gone"))
    shutil.rmtree(run.with_name("gone"), ignore_errors=True)


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_run_whose_directory_another_has_taken_ends_and_writes_nothing(tmp_path, begin, nproc):
    run = tmp_path / "run"
    settings = [*LONG, "trainer.save_every_steps=200", f"run_dir={run}"]
    first = begin(*settings, nproc=nproc)
    wait_until(lambda: (run / "gpt_snapshot.pt").exists(), first)
    processes = [first.pid, *chaos.children(first.pid)]  # torchrun's ranks have sessions of their own
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    remove(run)
    succeed(*settings, "trainer.max_steps=100", "model.n_embd=8")
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    out = first.communicate(timeout=60)[0]
    assert first.returncode == 1 and "another run has started in this directory; this run ends" in out
    assert not shows_code(out), out
    assert before == {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert latest(run).step == 100


@pytest.mark.parametrize("nproc, deleted", [(0, "*"), (2, "")])
def test_files_that_are_deleted_during_a_run_are_written_anew(tmp_path, begin, nproc, deleted):
    settings = [*LONG, "trainer.max_steps=500", "trainer.save_every_steps=50", "trainer.trackers=[]"]
    run = tmp_path / "run"
    process = begin(*settings, f"run_dir={run}", nproc=nproc)
    wait_until(lambda: lines(run) > 20, process)
    for path in glob.glob(f"{run}/{deleted}"):  # * finds no lock
        remove(Path(path)) if os.path.isdir(path) else os.unlink(path)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert out.count("missing, deleted or not written before; writing again") == 1
    left = RUN_FILES if deleted else RUN_FILES - {".lock", ".gpt_snapshot.pt.lock"}
    assert {path.name for path in run.iterdir()} == left
    steps = [line["step"] for line in metrics(run, "train")]
    assert steps == [*range(10, 501, 10)]


def test_an_error_of_the_disk_on_other_files_than_snapshots_is_a_warning(tmp_path):
    patch = """
import builtins, errno, os
open_file, failed = builtins.open, set()
def fail_once(path, *arguments, **options):
    name = os.path.basename(str(path)).removesuffix(".tmp")
    if name in {"metrics.jsonl", "config.yaml", "environment.jsonl"} - failed and "/b/" in str(path):
        failed.add(name)
        raise OSError(errno.EIO, "Input/output error", path)
    return open_file(path, *arguments, **options)
builtins.open = fail_once
"""
    script = patched_main(tmp_path, patch)
    for name in "ab":
        result = succeed(*TINY, "trainer.save_every_steps=1", f"run_dir={tmp_path / name / 'run'}", script=script)
    assert result.stdout.count("Input/output error") == 3
    a, b = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert {path.name for path in a.iterdir()} == {path.name for path in b.iterdir()}
    assert metrics(a) == metrics(b)


@pytest.fixture
def adopts_orphans():
    """Makes this process what init is elsewhere, and a Python program often is in a container."""
    PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.parametrize("when", ["starting", "training"])
@pytest.mark.usefixtures("adopts_orphans")
def test_processes_end_when_torchrun_dies_and_save_if_they_train(tmp_path, begin, when):
    process = begin(*LONG, f"run_dir={tmp_path}", nproc=2)
    wait_until(lambda: len(chaos.children(process.pid)) == 2, process)
    ranks = chaos.children(process.pid)
    if when == "training":
        wait_until(lambda: lines(tmp_path) > 5, process)
    process.kill()
    process.communicate(timeout=90)
    deadline = time.monotonic() + 30
    while any(chaos.is_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline, "the workers train on"
        time.sleep(0.05)
    assert (tmp_path / "gpt_snapshot.pt").exists() == (when == "training")


def test_sigint_during_startup_prints_no_traceback(tmp_path, begin):
    for phase in ("import", "start"):
        process = begin(*LONG, f"run_dir={tmp_path / phase}")
        maps, out = Path(f"/proc/{process.pid}/maps"), ""
        if phase == "import":
            wait_until(lambda maps=maps: "libtorch" in maps.read_text(), process)
        else:
            out = read_until(process, "run         run in")
        process.send_signal(signal.SIGINT)
        out += process.communicate(timeout=60)[0]
        assert "Traceback" not in out and process.returncode != 0, out


def test_resume_never_still_resumes_after_a_restart_by_torchrun(tmp_path, spawn):
    succeed(*TINY, f"run_dir={tmp_path}")
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts=2")
    arguments = [*LONG, f"run_dir={tmp_path}", "trainer.save_every_steps=20", "trainer.resume=never"]
    process = spawn(command(*arguments, launcher=torchrun))
    out = read_until(process, "100/100000")
    os.kill(chaos.children(process.pid)[0], signal.SIGKILL)
    out += read_until(process, "resuming from")
    process.terminate()
    out += process.communicate(timeout=60)[0]
    assert (tmp_path / "gpt_snapshot.old1.pt").exists()
    assert not (tmp_path / "gpt_snapshot.old2.pt").exists(), out
