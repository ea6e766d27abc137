"""Under SLURM, without a cluster: the variables that its manual pages give the processes of a step, and an `srun` that
starts processes of this machine.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LONG, ROOT, TINY, latest, lines, start, wait_until

from engine.errors import UserError
from engine.parallel import distributed, slurm

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables(pairs: str) -> dict[str, str]:
    """SLURM's variables of `NAME=VALUE ...`, without their prefix."""
    return {f"SLURM_{name}": value for name, value in (pair.split("=") for pair in pairs.split())}


# Of the whole job: 2 nodes with 2 tasks each.
JOB = variables("JOB_ID=4242 JOB_NODELIST=node[07-08] JOB_NUM_NODES=2 NTASKS=4 TASKS_PER_NODE=2(x2)")
FIRST_TASK = variables("PROCID=0 LOCALID=0 NODEID=0")
ONE_TASK = FIRST_TASK | variables("STEP_NODELIST=node07 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1")
STEP = variables("STEP_ID=0 STEP_NODELIST=node[07-08] STEP_NUM_TASKS=4 STEP_TASKS_PER_NODE=2(x2)")
SRUN = JOB | STEP | variables("PROCID=3 LOCALID=1 NODEID=1")  # the last task of four
UNEVEN = SRUN | variables("STEP_NODELIST=node[01-03,07],gpu5 STEP_NUM_TASKS=8 STEP_TASKS_PER_NODE=2(x3),1(x2)")


def adopted(environment: dict[str, str], changed: str) -> tuple[str | None, ...]:
    """torchrun's variables, from those of SLURM."""
    environment = environment | variables(changed)
    slurm.export_torchrun_env(environment)
    return tuple(environment.get(name) for name in NAMES)


FIRST_HOSTS = {"gpu5,node[01-03,07]": "gpu5", "node[7]": "node7", "n-1.cluster,n-2.cluster": "n-1.cluster"}
FIRST_HOSTS |= {"rack[2-3]node[04,06]": "rack2node04", "c[001-128]-ib0": "c001-ib0"}
TORCHRUN = dict(zip(NAMES, ("5", "8", "1", "4", "node07", "29400"), strict=True))


@pytest.mark.parametrize(
    "environment, changed, expected",
    [
        (SRUN, "", "3 4 1 2 node07 14242"),
        (UNEVEN, "PROCID=5 NODEID=2 LOCALID=1", "5 8 1 2 node01 "),
        (UNEVEN, "PROCID=6 NODEID=3 LOCALID=0", "6 8 0 1 node01 "),
        (UNEVEN, "PROCID=7 NODEID=4 LOCALID=0", "7 8 0 1 node01 "),
        *((SRUN, f"STEP_NODELIST={nodes}", f"3 4 1 2 {first} ") for nodes, first in FIRST_HOSTS.items()),
        (SRUN | TORCHRUN, "", "5 8 1 4 node07 29400"),  # torchrun under srun
        (SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}, "", "3 4 1 2 10.0.0.7 29500"),
        # One process: no SLURM, a batch script without srun, salloc, an interactive step (srun --pty)
        *((environment, "", "- - - - - -") for environment in ({}, JOB | FIRST_TASK, JOB, JOB | ONE_TASK)),
    ],
)
def test_srun_variables_become_torchruns_unless_it_is_chosen_or_there_is_one_process(environment, changed, expected):
    assert " ".join(value or "-" for value in adopted(environment, changed)).startswith(expected)


