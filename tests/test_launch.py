"""Several processes by every way to start them: plain Python, Accelerate, a notebook."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
import yaml
from conftest import ROOT, TINY, equal, metrics, patched_main, start, wait_until
from test_crashes import LONG, begin, lines
from test_main import refuse

from engine.snapshots.storage import load

TWO = "launch.nproc_per_node=2"


def run_python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a session that finds the application's modules."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- python main.py launch.nproc_per_node=2 ---


def test_two_processes_from_plain_python_are_those_of_torchrun_and_a_run_resumes_by_either(
    tmp_path,
):
    ours, theirs = tmp_path / "it's ours", tmp_path / "theirs"
    quoted = str(ours).replace("'", r"\'")
    result = start(*TINY, TWO, f"run_dir='{quoted}'")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("; 2 processes") == 1 and "recipe" not in result.stdout
    assert start(*TINY, f"run_dir={theirs}", nproc=2).returncode == 0
    assert metrics(ours) == metrics(theirs)
    a, b = load(str(ours / "gpt_snapshot.pt")), load(str(theirs / "gpt_snapshot.pt"))
    assert a.processes == 2 and a.config == b.config | {"run_dir": str(ours)}
    a.config = {**b.config}
    assert equal(a, b)
    assert "launch" not in yaml.safe_load((ours / "config.yaml").read_text())
    ours.rename(tmp_path / "moved")
    del a.config["report"]  # as in a snapshot of a version that had another setting instead
    a.config["sketch"] = True
    (tmp_path / "moved" / "gpt_snapshot.pt").write_bytes(a.to_bytes())
    result = start(*TINY, "trainer.max_steps=8", f"run_dir={tmp_path / 'moved'}")
    changes = [x.split()[4] for x in result.stdout.splitlines() if x.startswith("changed since")]
    assert set(changes) == {"processes", "run_dir", "trainer.max_steps"}, result.stdout


@pytest.mark.parametrize(
    "found_by",
    ["--config-dir={}", pytest.param("hydra.searchpath=[file://{}]", marks=pytest.mark.slow)],
)
def test_the_processes_compose_what_was_asked_for(found_by, tmp_path):
    recipes = tmp_path / "recipes" / "experiment"
    recipes.mkdir(parents=True)
    recipe = {"trainer": {"seed": 7}, "launch": {"nproc_per_node": 2}, "run_name": "mine"}
    (recipes / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    settings = [s for s in TINY if not s.startswith("experiment")]
    result = start(
        *[found_by.format(recipes.parent), *settings, "experiment=mine", "++trainer.use_amp=false"],
        "trainer.log_every_steps=${trainer.eval_every_steps}",
        f"hydra.run.dir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    snapshot = load(str(tmp_path / "run" / "gpt_snapshot.pt"))
    assert snapshot.processes == 2 and snapshot.config["run_name"] == "mine"
    assert snapshot.seed == 7 and snapshot.choices["amp_dtype"] == "float32"
    assert snapshot.config["trainer"]["log_every_steps"] == 3
    assert {p.name for p in tmp_path.iterdir()} == {"recipes", "run"}


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGUSR2)),
    ],
)
def test_a_signal_has_the_processes_save_and_the_status_is_that_of_one(tmp_path, number):
    process = begin(*LONG, TWO, f"run_dir={tmp_path}")
    wait_until(lambda: lines(tmp_path) > 5, process)
    ranks = chaos.children(process.pid)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, out
    step = load(str(tmp_path / "gpt_snapshot.pt")).step
    assert f"{number.name}: stopped after step {step} of 100000" in out
    assert "Traceback" not in out and "error" not in out
    assert len(ranks) == 2 and not any(chaos.is_alive(rank) for rank in ranks)


def test_a_signal_to_one_of_the_processes_stops_all_of_them(tmp_path):
    process = begin(*LONG, TWO, f"run_dir={tmp_path}")
    wait_until(lambda: lines(tmp_path) > 5, process)
    os.kill(chaos.children(process.pid)[1], signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "SIGTERM: stopped after step" in out


def test_a_killed_process_ends_the_run_with_one_line(tmp_path):
    process = begin(*LONG, TWO, f"run_dir={tmp_path}")
    wait_until(lambda: lines(tmp_path) > 5, process)
    killed = chaos.children(process.pid)[1]
    os.kill(killed, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in out, out
    assert [line for line in out.splitlines() if line.startswith("error: ")] == [
        f"error: rank 1 (process {killed}) was ended by SIGKILL; the same command resumes it"
    ]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_process_is_replaced_as_often_as_was_asked_for(processes, tmp_path):
    settings = [f"launch.nproc_per_node={processes}", "launch.max_restarts=1"]
    process = begin(*LONG, *settings, f"run_dir={tmp_path}")
    wait_until(lambda: lines(tmp_path) > 5, process)
    before, logged = chaos.children(process.pid), lines(tmp_path)
    os.kill(before[-1], signal.SIGKILL)
    wait_until(lambda: len(set(chaos.children(process.pid)) - set(before)) == processes, process)
    wait_until(lambda: lines(tmp_path) > logged + 5, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert out.count("plan  ") == 2 and "Traceback" not in out


def test_what_is_wrong_is_said_before_processes_are_started_or_once_by_each(tmp_path):
    run = f"run_dir={tmp_path / 'run'}"
    refuse(*TINY, TWO, run, "trainer.batch_size=1", says="must be at least the number of")
    result = start(*TINY, TWO, run, "data.path=nowhere.txt", cwd=tmp_path)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert errors[-1].startswith("error: rank ") and errors[-1].endswith("see its error above")
    assert set(errors[:-1]) <= {f"error (rank {r}): nowhere.txt: no such file" for r in (0, 1)}
    assert 1 <= len(errors[:-1]) == len(set(errors[:-1])), result.stderr


@pytest.mark.parametrize("nproc, setting", [(2, TWO), (1, "launch.max_restarts=1")])
def test_processes_of_a_launcher_start_no_others(nproc, setting, tmp_path):
    says = "must be 1 and 0 under a launcher"
    refuse(*TINY, setting, f"run_dir={tmp_path}", says=says, nproc=nproc)


# --- Accelerate ---


@pytest.mark.slow
def test_accelerate_launch_trains(tmp_path):  # two processes: in test_readme.py
    launcher = ("accelerate.commands.launch", "--cpu", "--num_processes", "1")
    home = {"HF_HOME": str(tmp_path)}  # has no configuration of the user's
    result = start(*TINY, f"run_dir={tmp_path / 'run'}", launcher=launcher, env=home)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 6/6 | held-out") == 1


# --- a notebook ---


def test_a_session_trains_as_often_as_it_likes_and_prints_the_log(tmp_path):
    code = f"""
