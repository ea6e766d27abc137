"""The grid of runs that the rule of engine/sizing.py is fitted to.

    python benchmarks/sizing.py texts=DIRECTORY               trains what sizing.jsonl does not have yet
    python benchmarks/sizing.py texts=DIRECTORY workers=2     in two processes of one thread each
    python benchmarks/sizing.py report                        prints the table of sizing.md

Each text, DIRECTORY/NAME.txt, is cut off after so many characters, trained on with each of `GRID`'s settings, and
the best snapshot scored on up to 100,000 characters that follow, of which nothing was chosen. Losses depend on
characters and settings, not on time, so that the machine may be busy.
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
import sample
from engine.config.arguments import parse, run_program
from engine.snapshots.sharded import load_full

RESULTS = Path(__file__).resolve().parent / "sizing.jsonl"
SCORED = 100_000  # characters

# By characters of the text: a middle, and for each setting the values that are tried beside the middle's.
Settings = dict[str, float]
GRID: dict[int, tuple[Settings, dict[str, list[float]]]] = {
    30_000: (
        {"width": 96, "layers": 3, "context": 64, "dropout": 0.1, "decay": 1, "rate": 0.03,
         "batch": 2048, "trained": 0.6e6},
        {"rate": [0.016, 0.055], "decay": [0.5, 2], "dropout": [0, 0.2], "width": [64, 128],
         "trained": [0.3e6, 1.2e6], "batch": [1024]},
    ),
    100_000: (
        {"width": 128, "layers": 4, "context": 64, "dropout": 0.1, "decay": 1, "rate": 0.03,
         "batch": 2048, "trained": 1.2e6},
        {"rate": [0.016, 0.055], "decay": [0.4, 2], "dropout": [0, 0.2], "width": [96],
         "trained": [0.6e6, 2.4e6], "context": [128], "batch": [1024]},
    ),
    1_000_000: (
        {"width": 128, "layers": 4, "context": 128, "dropout": 0, "decay": 0.3, "rate": 0.022,
         "batch": 2048, "trained": 1.2e6},
        {"rate": [0.011, 0.04], "decay": [0.1, 1], "width": [96, 160], "batch": [1024, 3072],
         "context": [64, 256]},
    ),
}  # fmt: skip


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    texts: str  # a directory of .txt files
    workers: int = 1  # processes


def settings_of(characters: int) -> list[Settings]:
    """The middle, and what differs from it in one value."""
    middle, others = GRID[characters]
    changes = [{name: value} for name, values in others.items() for value in values]
    return [middle, *(middle | change for change in changes)]


def train(text: str, characters: int, settings: Settings) -> dict[str, Any]:
    """Trains on the first `characters` of the file `text`; returns the held-out losses by step, and the loss
    of the best snapshot on what follows, in nats per character.
    """
    width, context = int(settings["width"]), int(settings["context"])
    windows = round(settings["batch"] / context)
    steps = round(settings["trained"] / (windows * context))
    content = Path(text).read_text("utf-8")
    used = content[:characters]
    rest = "".join(c for c in content[characters:][: 2 * SCORED] if c in set(used))[:SCORED]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(used, "utf-8")
        Path(folder, "rest.txt").write_text(rest, "utf-8")
        main.train(
            main.configure(
                *("experiment=shakespeare_shift", "data=text", f"data.path={folder}/text.txt"),
                *(f"data.block_size={context}", f"model.n_layer={int(settings['layers'])}"),
                *(f"model.n_embd={width}", f"model.n_head={width // (64 if width >= 128 else 32)}"),
                *(
                    f"model.{name}_pdrop={settings['dropout']}"
                    for name in ("embd", "resid", "attn")
                ),
                f"optimizer.learning_rate={settings['rate']}",
                f"optimizer.weight_decay={settings['decay']}",
                *(f"trainer.batch_size={windows}", f"trainer.max_steps={steps}"),
                *(
                    f"trainer.eval_every_steps={max(1, steps // 8)}",
                    "trainer.save_every_steps=null",
                ),
                *("samples=false", "report=false", "trainer.trackers=[]", "trainer.threads=1"),
                *(f"run_dir={folder}/run", "trainer.log_every_steps=1000000", "trainer.device=cpu"),
                "trainer.seed=1",
            )
        )
        lines = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        scored = sample.SampleConfig(score=f"{folder}/rest.txt", device="cpu")
        loss, _ = sample.score(scored, load_full(f"{folder}/run/gpt_snapshot.best.pt"))
    held_out = [(line["step"], round(line["loss"], 4)) for line in lines if line["split"] == "val"]
    return {"held_out": held_out, "score": round(loss, 4)}


def run(job: tuple[str, int, Settings]) -> dict[str, Any]:
    text, characters, settings = job
    return {"text": Path(text).stem, "characters": characters, **settings, **train(*job)}


def program(arguments: list[str]) -> None:
    if arguments == ["report"]:
        report()
        return
    config = parse(Arguments, arguments)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = [json.loads(line) for line in lines]
    jobs = [
        (str(text), characters, settings)
        for characters, text in itertools.product(GRID, sorted(Path(config.texts).glob("*.txt")))
        for settings in settings_of(characters)
        if not any(
            line.items() >= {"text": text.stem, "characters": characters, **settings}.items()
            for line in done
        )
        and os.path.getsize(text) > characters + SCORED
    ]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(config.workers, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run, jobs):
            with open(RESULTS, "a") as file:
                file.write(json.dumps(result) + "\n")


def report() -> None:
    """Prints, for each length of text, the mean score over texts of each setting beside the middle."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for characters in GRID:
        middle = GRID[characters][0]
        print(
            f"\n{characters:,} characters; middle: "
            + ", ".join(f"{k} {v:g}" for k, v in middle.items())
        )
        print("\n| | score | mean |\n|---|---|---|")
        for settings in settings_of(characters):
            key = {"characters": characters, **settings}
            scores = {line["text"]: line["score"] for line in lines if line.items() >= key.items()}
            changed = [f"{k} {v:g}" for k, v in settings.items() if v != middle[k]] or ["middle"]
            shown = ", ".join(f"{text} {score:.3f}" for text, score in sorted(scores.items()))
            mean = sum(scores.values()) / len(scores) if scores else float("nan")
            print(f"| {changed[0]} | {shown} | {mean:.4f} |")


if __name__ == "__main__":
    run_program(program, Arguments)
