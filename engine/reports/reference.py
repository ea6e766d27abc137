"""The reference card: how the losses of the shipped recipes go, and whether a run goes that way.

`docs/reference.json` has the curves, made by `python report.py reference`.
"""

import json
import math
import os
import shlex
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from engine.config.settings import HARMLESS, NOT_COMPARABLE
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.parallel.launch import without
from engine.reports.history import Run, median_rate

CARD = str(Path(__file__).resolve().parents[2] / "docs" / "reference.json")
FIRST_JUDGED = 50  # steps; before, little can be told
MIN_SEEDS = 3  # seeds that a spread can be told from
# Student's t: of 1, 2, ... degrees of freedom, what 99 % of all draws lie within. The last stands
# for more of them, too, for which it is a little too large.
T99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)
SMALLEST = 0.005  # nats: between equal runs, rounding on other processors alone makes as much


# --------------------------------------------------------------------------------------------------
# Curves


def load_card(path: str = CARD) -> dict[str, dict[str, Any]]:
    """Every recipe's reference: see `curve`. Empty if there is no file."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path) as file:
            return json.load(file)
    except ValueError as error:
        raise UserError(f"{path}: not a reference card: {one_line(error)}") from error


def save_card(card: dict[str, dict[str, Any]], path: str = CARD) -> None:
    """Writes a line for each field of each recipe, so that a difference can be read."""
    recipes = []
    for name in sorted(card):
        fields = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in card[name].items()]
        recipes.append(f"{json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n}")
    with atomic_write(path) as file:
        file.write("{\n" + ",\n".join(recipes) + "\n}\n")


def curve(runs: list[Run]) -> tuple[str, dict[str, Any]]:
    """The recipe of `runs` and its reference: what made it, and for either split a list of
    [step, mean, standard deviation] of the loss over the runs, nats per character.

    Raises `UserError` unless they are finished runs of one unchanged recipe with at least `MIN_SEEDS`
    seeds, all different.
    """
    name, names = runs[0].recipe, sorted({run.recipe or "none" for run in runs})
    if name is None or len(names) > 1:
        raise UserError(
            f"run_dirs: runs of one recipe make a reference; these are of {', '.join(names)}"
        )
    for run in runs:
        if run.step != run.total_steps:
            raise UserError(f"run_dir={run.path}: is at step {run.step} of {run.total_steps}")
        if changed := say_changes(run, "; "):
            raise UserError(f"run_dir={run.path}: is not the recipe as it is: {changed}")
    seeds = sorted({run.config["trainer"]["seed"] for run in runs})
    if len(seeds) < max(MIN_SEEDS, len(runs)):
        raise UserError(
            f"run_dirs: {len(runs)} runs with the seeds {seeds}; give at least {MIN_SEEDS} runs, each "
            "with another trainer.seed"
        )
    texts = {run.starts[-1]["text_sha256"] for run in runs}
    if len(texts) > 1:
        raise UserError("run_dirs: the runs have learned different texts")
    start = runs[0].starts[-1]
    own = ("trainer.seed=", "run_name=", "run_dir=", "launch.")
    words = without(start["overrides"] or [], *own)
    rates = [rate for run in runs if (rate := median_rate(run.train))]
    if not rates:
        raise UserError("run_dirs: no line of their metrics has tokens_per_s")
    return name, {
        "command": shlex.join(["python", "main.py", *words, "trainer.seed=SEED"]),
        "seeds": seeds,
        "date": start["started"][:10],
        "device": start["device"],
        "cores": start["cores"],
        "processes": start["processes"],
        "threads": start["threads"],
        "torch": start["torch"],
        "precision": start["precision"],
        "text_sha256": start["text_sha256"],
        "characters_per_s": round(statistics.median(rates)),
        "seconds": round(statistics.median(run.seconds for run in runs), 1),
        "steps": runs[0].total_steps,
        "val": spread([run.val for run in runs]),
        "train": spread([run.train for run in runs]),
    }


def spread(histories: list[list[dict[str, Any]]]) -> list[list[float]]:
    """[step, mean, standard deviation] of the loss at each step that all `histories` have."""
    losses = [{line["step"]: line["loss"] for line in history} for history in histories]
    rows = []
    for step in sorted(set.intersection(*map(set, losses))):
        values = [history[step] for history in losses]
        rows.append([step, round(statistics.mean(values), 4), round(statistics.stdev(values), 4)])
    return rows


def tolerance(reference: dict[str, Any], split: str) -> dict[int, float]:
    """How far from the reference's mean a run of the recipe may lie at each step, in nats.

    The interval in which 99 % of further runs fall (Student's t prediction interval, for n seeds
    t * sqrt(1 + 1/n) deviations: of held-out losses 11.5 for three, 5.0 for five). Few seeds tell a
    deviation badly, and can agree by chance: it is taken to be no smaller than the median over all
    steps. That of the training loss is the noise of batches, other ones at each step, so all steps
    together tell it.
    """
    n, rows = len(reference["seeds"]), reference[split]
    freedom = (n - 1) * (len(rows) if split == "train" else 1)
    t = T99[min(freedom, len(T99)) - 1] * math.sqrt(1 + 1 / n)
    usual = max(statistics.median(sd for _, _, sd in rows), SMALLEST) if rows else 0.0
    return {step: t * max(sd, usual) for step, _, sd in rows}


# --------------------------------------------------------------------------------------------------
# Is a run on track?


def say_changes(run: Run, separator: str = ", ") -> str:
    """What of a run's configuration is not its recipe's and can move the loss, in words."""
    there = "the recipe has" if run.recipe else "the default is"
    return separator.join(
        f"{key}={now} ({there} {was})"
        for key, (was, now) in run.changes.items()
        if key not in HARMLESS
    )


def check(run: Run, card: dict[str, dict[str, Any]]) -> tuple[bool, list[str]]:
    """Whether a run is on track, and what there is to say of it, a sentence each: first what in its
    configuration may be the cause, then what is wrong.

    It is not on track if it learns nothing, diverges, or if its newest loss at a step of the
    reference is above it by more than `tolerance`; where there is no reference to say what is meant
    to be, or the run has another text, model, batch or plan, neither if it overfits.
    """
    name = f"the recipe {run.recipe}" if run.recipe else "the defaults"
    reference = card.get(run.recipe or "")
    changed = say_changes(run)
    apart = not_comparable(run, reference) if reference else []
    if "the text" in apart:
        changed = ", ".join(filter(None, (changed, "the text, by its SHA-256")))
    problems = [nothing_learned(run), diverging(run)]
    remarks = []
    if reference is None or apart:
        problems.append(overfitting(run))
        why = f"There is no reference for {name}"
        if reference is not None:
            why = f"Not compared with the reference for {name}, because of {', '.join(apart)}"
        remarks = [f"{why}: only what a run shows by itself is judged."]
        reference = None
    else:
        compared = [compare(run, reference, split) for split in ("val", "train")]
        above = [words for is_above, words in compared if is_above]
        problems += [*above, overfitting(run) if above else ""]
        remarks += [words for is_above, words in compared if not is_above]
        if not any(words for _, words in compared):
            first = min(step for split in ("val", "train") for step, _, _ in reference[split])
            remarks.append(
                f"No step of it can be compared yet: the reference begins at step {first}."
            )
        rate = median_rate(run.train)
        if rate and rate < 0.7 * reference["characters_per_s"]:
            remarks.append(
                f"It is slower than the reference: {rate:,.0f} characters a second against "
                f"{reference['characters_per_s']:,} ({reference['device']}, threads: "
                f"{reference['processes'] * reference['threads']}); that says nothing of what it "
                "learns."
            )
    causes = [f"It differs from {name}: {changed}."] if changed else []
    problems = list(filter(None, problems))
    if problems and not changed:
        where = "the text and the versions" if reference else "optimizer.learning_rate"
        remarks.append(f"Look first at {where}.")
    elif problems:
        remarks.append("Look first at what differs.")
    return not problems, [*causes, *problems, *filter(None, remarks)]


def verdict(run: Run, on_track: bool | None) -> str:
    """What `check` has found, in a word or two; None is for a run that it cannot judge."""
    if on_track and run.step < FIRST_JUDGED:
        return "too early to tell"
    return {True: "on track", False: "NOT on track", None: "not judged"}[on_track]


def not_comparable(run: Run, reference: dict[str, Any]) -> list[str]:
    """The settings, or the text, with which a run's losses cannot be compared with `reference`."""
    keys = [k for k in run.changes if k in NOT_COMPARABLE or k.startswith("model.")]
    other_text = run.starts[-1]["text_sha256"] != reference["text_sha256"]
    return [key for key in keys if key not in HARMLESS] + ["the text"] * other_text