from main import configure, train
first = train(configure(*{TINY}, "run_dir=a"))
assert train(configure(*{TINY}, "run_dir=a")) == first
assert train(configure(*{TINY}, "run_dir=b", "trainer.seed=2")) != first
assert configure().run_name.startswith("shakespeare_")
from engine.errors import UserError
for override, says in (("model.n_layr=3", "did you mean model.n_layer?"), ("{TWO}", "one process")):
    try:
        train(configure(override))
    except UserError as error:
        assert says in str(error), error
    else:
        raise AssertionError(override)
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("step 6/6 | held-out" in line for line in lines) == 2
    assert sum("this run is finished" in line for line in lines) == 1
    assert sum("which fits this machine" in line for line in lines) == 3
    assert start(*TINY, "run_dir=c", cwd=tmp_path).returncode == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "c")


def test_the_notebook_launcher_of_accelerate_starts_two_processes(tmp_path):
    code = f"""
from accelerate import notebook_launcher
from main import configure, train
config = configure(*{TINY}, "run_dir=run")
notebook_launcher(train, (config,), num_processes=2, use_port="{free_port()}")
"""
    result = run_python(code, tmp_path, HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert load(str(tmp_path / "run" / "gpt_snapshot.pt")).processes == 2
    assert result.stdout.count("step 6/6 | held-out") == 1


@pytest.mark.slow
def test_a_fork_of_a_session_that_has_trained_is_refused_and_does_not_hang(tmp_path):
    code = f"""
from multiprocessing import get_context
from main import configure, train
config = configure(*{TINY}, "run_dir=run")
train(config)
copy = get_context("fork").Process(target=train, args=(config,))
copy.start()
copy.join(30)
assert copy.exitcode == 1, copy
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "forked after torch started its threads" in result.stderr


def test_a_system_without_locks_of_posix_and_its_signals_trains(tmp_path):
    """As on Windows, as far as it can be had here."""
    script = patched_main(
        tmp_path,
        """
import atexit, signal, types
import hydra, torch.distributed.elastic.multiprocessing.errors, torch.utils.tensorboard  # which have their own ways
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPIPE"):
    delattr(signal, name)
locked = []
sys.modules |= {"fcntl": None, "resource": None}
sys.modules["msvcrt"] = types.SimpleNamespace(
    LK_LOCK=1, LK_NBLCK=2, locking=lambda descriptor, mode, count: locked.append(mode)
)
atexit.register(lambda: print("locked", locked))
""",
    )
    result = start(*TINY, f"run_dir={tmp_path / 'run'}", script=script)
    assert result.returncode == 0, result.stderr
    assert "step 6/6" in result.stdout
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert "locked [2, 2]" in result.stdout  # the run directory, and its snapshot
    assert {json.loads(line).get("memory", 0) for line in records} == {0}
