"""The default recipe on texts that it was not tuned on, compared with AdamW and nanoGPT's settings.

    python benchmarks/elsewhere.py texts=DIRECTORY               trains what elsewhere.jsonl does not have yet
    python benchmarks/elsewhere.py report=true                   prints the table of docs/benchmarks.md

Each text, DIRECTORY/NAME.txt, is truncated to the length of tiny Shakespeare. Baselines are the same model with AdamW
and nanoGPT's schedule, and nanoGPT's CPU recipe, each for the same characters and for the same time. Step times are
measured first, in turn; the losses do not depend on them, so that two runs train at a time, with one thread each.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.config.arguments import parse, run_program
from engine.errors import UserError

RESULTS = Path(__file__).resolve().parent / "elsewhere.jsonl"
CHARACTERS = 1_115_394  # of tiny Shakespeare
STEPS = 1260  # of the default recipe
# Characters of a step, and what differs from the default.
SETTINGS = {
    "default": (3072, ["experiment=shakespeare_cpu"]),
    "AdamW": (3072, ["experiment=shakespeare_cpu", "optimizer=nanogpt"]),
    "nanoGPT": (768, ["experiment=nanogpt_cpu"]),
}


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    texts: str | None = None  # a directory of .txt files
    seeds: int = 1  # trainings of each, from seed 1 on
    report: bool = False  # print the table instead


def train(text: Path, name: str, *settings: str) -> list[dict]:
    """The lines of metrics.jsonl of a training on `text`."""
    with tempfile.TemporaryDirectory() as folder:
        used = Path(folder, "text.txt")
        used.write_text(text.read_text("utf-8")[:CHARACTERS], "utf-8")
        command = [sys.executable, "main.py", *SETTINGS[name][1], "data=text", f"data.path={used}"]
        command += [f"run_dir={folder}/run", "trainer.device=cpu", "trainer.save_every_steps=null"]
        command += ["samples=false", "report=false", "trainer.trackers=[]", *settings]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
        if run.returncode:
            raise RuntimeError(f"{text.name}, {name}: {run.stdout[-300:]}{run.stderr[-300:]}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").open()]


def step_seconds(text: Path) -> dict[str, float]:
    """Seconds of a step of each of SETTINGS, medians of three rounds in turn."""
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(3):
        for name, (characters, _) in SETTINGS.items():
            steps = 300 * 768 // characters
            lines = train(text, name, f"trainer.max_steps={steps}", "trainer.log_every_steps=25")
            rates = [line["tokens_per_s"] for line in lines if line["split"] == "train"]
            found[name].append(characters / statistics.median(rates))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure(text: Path, seeds: int, done: list[dict]) -> None:
    """Trains on `text` what is not `done` yet, and appends it to RESULTS."""
    known = [line for line in done if line["text"] == text.stem]
    seconds = known[0]["step_seconds"] if known else step_seconds(text)
    jobs = []
    for seed in range(1, seeds + 1):
        for name, (characters, _) in SETTINGS.items():
            same = {"characters": STEPS * 3072 // characters}
            same["time"] = round(STEPS * seconds["default"] / seconds[name])
            for kind, steps in same.items() if name != "default" else [("characters", STEPS)]:
                job = {"text": text.stem, "settings": name, "same": kind, "seed": seed, "default_steps": STEPS}
                if not any(job.items() <= line.items() for line in known):
                    jobs.append(job | {"steps": steps, "step_seconds": seconds})

    def run(job: dict) -> dict:
        lines = train(
            text, job["settings"], "trainer.threads=1", f"trainer.seed={job['seed']}",
            f"trainer.max_steps={job['steps']}", f"trainer.eval_every_steps={job['steps'] // 4}",
        )  # fmt: skip
        losses = [line["loss"] for line in lines if line["split"] == "val"]
        return job | {"loss": round(losses[-1], 4), "lowest": round(min(losses), 4)}

    with ThreadPoolExecutor(2) as pool, RESULTS.open("a") as file:
        for line in pool.map(run, jobs):
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()


def report(done: list[dict]) -> None:
    columns = [("default", "characters"), ("AdamW", "characters"), ("AdamW", "time")]
    columns += [("nanoGPT", "characters"), ("nanoGPT", "time")]
    names = {"nanoGPT": "`nanogpt_cpu`", "AdamW": "AdamW"}
    heads = ["`shakespeare_cpu`", *(f"{names[name]}, same {kind}" for name, kind in columns[1:])]
    print(f"| text | {' | '.join(heads)} |")
    print("|" + "---|" * (len(columns) + 1))
    for text in dict.fromkeys(line["text"] for line in done):
        cells = []
        for name, kind in columns:
            found = [
                line["lowest"] for line in done if (line["text"], line["settings"], line["same"]) == (text, name, kind)
            ]
            cells.append(f"{statistics.mean(found):.3f}" if found else "-")
        print(f"| {text} | {' | '.join(cells)} |")


def program(arguments: list[str]) -> None:
    config = parse(Arguments, arguments)
    done = [json.loads(line) for line in RESULTS.open()] if RESULTS.exists() else []
    done = [line for line in done if line["default_steps"] == STEPS]  # of today's recipe
    if config.report:
        return report(done)
    if config.texts is None:
        raise UserError("texts: missing; give texts=DIRECTORY")
    for text in sorted(Path(config.texts).glob("*.txt")):
        measure(text, config.seeds, done)


if __name__ == "__main__":
    run_program(program, Arguments)
