"""References: the loss curves of recipes, over finished runs with at least five seeds; and runs compared with them.

    python benchmarks/reference.py run_dirs=[runs/a,runs/b,runs/c,runs/d,runs/e]   adds that of their recipe
    python benchmarks/reference.py check run_dirs=runs/a                           exit status 1 if above it

`reference.json` has, for each recipe, the command, the hardware and, for either split, rows of [step, mean, half-width
of the band], nats per character.
"""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the application


from engine.config.arguments import parse, run_program
from engine.config.overrides import override_key
from engine.config.schema import IRRELEVANT, KEYS, is_fixed
from engine.errors import UserError
from engine.files import atomic_write
from engine.reports.history import Run
from report import find_runs

REFERENCES = str(Path(__file__).with_suffix(".json"))
References = dict[str, dict[str, Any]]
MIN_SEEDS = 5
# Half-width of the band in standard deviations: 99 % of further runs fall within (Student's t prediction interval for 5
# seeds). Narrower for the training loss, whose deviation counts as no smaller than the median over the steps.
BAND = {"val": 5.04, "train": 3.56}
SMALLEST_DEVIATION = 0.005  # nats: what rounding on another processor alone amounts to
# A run that overrides one of these, or its model, has no reference.
INCOMPARABLE = {
    *(key for key in KEYS if key.startswith("data.") and is_fixed(key)),
    "trainer.batch_size",
    "init_from",  # other initial weights
    "trainer.max_steps", "trainer.max_epochs", "trainer.max_minutes",  # stretch the schedule
}  # fmt: skip


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    run_dirs: list[str] | None = None  # a list, a pattern, or the directory of a sweep over seeds
    reference: str = REFERENCES  # the file to update, or to compare with


def without(overrides: Iterable[str], *prefixes: str) -> list[str]:
    """The overrides that do not start with one of `prefixes`, such as `run_dir=`."""
    return [o for o in overrides if not o.lstrip("+~").startswith(prefixes)]


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    is_check = arguments[:1] == ["check"]
    config = parse(Arguments, arguments[is_check:])
    runs = [Run(path) for path in find_runs(config.run_dirs or [])]
    references = load_references(config.reference)
    if is_check:
        found = [compare(run, references) for run in runs]
        for run, (_, sentences) in zip(runs, found, strict=True):
            print(f"{run.path}, step {run.step} of {run.total_steps}:", *sentences, sep="\n- ")
        return int(any(is_above for is_above, _ in found))
    name, reference = make_reference(runs)
    save_references(references | {name: reference}, config.reference)
    print(f"{name}: wrote its reference to {config.reference}")
    return 0


def load_references(path: str) -> References:
    """The references by recipe; empty if there is no file."""
    return json.loads(Path(path).read_text()) if os.path.exists(path) else {}


def save_references(references: References, path: str) -> None:
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
    start = runs[0].starts[-1]
    name = start["recipe"] or ""
    for run in runs:
        if (recipe := run.starts[-1]["recipe"]) != name:
            raise UserError(f"run_dir={run.path}: is a run of the recipe {recipe}, not of {name or 'a recipe'}")
        if run.step != run.total_steps:
            raise UserError(f"run_dir={run.path}: is at step {run.step} of {run.total_steps}")
        if changed := changes(run):
            raise UserError(f"run_dir={run.path}: overrides its recipe: {', '.join(changed)}")
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


def changes(run: Run) -> list[str]:
    """The overrides that affect the loss by more than another seed does; of each setting, the last."""
    given = {override_key(o): o for start in run.starts for o in start["overrides"] or ()}
    # main.py adds the nulls: see `add_default_recipe`.
    added = ("trainer.max_steps=null", "trainer.max_epochs=null", "trainer.max_minutes=null")
    return without((o for key, o in given.items() if key not in IRRELEVANT), "experiment=", *added)


def compare(run: Run, references: References) -> tuple[bool, list[str]]:
    """Whether the newest loss at a step of the reference is above the band, on either split; and a sentence on each, or
    on why there is no comparison.
    """
    recipe, changed = run.starts[-1]["recipe"], changes(run)
    reference = references.get(recipe or "")
    if reference is None:
        return False, [f"There is no reference for the recipe {recipe}."]
    unlike = [o for o in changed if override_key(o) in INCOMPARABLE or override_key(o).split(".")[0] == "model"]
    if run.starts[-1]["text_sha256"] != reference["text_sha256"]:
        unlike.append("another text")
    if unlike:
        return False, [f"The reference does not apply to {', '.join(unlike)}."]
    sentences = [f"The run overrides the recipe {recipe}: {', '.join(changed)}."] if changed else []
    is_above = False
    for split, lines in (("val", run.val), ("train", run.train)):
        bands = {step: (mean, width) for step, mean, width in reference[split]}
        common = [(line["step"], line["loss"]) for line in lines if line["step"] in bands]
        if not common:
            sentences.append(f"No step of the reference has a {split} loss.")
            continue
        step, loss = common[-1]
        mean, width = bands[step]
        where = "within" if abs(loss - mean) <= width else "above" if loss > mean else "below"
        is_above = is_above or where == "above"
        interval = f"99 % interval, {mean:.4f} ± {width:.4f}"
        sentences.append(f"The {split} loss at step {step} is {loss:.4f}, {where} the reference's {interval}.")
    return is_above, sentences


if __name__ == "__main__":
    run_program(main, Arguments)
