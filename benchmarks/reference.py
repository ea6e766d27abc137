"""Makes the reference of a recipe from finished runs with at least five seeds.

    python benchmarks/reference.py run_dirs=[runs/a,runs/b,runs/c,runs/d,runs/e]

Adds it to docs/reference.json, which `python report.py check` compares runs with.
"""

import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the application

from engine.config.arguments import parse, run_program
from engine.config.overrides import without
from engine.errors import UserError
from engine.files import atomic_write
from engine.reports.history import Run
from engine.reports.reference import load_references, recipe_name
from report import REFERENCES, find_runs

MIN_SEEDS = 5
# Half-width of the band in standard deviations: 99 % of further runs fall within (Student's t prediction interval for 5
# seeds). Narrower for the training loss, whose deviation counts as no smaller than the median over the steps.
BAND = {"val": 5.04, "train": 3.56}
SMALLEST_DEVIATION = 0.005  # nats: what rounding on another processor alone amounts to


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    run_dirs: list[str] | None = None  # a list, a pattern, or the directory of a sweep over seeds
    reference: str = REFERENCES  # the file to update


def main(arguments: list[str]) -> None:
    config = parse(Arguments, arguments)
    runs = [Run(path) for path in find_runs(config.run_dirs or [])]
    name, reference = make_reference(runs)
    save_references(load_references(config.reference) | {name: reference}, config.reference)
    print(f"{name}: wrote its reference to {config.reference}")


def save_references(references: dict[str, dict[str, Any]], path: str) -> None:
    """Writes one line for each field of each recipe, so that a diff can be read."""
    recipes = []
    for name in sorted(references):
        fields = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in references[name].items()]
        recipes.append(f"{json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n}")
    with atomic_write(path) as file:
        file.write("{\n" + ",\n".join(recipes) + "\n}\n")


def make_reference(runs: list[Run]) -> tuple[str, dict[str, Any]]:
    """The recipe of `runs`, and its reference.

    Raises `UserError` unless they are finished runs of one unchanged recipe and one text, with at
    least `MIN_SEEDS` different seeds.
    """
    name, start = runs[0].recipe or "", runs[0].starts[-1]
    for run in runs:
        if run.recipe != name:
            raise UserError(f"run_dir={run.path}: is a run of {recipe_name(run)}, not of {name or 'a recipe'}")
        if run.step != run.total_steps:
            raise UserError(f"run_dir={run.path}: is at step {run.step} of {run.total_steps}")
        if run.changes:
            raise UserError(f"run_dir={run.path}: overrides its recipe: {', '.join(run.changes)}")
        if run.starts[-1]["text_sha256"] != start["text_sha256"]:
            raise UserError(f"run_dir={run.path}: has another text than {runs[0].path}")
    seeds = sorted({run.config["trainer"]["seed"] for run in runs})
    if len(seeds) < max(MIN_SEEDS, len(runs)):
        raise UserError(
            f"run_dirs: {len(runs)} runs with the seeds {seeds}; give at least {MIN_SEEDS} runs, "
            "each with another trainer.seed"
        )
    words = without(start["overrides"] or [], "trainer.seed=", "run_name=", "run_dir=")
    rates = [run.characters_per_s for run in runs if run.characters_per_s is not None]
    recorded = ("device", "cores", "processes", "threads", "torch", "precision", "text_sha256")
    return name, {
        "command": shlex.join(["python", "main.py", *words, "trainer.seed=SEED"]),
        "seeds": seeds,
        "date": start["started"][:10],
        **{key: start[key] for key in recorded},
        "characters_per_s": round(statistics.median(rates)) if rates else None,
        "seconds": round(statistics.median(run.seconds for run in runs), 1),
        "steps": runs[0].total_steps,
        "val": band([run.val for run in runs], BAND["val"]),
        "train": band([run.train for run in runs], BAND["train"]),
    }


def band(histories: list[list[dict[str, Any]]], deviations: float) -> list[list[float]]:
    """[step, mean, half-width] of the loss at each step that all `histories` have.

    A few seeds can agree by chance, so a deviation counts as no smaller than the median over the
    steps.
    """
    losses = [{line["step"]: line["loss"] for line in history} for history in histories]
    steps = sorted(set.intersection(*map(set, losses)))
    values = [[history[step] for history in losses] for step in steps]
    spread = [statistics.stdev(row) for row in values]
    smallest = max(statistics.median(spread), SMALLEST_DEVIATION) if spread else 0.0
    return [
        [step, round(statistics.mean(row), 4), round(deviations * max(deviation, smallest), 4)]
        for step, row, deviation in zip(steps, values, spread, strict=True)
    ]


if __name__ == "__main__":
    run_program(main, Arguments)