def compare(run: Run, reference: dict[str, Any], split: str) -> tuple[bool, str]:
    """Whether the newest loss at a step of the reference is too high, and a sentence on it; none
    where no step is in both.
    """
    allowed = tolerance(reference, split)
    expected = {step: mean for step, mean, _ in reference[split]}
    common = [line for line in getattr(run, split) if line["step"] in expected]
    if not common:
        return False, ""
    step, loss = common[-1]["step"], common[-1]["loss"]
    away = loss - expected[step]
    what = "held-out" if split == "val" else "training"
    where = "within" if abs(away) <= allowed[step] else "above" if away > 0 else "below"
    return where == "above", (
        f"The {what} loss at step {step} is {loss:.4f}, {where} the reference, "
        f"{expected[step]:.4f} ± {allowed[step]:.4f} (99 % of runs, from "
        f"{len(reference['seeds'])} seeds)."
    )


def nothing_learned(run: Run) -> str:
    """Says so where the loss is still that of guessing."""
    vocabulary = run.config["model"]["vocab_size"]
    losses = [line["loss"] for line in run.train][-5:]
    if run.step < FIRST_JUDGED or not losses or min(losses) < 0.95 * math.log(vocabulary):
        return ""
    return (
        f"It has learned nothing: after {run.step} steps the training loss is {losses[-1]:.4f}, "
        f"that of guessing among {vocabulary} characters is {math.log(vocabulary):.4f}."
    )


