"""Several hosts: network namespaces of this machine, joined by a virtual link; a torchrun in each.

Each host has a name of its own, which it takes for 127.0.1.1 as a fresh Debian does.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import CREDENTIALS, EXACT, ROOT, RUN_FILES, TINY, latest, metrics, succeed

LONG = [
    *(*TINY, *EXACT, "trainer.max_epochs=null", "trainer.max_steps=600"),
    *("trainer.log_every_steps=10", "trainer.eval_every_steps=200", "trainer.save_every_steps=20"),
]
ADDRESS = "10.77.0.{}".format
# As docs/scaling.md says, but for waits of seconds: a host is given up after 3 s, not 15.
QUICK = "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"
RETURN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Host:
    """A machine of its own, as a program in it sees it: its network, its name, its /etc/hosts. What is in `read_only`
    it can read but not write.
    """

    def __init__(self, number: int, folder: Path):
        self.number, self.folder, self.read_only = number, folder, None
        self.name, self.namespace = f"host{number}", f"gpt-{os.getpid()}-{number}"
        self.processes: list[subprocess.Popen] = []
        other = f"{ADDRESS(3 - number)} host{3 - number}"
        (folder / self.name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{other}\n")
        ip("netns", "add", self.namespace)

    def connect(self) -> None:
        ip("-n", self.namespace, "address", "add", f"{ADDRESS(self.number)}/24", "dev", "eth0")
        self.link("lo", "up")
        self.link("eth0", "up")

    def link(self, name: str, state: str) -> None:
        ip("-n", self.namespace, "link", "set", name, state)

    def begin(self, *command, **environment) -> subprocess.Popen:
        """Starts a command in this host; what it prints is in `output()`."""
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2'
        if self.read_only:
            there = f"'{self.read_only}'"
            script += f" && mount --bind {there} {there} && mount -o remount,ro,bind {there}"
        inside = ["sh", "-c", f'{script} && exec "$@"', "sh", self.name, self.folder / self.name]
        with open(self.folder / f"{self.name}.out", "a") as output:
            process = subprocess.Popen(
                [*f"ip netns exec {self.namespace} unshare --uts --mount".split(), *inside, *command],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def torchrun(self, *arguments, nnodes="2", restarts=0, **environment) -> subprocess.Popen:
        """Starts the program as a user of two hosts would, on the first of which they meet."""
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}"]
        launcher += ["--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_endpoint=host1:29400"]
        launcher += ["--rdzv_id=1", f"--max-restarts={restarts}", QUICK]
        return self.begin(*launcher, ROOT / "main.py", *arguments, **RETURN, **environment)

    def output(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()

    def kill(self) -> None:
        """Ends every process of this host at once, as a power cut would."""
        for pid in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(int(pid), signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=30)


def ip(*words: str) -> str:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if result.returncode:
        raise OSError(result.stderr)
    return result.stdout


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, and a wire between them."""
    (tmp_path / "hosts").mkdir()
    made = []
    try:
        try:
            for number in (1, 2):
                made.append(Host(number, tmp_path / "hosts"))
            ends = [("name", "eth0", "netns", host.namespace) for host in made]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for host in made:
                host.connect()
                assert host.begin("true").wait(timeout=30) == 0, host.output()
        except (OSError, AssertionError) as error:
            pytest.skip(f"no network namespaces here (they take root): {error}")
        yield made
    finally:
        for host in made:
            host.kill()
            ip("netns", "delete", host.namespace)