def test_jobs_and_steps_have_their_own_ports_outside_the_ephemeral_range():
    starts = [(job, step) for job in range(10**6, 10**6 + 50) for step in range(20)]
    ports = {adopted(SRUN, f"JOB_ID={job} STEP_ID={step}")[5] for job, step in starts}
    assert len(ports) == len(starts)
    assert all(1024 <= int(port) < 32768 for port in ports)


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"RANK": "1"}, "RANK=1: must be below WORLD_SIZE, 1: unset RANK"),
        ({"RANK": "x"}, "RANK=x: must be an integer"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: must be an integer, at least 1"),
        ({"SLURM_STEP_NUM_TASKS": "abc"}, "SLURM_STEP_NUM_TASKS=abc, .*'SLURM_STEP_NODELIST'"),
        (SRUN | variables("NODEID=2"), "SLURM_STEP_NUM_TASKS=4, .*"),
    ],
)
def test_variables_of_a_launcher_that_are_incomplete_or_no_numbers_get_one_line(tmp_path, variables, says):
    result = start(*TINY, f"run_dir={tmp_path}", env=variables, timeout=30)
    assert result.returncode == 1 and re.match(f"error: {says}", result.stderr), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"])
def test_a_task_with_one_visible_gpu_uses_it(monkeypatch, variable):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(distributed, "_local_rank", 1)
    monkeypatch.setattr(distributed, "_local_size", 2)
    with pytest.raises(UserError, match="2 processes on a machine with 1 GPU"):
        distributed.choose_device("auto")
    monkeypatch.setenv(variable, "1")
    assert distributed.choose_device("auto") == torch.device("cuda", 0)


# --- the batch script ---

# Starts TASKS processes of this machine with the variables of a step, passes SIGUSR2 and SIGTERM on
# to them, and ends with the highest of their statuses, as srun does.
FAKE_SRUN = """#!{python}
import os, signal, socket, subprocess, sys
command, tasks = sys.argv[1:], int(os.environ["TASKS"])
while command[0].startswith("--"):
    command.pop(0)
step = {{
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": socket.gethostname(), "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks),
}}
def start(task):
    numbers = {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}}
    return subprocess.Popen(command, env={{**os.environ, **step, **numbers}})
started = [start(task) for task in range(tasks)]
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in started])
open(os.environ["SRUN_PID"], "w").write(str(os.getpid()))
statuses = [task.wait() for task in started]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a batch script whose `srun` and `scontrol` are our own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(FAKE_SRUN.format(python=sys.executable))
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    job = 40_000 + os.getpid()  # the port comes from it: another for another run of this test
    return {
        **(JOB | FIRST_TASK | variables(f"JOB_ID={job} CPUS_PER_TASK=1")),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SRUN_PID": str(tmp_path / "srun.pid"),
        "TASKS": "2",
    }


@pytest.fixture
def submit(spawn, cluster):
    """Submits a job that trains in the directory `run`."""

    def submit(run: Path, *arguments) -> subprocess.Popen:
        script = ["bash", ROOT / "docs" / "slurm.sbatch"]
        return spawn([*script, *arguments, f"run_dir={run}"], env={**os.environ, **cluster})

    return submit


def test_a_job_at_its_time_limit_is_requeued(submit, cluster, tmp_path):
    run = tmp_path / "run"
    job = submit(run, *LONG)
    wait_until(lambda: lines(run) > 5, job)
    os.kill(int(Path(cluster["SRUN_PID"]).read_text()), signal.SIGUSR2)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGUSR2 and "; 2 processes\n" in out, out
    step = latest(run).step
    assert step > 0 and out.count(f"SIGUSR2: stopped after step {step} of 100000") == 1, out
    assert (tmp_path / "scontrol").read_text() == f"requeue {cluster['SLURM_JOB_ID']}\n"


@pytest.mark.parametrize("status", [0, 1, 143])  # finished, failed, preempted or cancelled
def test_a_job_requeues_itself_at_its_time_limit_alone(submit, tmp_path, status):
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\nexit {status}\n")
    assert submit(tmp_path / "run").wait(timeout=30) == status
    assert not (tmp_path / "scontrol").exists()


def test_a_requeued_job_is_a_restart(monkeypatch):
    assert not distributed.is_restart()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert distributed.is_restart()


def test_a_sweep_under_srun_is_refused(tmp_path):
    result = start("-m", *TINY, "trainer.seed=1,2", f"run_dir={tmp_path}", env=SRUN | variables("PROCID=0"))
    assert result.returncode == 1 and "without a launcher" in result.stderr