def diverging(run: Run) -> str:
    """Says so where losses are not finite, or the training loss has come up again by more than
    batches differ: a quarter of a nat, both ends averaged over some lines.
    """
    if run.diverged:
        step, words = run.diverged
        return f"It diverges: step {step}: {words}."
    width = max(3, len(run.train) // 10)
    if len(run.train) < width:
        return ""
    sums = np.cumsum([0.0, *(line["loss"] for line in run.train)])
    means = (sums[width:] - sums[:-width]) / width  # of the lines from the i-th on
    lowest = int(means.argmin())
    if means[-1] - means[lowest] < 0.25:
        return ""
    return (
        f"It diverges: the training loss was {means[lowest]:.4f} at step "
        f"{run.train[lowest + width - 1]['step']} and has come up to {means[-1]:.4f}."
    )


def overfitting(run: Run) -> str:
    """Says so where the held-out loss has come up while the training loss went on falling."""
    best = run.best
    if best is None or run.val[-1]["loss"] - best["loss"] < 0.02:
        return ""
    then = [line["loss"] for line in run.train if line["step"] <= best["step"]][-3:]
    now = [line["loss"] for line in run.train][-3:]
    if not then or statistics.mean(now) >= statistics.mean(then):
        return ""
    return (
        f"It overfits: the held-out loss was lowest at step {best['step']}, {best['loss']:.4f}, "
        f"and has come up to {run.val[-1]['loss']:.4f} while the training loss went on falling; "
        f"the snapshot of step {best['step']} is kept beside the latest (.best)."
    )
