"""Shared by test files: small texts, a tiny configuration, real starts of the program.

Tests run on the CPU, even on a machine with GPUs, which may be fewer than a test's processes. Tests on one GPU are in
test_gpu.py.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm

from engine.snapshots.snapshot import Snapshot
from engine.snapshots.storage import load
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script; programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Of the programs that tests start: threads that wait sleep, as there are more than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


# A run of a second or two on any machine.
TINY = [
    "experiment=null",
    "data=pydoc",
    "data.truncate=0.02",
    "data.block_size=16",
    "model.model_type=null",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=16",
    "trainer.batch_size=12",
    "trainer.max_steps=6",
    "trainer.eval_every_steps=3",
    "trainer.log_every_steps=1",
    "trainer.threads=1",
    "report=false",  # it and the samples take half a second of each start
    "samples=false",
]
# One that trains until it is stopped.
LONG = [
    *TINY,
    "trainer.max_steps=100000",
    "trainer.max_epochs=null",
    "trainer.eval_every_steps=500",
    "trainer.log_every_steps=10",
]
UNREAD = [*(s for s in TINY if not s.startswith("data")), "data=text"]  # without a text
# For losses that are compared: nothing is drawn, nothing rounded to bfloat16.
EXACT = ["trainer.use_amp=false", "model.embd_pdrop=0", "model.resid_pdrop=0", "model.attn_pdrop=0"]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


# Of models, as `model_snapshot` takes them.
ARCHITECTURES = {
    "gpt2": {"arch": "gpt2"},
    "without biases": {"arch": "gpt2", "bias": False, "n_embd": 36},  # heads of an odd width
    "untied": {"arch": "gpt2", "tie_weights": False},
    "modern": {"arch": "modern"},
    "shifted": {"arch": "modern", "token_shift": True},
    "n-grams": {"arch": "modern", "ngram_rows": 50},
    "shifted, with n-grams": {"arch": "modern", "token_shift": True, "ngram_rows": 50},
}

# The files that take longest begin first, so that none is left over at the end for one process.
FIRST = ("crashes", "sharding", "main", "launch", "metrics", "sweep", "distributed", "hosts", "readme", "object_store")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))


# What a finished run that saved once leaves in its directory, beside `tensorboard/`.
RUN_FILES = {
    ".gpt_snapshot.pt.lock",
    ".gpt_snapshot.pt.owner",
    ".lock",
    "config.yaml",
    "environment.jsonl",
    "gpt_snapshot.pt",
    "gpt_snapshot.best.pt",
    "gpt_snapshot.prev.pt",
    "main.log",
    "metrics.jsonl",
}


def start(
    *arguments: str,
    nproc: int = 0,
    script: str = "main.py",
    launcher: tuple[str, ...] = (),
    timeout: float = 120,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    **kwargs,
):
    """Runs the program as a user would, under torchrun if `nproc`, and waits for its end."""
    line = command(*arguments, nproc=nproc, script=script, launcher=launcher)
    environment = {**os.environ, **(env or {})}
    if not (launcher or kwargs):
        return warm.run(line, cwd, environment, timeout)
    return run(line, cwd, environment, timeout, **kwargs)


def run(line: list[str], cwd: Path, env: dict[str, str], timeout: float, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs a command line, without standard input unless it is given, and waits for its end."""
    given = kwargs if "input" in kwargs else {"stdin": subprocess.DEVNULL, **kwargs}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, **given)


def succeed(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """As `start`; the program must end with exit status 0."""
    result = start(*arguments, **kwargs)
    assert result.returncode == 0, result.stderr
    return result


def command(*arguments: str, nproc: int = 0, script: str = "main.py", launcher: tuple[str, ...] = ()) -> list[str]:
    """The program's command line, under torchrun if `nproc`, or under the module `launcher`."""
    if nproc:
        launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}")
    module = ["-m", *launcher] if launcher else []
    return [sys.executable, *module, str(ROOT / script), *map(str, arguments)]