def finish(hosts: list[Host], patience: float = 60) -> None:
    """Waits for the newest command of every host, which must succeed."""
    deadline = time.monotonic() + patience
    for host in hosts:
        try:
            status = host.processes[-1].wait(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "still running"
        assert status == 0, "\n".join(f"--- {h.name}\n{h.output()}" for h in hosts)


def wait_until(true, hosts: list[Host], patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() > deadline or hosts[0].processes[-1].poll() is not None:
            pytest.fail("\n".join(f"--- {h.name}\n{h.output()}" for h in hosts))
        time.sleep(0.02)


def step_of(run_dir: Path) -> int:
    """The newest step in the metrics of a run; 0 before there are any."""
    path = run_dir / "metrics.jsonl"
    steps = re.findall(r'"step": (\d+)', path.read_text()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def assert_same_run(a: Path, b: Path) -> None:
    """Every loss of every step, and the weights at the end, are equal to rounding."""
    for one, other in zip(metrics(a), metrics(b), strict=True):
        assert (one["step"], one["split"]) == (other["step"], other["split"])
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5), one["step"]
    one, other = (latest(run) for run in (a, b))
    assert one.step == other.step
    for name, value in one.model_state.items():
        assert torch.allclose(value, other.model_state[name], atol=5e-4), name


def test_two_hosts_train_one_run_and_only_the_first_writes(hosts, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    hosts[1].read_only = run
    for host in hosts:
        host.torchrun(*TINY, *EXACT, f"run_dir={run}")
    finish(hosts)
    assert "device      CPU, 1 thread per process; 2 processes" in hosts[0].output()
    assert "plan " in hosts[0].output() and "plan " not in hosts[1].output()
    assert {path.name for path in run.iterdir()} - {"tensorboard"} == RUN_FILES
    alone = tmp_path / "alone"
    succeed(*TINY, *EXACT, f"run_dir={alone}")
    assert_same_run(alone, run)


@pytest.mark.slow  # four starts of hosts
def test_a_run_survives_the_loss_of_either_host(hosts, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    for host in hosts:
        host.torchrun(*LONG, f"run_dir={run}", restarts=3)
    wait_until(lambda: step_of(run) >= 100, hosts)
    hosts[1].kill()
    hosts[1].torchrun(*LONG, f"run_dir={run}", restarts=3)
    wait_until(lambda: "resuming from" in hosts[0].output(), hosts)
    wait_until(lambda: step_of(run) >= 300, hosts)
    hosts[0].kill()  # on which they meet
    assert step_of(run) < 600
    assert hosts[1].processes[-1].wait(timeout=60) != 0  # not to be waited for
    for host in reversed(hosts):  # the same command again
        host.torchrun(*LONG, f"run_dir={run}", restarts=3)
    finish(hosts)
    assert hosts[0].output().count("resuming from") == 2
    succeed(*LONG, f"run_dir={whole}")
    assert_same_run(whole, run)


@pytest.mark.slow  # two starts of two hosts
def test_hosts_that_share_no_disk_train_one_run_with_its_snapshot_in_a_store(hosts, tmp_path):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = "29500"
    server = hosts[0].begin(sys.executable, "-m", "moto.server", "-H", ADDRESS(1), "-p", port)
    store = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{ADDRESS(1)}:{port}"}
    wait_until(lambda: "Running on" in hosts[0].output(), hosts)
    bucket = "import fsspec; fsspec.filesystem('s3').mkdir('bucket')"
    assert hosts[1].begin(sys.executable, "-c", bucket, **store).wait(timeout=30) == 0
    snapshot = "trainer.snapshot_path=s3://bucket/run/gpt.pt"
    for steps, number in ((4, 1), (6, 2)):
        for host in hosts:
            run = tmp_path / f"disk{number}-{host.name}"
            steps_here = f"trainer.max_steps={steps}"
            host.torchrun(*TINY, *EXACT, snapshot, steps_here, f"run_dir={run}", **store)
        finish(hosts)
    assert server.poll() is None
    assert "resuming from s3://bucket/run/gpt.pt, step 4" in hosts[0].output()
    first, second = sorted(tmp_path.glob("disk*"))
    assert (first.name, second.name) == ("disk1-host1", "disk2-host1")
    alone = tmp_path / "alone"
    succeed(*TINY, *EXACT, f"run_dir={alone}")
    both = [*metrics(first, "train"), *metrics(second, "train")]
    for one, other in zip(metrics(alone, "train"), both, strict=True):
        assert one["step"] == other["step"]
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-6)


@pytest.mark.slow  # the hosts wait for each other
def test_a_disconnected_host_is_dropped_and_rejoins(hosts, tmp_path):
    run, endless = tmp_path / "run", [*LONG, "trainer.max_steps=1000000", "trainer.timeout_s=5"]
    for host in hosts:
        host.torchrun(*endless, f"run_dir={run}", nnodes="1:2", restarts=3)
    wait_until(lambda: step_of(run) >= 100, hosts)
    hosts[1].link("eth0", "down")
    alone = "changed since the snapshot: processes was 2, is 1"
    wait_until(lambda: alone in hosts[0].output(), hosts)
    # Not when the network is back.
    wait_until(lambda: "error (rank 1): after step" in hosts[1].output(), hosts)
    assert "no answer from the process that holds the store" in hosts[1].output()
    hosts[1].link("eth0", "up")
    joined = "changed since the snapshot: processes was 1, is 2"
    wait_until(lambda: joined in hosts[0].output(), hosts, patience=120)
    step = step_of(run)
    wait_until(lambda: step_of(run) > step + 50, hosts)
    hosts[0].processes[-1].terminate()
    hosts[0].processes[-1].wait(timeout=60)
    step, whole = latest(run).step, tmp_path / "whole"
    hosts[0].begin(sys.executable, ROOT / "main.py", *endless, f"run_dir={whole}")
    wait_until(lambda: step_of(whole) >= step, hosts, patience=240)
    hosts[0].processes[-1].terminate()
    hosts[0].processes[-1].wait(timeout=60)
    losses = [{(line["step"], line["split"]): line["loss"] for line in metrics(path)} for path in (whole, run)]
    assert len(losses[1]) > 20 and set(losses[1]) <= set(losses[0])
    for key, loss in losses[1].items():
        assert loss == pytest.approx(losses[0][key], abs=2e-3), key
