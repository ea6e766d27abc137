"""Comparison with the references: the recorded loss curves of the shipped recipes.

The file (`docs/reference.json`, made by `benchmarks/reference.py`) has for each recipe what was run and
where, and for either split rows of [step, mean, half-width of the band], nats per character.
"""

import json
import math
import os
import statistics
from typing import Any

import numpy as np

from engine.config.settings import is_incomparable
from engine.errors import UserError, one_line
from engine.reports.history import Run

ON_TRACK, OFF_TRACK, TOO_EARLY = "on track", "NOT on track", "too early to tell"
FIRST_JUDGED = 50  # steps; losses before say little


def load_references(path: str) -> dict[str, dict[str, Any]]:
    """The references by recipe; empty if there is no file."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path) as file:
            return json.load(file)
    except ValueError as error:
        raise UserError(f"{path}: not a file of references: {one_line(error)}") from error


def check(run: Run, references: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """The verdict on a run, and the reasons, one sentence each: differences from its recipe, then
    problems, then remarks.

    It is off track if it learns nothing, diverges, or its newest loss at a step of the reference
    lies above the band. A run without a comparable reference must not overfit either.
    """
    changed = describe_changes(run)
    causes = [f"It differs from {recipe_name(run)}: {changed}."] if changed else []
    problems, remarks = [nothing_learned(run), diverging(run)], []
    reference, why = find_reference(run, references)
    if reference is None:
        problems.append(overfitting(run))
        remarks.append(f"{why}; the run is judged on its own.")
    else:
        compared = [compare(run, reference, split) for split in ("val", "train")]
        above = [sentence for is_above, sentence in compared if is_above]
        problems += [*above, overfitting(run) if above else ""]
        remarks += [sentence for is_above, sentence in compared if not is_above]
    problems = [sentence for sentence in problems if sentence]
    verdict = OFF_TRACK if problems else ON_TRACK if run.step >= FIRST_JUDGED else TOO_EARLY
    return verdict, [*causes, *problems, *filter(None, remarks)]


def recipe_name(run: Run) -> str:
    return f"the recipe {run.recipe}" if run.recipe else "the defaults"


def describe_changes(run: Run) -> str:
    """The settings that affect the loss and differ from the recipe's, with both values."""
    return ", ".join(f"{key}={now} (there {was})" for key, (was, now) in run.changes.items())


def find_reference(run: Run, references: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The reference that a run can be compared with; or None, and why there is none."""
    reference = references.get(run.recipe or "")
    if reference is None:
        return None, f"There is no reference for {recipe_name(run)}"
    unlike = [key for key in run.changes if is_incomparable(key)]
    if run.starts[-1]["text_sha256"] != reference["text_sha256"]:
        unlike.append("the text")
    if unlike:
        return None, f"The reference does not apply to another {', '.join(unlike)}"
    return reference, ""


def compare(run: Run, reference: dict[str, Any], split: str) -> tuple[bool, str]:
    """Whether the newest loss at a step of the reference is above the band, and a sentence on it;
    no sentence without such a step.
    """
    bands = {step: (mean, width) for step, mean, width in reference[split]}
    common = [(line["step"], line["loss"]) for line in getattr(run, split) if line["step"] in bands]
    if not common:
        return False, ""
    step, loss = common[-1]
    mean, width = bands[step]
    where = "within" if abs(loss - mean) <= width else "above" if loss > mean else "below"
    name = {"val": "held-out", "train": "training"}[split]
    return where == "above", (
        f"The {name} loss at step {step} is {loss:.4f}, {where} the reference, "
        f"{mean:.4f} ± {width:.4f}."
    )


def nothing_learned(run: Run) -> str:
    """A sentence if the training loss is still that of guessing."""
    vocabulary = run.config["model"]["vocab_size"]
    losses = [line["loss"] for line in run.train][-5:]
    if run.step < FIRST_JUDGED or not losses or min(losses) < 0.95 * math.log(vocabulary):
        return ""
    return (
        f"It has learned nothing: the training loss at step {run.step} is {losses[-1]:.4f}; "
        f"guessing among {vocabulary} characters gives {math.log(vocabulary):.4f}."
    )


def diverging(run: Run) -> str:
    """A sentence if a loss was not finite, or if the training loss, averaged over a tenth of its
    lines, has risen by a quarter of a nat: more than batches differ.
    """
    if run.diverged:
        return "It diverges: step {}: {}.".format(*run.diverged)
    width = max(3, len(run.train) // 10)
    if len(run.train) < width:
        return ""
    means = np.convolve([line["loss"] for line in run.train], np.ones(width) / width, "valid")
    lowest = int(means.argmin())
    if means[-1] - means[lowest] < 0.25:
        return ""
    return (
        f"It diverges: the training loss was {means[lowest]:.4f} at step "
        f"{run.train[lowest + width - 1]['step']} and has risen to {means[-1]:.4f}."
    )


def overfitting(run: Run) -> str:
    """A sentence if the held-out loss has risen while the training loss fell."""
    best = run.best
    if best is None or run.val[-1]["loss"] - best["loss"] < 0.02:
        return ""
    then = [line["loss"] for line in run.train if line["step"] <= best["step"]][-3:]
    now = [line["loss"] for line in run.train][-3:]
    if not then or statistics.mean(now) >= statistics.mean(then):
        return ""
    return (
        f"It overfits: the held-out loss was lowest at step {best['step']}, {best['loss']:.4f}, "
        f"and has risen to {run.val[-1]['loss']:.4f} while the training loss fell; "
        f"the snapshot of step {best['step']} is kept (.best)."
    )