def run_python(
    code: str, *arguments: str, cwd: Path = ROOT, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a Python of its own, which finds the application's modules."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return run([sys.executable, "-c", code, *arguments], cwd, environment, timeout)


@pytest.fixture
def spawn():
    """Starts a command, as `subprocess.Popen`; what still runs after the test is killed."""
    started = []
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def spawn(line: list, **kwargs) -> subprocess.Popen:
        started.append(subprocess.Popen(line, **{**usual, **kwargs}))
        return started[-1]

    yield spawn
    for process in started:
        process.kill()
        process.wait(timeout=30)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()


@pytest.fixture
def begin(spawn):
    """Starts the program as a user would, under torchrun if `nproc`, and does not wait for it."""

    def begin(*arguments: str, nproc: int = 0, **kwargs) -> subprocess.Popen:
        return spawn(command(*arguments, nproc=nproc), **kwargs)

    return begin


def patched_main(folder: Path, patch: str) -> str:
    """A script in `folder` that is main.py, after the code `patch` has changed its modules."""
    script = folder / "patched.py"
    main = str(ROOT / "main.py")
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
{patch}
sys.argv[0] = __file__ = {main!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""
    )
    return str(script)


def wait_until(true, process: subprocess.Popen, patience: float = 60) -> None:
    """Waits for `true()`; fails with what the process printed if that ends or time is up."""
    deadline = time.monotonic() + patience
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate(timeout=30)[0] or "")
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_until(process: subprocess.Popen, text: str, patience: float = 60) -> str:
    """The output of a process up to `text`; fails with it at exit or timeout.

    Nothing is kept back: `communicate()` has the rest.
    """
    out, deadline = b"", time.monotonic() + patience
    while text.encode() not in out:
        left = max(0, deadline - time.monotonic())
        is_ready = select.select([process.stdout], [], [], left)[0]
        piece = os.read(process.stdout.fileno(), 2**16) if is_ready else b""
        if not piece:
            pytest.fail(f"no {text!r} in: {out.decode()}")
        out += piece
    return out.decode()


def lines(run_dir: Path) -> int:
    """How many lines a run has logged."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def metrics(run_dir: Path, split: str | None = None) -> list[dict]:
    """The lines of `metrics.jsonl`, without what depends on the clock or the memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timing = ("seconds", "tokens_per_s", "mfu", "memory")
    return [
        {key: value for key, value in line.items() if key not in timing}
        for line in lines
        if split in (None, line["split"])
    ]


def shows_code(output: str) -> bool:
    """Whether there is a traceback of ours; torchrun and TensorBoard print their own."""
    return re.search(rf'File "{ROOT}/\w+\.py', output) is not None


def latest(run_dir: Path) -> Snapshot:
    return load(str(run_dir / "gpt_snapshot.pt"))


def best(run_dir: Path) -> Snapshot:
    return load(str(run_dir / "gpt_snapshot.best.pt"))


def some_snapshot(step: int = 5) -> Snapshot:
    """A small snapshot that `step` decides."""
    generator = torch.Generator().manual_seed(step)
    weights = {"a.weight": torch.randn(4, 3, generator=generator), "b": torch.randn(7, generator=generator)}
    state = {"a.weight": {"step": torch.tensor(float(step)), "exp_avg": torch.randn(4, 3, generator=generator)}}
    return Snapshot(
        weights,
        state,
        finished_epoch=2,
        step=step,
        windows_seen=60,
        seed=1,
        best_loss=1.5,
        best_step=4,
        vocabulary="\n aé漢",
        text_digest="ab",
        choices={"compile": False},
        config={"model": {"n_layer": 2, "bias": None}},
    )


def small_gpt(arch: str = "gpt2", pdrop: float = 0.0, std: float | None = None, **settings) -> GPT:
    """A small model. With `std` its weights are all drawn anew, that large: none starts at zero,
    which would hide the others.
    """
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 11, "block_size": 12}
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), pdrop)
    torch.manual_seed(0)
    model = GPT(GPTConfig(arch=arch, model_type=None, **(sizes | dropout | settings)))
    if std is not None:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return model


def model_snapshot(vocabulary: str, arch: str = "gpt2", **settings) -> Snapshot:
    """The snapshot of a small model that has learned something: none of its weights is zero."""
    sizes = {"vocab_size": len(vocabulary), "n_head": 4, "n_embd": 32, "block_size": 24}
    with torch.random.fork_rng():
        model = small_gpt(arch, **sizes | settings)
    weights = model.state_dict()
    generator = torch.Generator().manual_seed(len(vocabulary))
    for tensor in filter(torch.is_floating_point, weights.values()):
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return Snapshot(
        weights,
        {},
        step=7,
        loss=1.25,
        loss_step=7,
        vocabulary=vocabulary,
        config={"run_name": "small", "model": dataclasses.asdict(model.config)},
    )


def equal(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots hold the same, bit for bit, but for the time."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    measured = ("seconds", "limit_s", "minutes")
    a, b = ({k: v for k, v in dataclasses.asdict(snapshot).items() if k not in measured} for snapshot in (a, b))
    return plain(a) == plain(b)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def small_disk(folder: Path, size: str | int):
    """A file system of `size` bytes below `folder`; skips the test where it cannot be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of 2,000 characters, 27 of them distinct."""
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (i * i + i // 7) % 26) + " " * (i % 5 == 0) for i in range(2000))[:2000])
    return path


@pytest.fixture(scope="module")
def browser():
    """A Chromium that selenium drives."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("there is no Chromium with its driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    torch.set_deterministic_debug_mode("default")
