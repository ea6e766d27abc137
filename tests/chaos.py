"""Trains, causes a fault at a random moment, repeats the command, and so on; the result must equal an uninterrupted run
bit for bit.

    python tests/chaos.py kills=200 seed=1 processes=2

Prints the faults and how often the run survived each, and exits with status 1 at the first difference. A seed repeats
the faults, but not their exact moments.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import RUN_FILES, TINY, best, command, equal, latest, metrics

from engine.snapshots.snapshot import SnapshotError
from engine.snapshots.storage import load

SETTINGS = [
    *TINY,
    "data.truncate=0.05",
    "samples=true",
    "model.resid_pdrop=0.2",
    "optimizer=muon",
    "optimizer.schedule=cosine",
    "trainer.eval_every_steps=70",
    "trainer.log_every_steps=10",
    "trainer.save_every_steps=15",
    "trainer.save_every_minutes=0.004",
    "trainer.keep_snapshots=2",
    "trainer.timeout_s=60",
]
PATIENCE = 120  # seconds for anything that should take a few


def kill_everything(run: "Run", chance: random.Random) -> None:
    run.send(signal.SIGKILL, run.process.pid, *run.workers())


def ask_to_save_then_kill_everything(run: "Run", chance: random.Random) -> None:
    if run.is_training():  # before, Python itself may not have got as far as to ignore it
        run.send(signal.SIGUSR1, chance.choice(run.workers()))
    time.sleep(chance.random() * 0.3)
    kill_everything(run, chance)


def kill_everything_and_damage_the_latest_snapshot(run: "Run", chance: random.Random) -> None:
    kill_everything(run, chance)
    run.wait()
    path = run.run_dir / "gpt_snapshot.pt"
    if not path.exists() or not (run.run_dir / "gpt_snapshot.prev.pt").exists():
        return
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    path.unlink()  # after a killed save, .prev may be the same file
    path.write_bytes(content)


STOPS = (signal.SIGTERM, signal.SIGINT)
FAULTS = {
    "kill one rank": lambda run, chance: run.send(signal.SIGKILL, chance.choice(run.workers())),
    "kill all ranks": lambda run, chance: run.send(signal.SIGKILL, *run.workers()),
    "kill torchrun": lambda run, chance: run.send(signal.SIGKILL, run.process.pid),
    "kill everything": kill_everything,
    # torchrun starts all ranks again by itself.
    "kill one rank under restarts": lambda run, chance: run.send(signal.SIGKILL, chance.choice(run.workers())),
    "ask to stop": lambda run, chance: run.send(chance.choice(STOPS), run.process.pid),
    "ask one rank to stop": lambda run, chance: run.send(chance.choice(STOPS), chance.choice(run.workers())),
    "ask to save then kill everything": ask_to_save_then_kill_everything,
    "kill everything and damage the latest snapshot": kill_everything_and_damage_the_latest_snapshot,
}


class Run:
    """One start of the program; `processes` of 0 starts it without torchrun."""

    def __init__(self, run_dir: Path, steps: int, processes: int, restarts: int = 0):
        self.run_dir, self.processes = run_dir, processes
        torchrun = ("torch.distributed.run", "--standalone", f"--max-restarts={restarts}")
        launcher = (*torchrun, f"--nproc_per_node={processes}") if processes else ()
        arguments = (*SETTINGS, f"trainer.max_steps={steps}", f"run_dir={run_dir}")
        self.output = tempfile.TemporaryFile("w+")
        self.started = time.time()
        self.seen: set[int] = set()
        line = command(*arguments, launcher=launcher)
        self.process = subprocess.Popen(line, cwd=ROOT, stdout=self.output, stderr=subprocess.STDOUT)

    def workers(self) -> list[int]:
        """The processes that train, or would if they had got that far."""
        if not self.processes:
            return [self.process.pid]
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            found = children(self.process.pid)
            self.seen |= set(found)
            if len(found) == self.processes:
                return found
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)
        return list(self.seen) or [self.process.pid]

    def is_training(self) -> bool:
        log = self.run_dir / "metrics.jsonl"
        return log.exists() and log.stat().st_mtime > self.started

    def send(self, number: int, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, patience: float = PATIENCE) -> int:
        """Waits until nothing of the run is left; returns the exit status."""
        status = self.process.wait(timeout=patience)
        deadline = time.monotonic() + patience
        while any(is_alive(pid) for pid in self.seen):
            assert time.monotonic() < deadline, f"still alive: {self.seen}\n{self.text()}"
            time.sleep(0.02)
        return status

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = entry.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(entry.parent.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_same(run_dir: Path, reference: Path) -> None:
    """Raises AssertionError unless the two finished runs are equal, but for the clock."""
    assert metrics(run_dir) == metrics(reference), "the metrics differ"
    for find in (latest, best):
        assert equal(*(settle(find(each)) for each in (run_dir, reference))), f"the {find.__name__} snapshot differs"
    names = {path.name for path in run_dir.iterdir()} - RUN_FILES - {"tensorboard"}
    stray = [name for name in names if not re.search(r"\.(damaged|old|step)\d+", name)]
    assert not stray, f"left behind: {stray}"
    # A kill between the copy of a numbered one and the latest leaves it as a later one, which is renamed.
    numbered = [name for name in names if re.fullmatch(r"gpt_snapshot\.step\d+\.pt", name)]
    assert len(numbered) == 2, numbered


def settle(snapshot):
    """Without the name of its directory."""
    snapshot.config = {**snapshot.config, "run_dir": None}
    return snapshot


def chaos(folder: Path, kills: int, seed: int, processes: int, steps: int, say=print):
    """Does `kills` faults to runs of `steps` steps, started again whenever one finishes.

    Returns how often each fault was survived. Raises AssertionError if one was not.
    """
    chance = random.Random(seed)
    reference = Run(folder / "reference", steps, processes)
    began = time.monotonic()
    assert reference.wait() == 0, reference.text()
    longest = time.monotonic() - began
    survived: Counter[str] = Counter()
    faults = [fault for fault in FAULTS if processes or fault != "kill torchrun"]
    number = 0
    while sum(survived.values()) < kills:
        number += 1
        run_dir, done = folder / f"run{number}", []
        while True:
            fault = None
            if sum(survived.values()) + len(done) < kills:
                fault = chance.choice(faults)
            restarts = 1 if fault == "kill one rank under restarts" else 0
            expected = newest_good_step(run_dir)
            run = Run(run_dir, steps, processes, restarts)
            delay = chance.random() * longest
            if fault is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(timeout=delay)
            if fault is None or run.process.poll() is not None:
                assert run.wait() == 0, run.text()
                check_went_on(run, expected)
                break
            run.workers()  # to know them, and to wait for their end, also without torchrun
            FAULTS[fault](run, chance)
            status = run.wait()
            done.append(fault)
            say(f"{fault} after {delay:.1f} s of start {len(done)} of run {number}")
            assert (status == 0) <= (restarts == 1 or finished(run)), run.text()
            check_went_on(run, expected)
        check_same(run_dir, folder / "reference")
        survived.update(done)
        say(f"run {number}: equal after {len(done)} faults; {sum(survived.values())} of {kills}")
        shutil.rmtree(run_dir)
    return survived


def newest_good_step(run_dir: Path) -> int | None:
    """The step that the next start resumes from."""
    steps = []
    for path in (run_dir / "gpt_snapshot.pt", *run_dir.glob("gpt_snapshot.*.pt")):
        if ".tmp." in path.name:  # not a snapshot yet, even if it is whole already
            continue
        with contextlib.suppress(SnapshotError):
            steps.append(load(str(path)).step)
            if path.name == "gpt_snapshot.pt":
                break
    return max(steps, default=None)


def check_went_on(run: Run, expected: int | None) -> None:
    """Raises AssertionError if a start trained from another step than `expected`, or a stop did not save the step it
    logged.
    """
    text = run.text()
    first = "".join(text.partition("run         run in")[1:]).split("\nrun         run in")[0]
    if "device      " in first:  # torchrun may have started it again, later on
        found = re.search(r"^resuming from \S+, step (\d+)$", first, re.MULTILINE)
        assert (int(found[1]) if found else None) == expected, text
    stopped = re.search(r": stopped after step (\d+) of", text)
    if stopped:
        assert latest(run.run_dir).step == int(stopped[1]), text


def finished(run: Run) -> bool:
    """Whether the fault came too late to do anything."""
    return "sample      python sample.py" in run.text()


def main() -> None:
    given = {"kills": 200, "seed": random.SystemRandom().randrange(10**6), "processes": 2}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in given or not value.isdecimal():
            sys.exit(f"error: {argument}: must be one of {', '.join(given)}=NUMBER")
        given[key] = int(value)
    print(f"python tests/chaos.py {' '.join(f'{k}={v}' for k, v in given.items())}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        survived = chaos(Path(folder), **given, steps=1500, say=lambda text: print(text, flush=True))
    print("\n| fault | survived |\n|---|---|")
    for fault in filter(survived.get, FAULTS):
        print(f"| {fault} | {survived[fault]} |")
    print(f"| all | {survived.total()} |")


if __name__ == "__main__":
    main()
