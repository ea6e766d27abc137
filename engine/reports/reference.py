"""Comparison with the references: the recorded loss curves of the shipped recipes.

The file (`docs/reference.json`, made by `benchmarks/reference.py`) has, for each recipe, the command, the hardware and,
for either split, rows of [step, mean, half-width of the band], nats per character.
"""

import json
import math
import operator
import os
import statistics
from typing import Any

from engine.config.overrides import override_key
from engine.config.settings import INCOMPARABLE
from engine.reports.history import Run

ON_TRACK, OFF_TRACK, TOO_FEW = "on track", "NOT on track", "too few steps to tell"
FIRST_JUDGED = 50  # steps; earlier losses say little
BEST_IS_USED = "sample.py and export.py use the best snapshot; "
References = dict[str, dict[str, Any]]


def load_references(path: str) -> References:
    """The references by recipe; empty if there is no file."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return json.load(file)


def check(run: Run, references: References) -> tuple[str, list[str]]:
    """The verdict on a run, and the reasons, one sentence each.

    A run is off track if a loss is not finite, or its newest loss at a step of the reference is above the band; without
    a comparable reference, if its held-out loss has risen or is worse than a unigram model's.
    """
    reference, why_none = find_reference(run, references)
    problems, remarks = [], [why_none]
    if run.diverged:
        reason = run.diverged.get("diverged", "the loss is not finite")
        problems.append(f"The run diverges: step {run.diverged['step']}: {reason}.")
    is_compared = False
    if reference is not None:
        for split in ("val", "train"):
            is_above, sentence = compare(run, split, reference[split])
            (problems if is_above else remarks).append(sentence)
            is_compared = is_compared or bool(sentence)
    is_short = run.step < FIRST_JUDGED
    if reference is not None and not (is_compared or is_short):
        remarks.append("No step of the reference was logged: the run is judged on its own.")
    if not is_compared or any(problems):
        (remarks if is_short else problems).append(loss_warning(run))
    changed = f"The run overrides {recipe_name(run)}: {', '.join(run.changes)}." if run.changes else ""
    verdict = OFF_TRACK if any(problems) else TOO_FEW if is_short else ON_TRACK
    return verdict, [sentence for sentence in (changed, *problems, *remarks) if sentence]


def is_too_early(run: Run) -> bool:
    """Whether a run in progress has too few steps for a warning."""
    return run.step < min(FIRST_JUDGED, run.total_steps)


def recipe_name(run: Run) -> str:
    if run.starts[-1]["overrides"] is None:
        return "a run that another program started"
    return f"the recipe {run.recipe}" if run.recipe else "the defaults"


def find_reference(run: Run, references: References) -> tuple[dict[str, Any] | None, str]:
    """The reference that a run can be compared with; or None, and a sentence that says why."""
    reference = references.get(run.recipe or "")
    if reference is None:
        return None, f"There is no reference for {recipe_name(run)}: the run is judged on its own."
    keys = {change: override_key(change) for change in run.changes}
    unlike = [o for o, key in keys.items() if key in INCOMPARABLE or key.split(".")[0] == "model"]
    if run.starts[-1]["text_sha256"] != reference["text_sha256"]:
        unlike.append("another text")
    if unlike:
        why = f"The reference does not apply to {', '.join(unlike)}: the run is judged on its own."
        return None, why
    return reference, ""


def compare(run: Run, split: str, rows: list[list[float]]) -> tuple[bool, str]:
    """Whether the newest loss at a step of the reference is above the band, and a sentence on it;
    no sentence without such a step.
    """
    bands = {step: (mean, width) for step, mean, width in rows}
    common = [(line["step"], line["loss"]) for line in getattr(run, split) if line["step"] in bands]
    if not common:
        return False, ""
    step, loss = common[-1]
    mean, width = bands[step]
    where = "within" if abs(loss - mean) <= width else "above" if loss > mean else "below"
    name = "held-out" if split == "val" else "training"
    return where == "above", (
        f"The {name} loss at step {step} is {loss:.4f}, {where} the reference's 99 % interval, "
        f"{mean:.4f} ± {width:.4f}."
    )


def loss_warning(run: Run) -> str:
    """A sentence if the held-out loss has risen, or else if it is worse than guessing; empty if neither."""
    return overfitting_warning(run) or unigram_warning(run)


def overfitting_warning(run: Run) -> str:
    """A sentence if the held-out loss has risen by 0.02 nats, else "". The run overfits if its training loss fell
    meanwhile, and otherwise gets worse. A best step of 0 means the pretrained weights.
    """
    if run.best is None or (is_too_early(run) and run.best["step"] > 0):
        return ""
    step, lowest, last = run.best["step"], run.best["loss"], run.val[-1]["loss"]
    now = [line["loss"] for line in run.train if line["step"] > step][-3:]
    # A training loss above a unigram model's is no overfitting.
    unigram_loss = run.starts[-1].get("unigram_loss", math.inf)
    has_learned = step == 0 or not now or statistics.mean(now) < unigram_loss
    if last - lowest < 0.02 or not has_learned:
        return ""
    then = [line["loss"] for line in run.train if line["step"] <= step][-max(len(now), 1) :]
    has_fallen = not (now and then) or statistics.mean(now) <= statistics.mean(then)
    verdict, what_to_do = "gets worse", "train for fewer steps, or lower optimizer.learning_rate"
    if step == 0:
        verdict, what_to_do = "is worse than its pretrained weights", "lower optimizer.learning_rate"
    elif has_fallen:
        verdict = "overfits"
        what_to_do = "train for fewer steps, or raise optimizer.weight_decay or model.resid_pdrop"
    return (
        f"The run {verdict}: the held-out loss was lowest at step {step}, {lowest:.4f}, and is now {last:.4f}; "
        f"{BEST_IS_USED}{what_to_do}."
    )


def unigram_warning(run: Run) -> str:
    """A sentence if the newest held-out loss, or the newest training losses if nothing was evaluated, are above that
    of guessing by the characters' frequencies.
    """
    unigram_loss = run.starts[-1].get("unigram_loss")
    lines = run.val[-1:] or run.train[-5:]
    if is_too_early(run) or not unigram_loss or not lines:
        return ""
    lowest = min(reversed(lines), key=operator.itemgetter("loss"))
    step, loss = lowest["step"], lowest["loss"]
    if loss <= unigram_loss:
        return ""
    best = BEST_IS_USED if run.best and run.best["step"] != step else ""
    return (
        f"The {'held-out' if run.val else 'training'} loss at step {step}, {loss:.4f}, is worse than guessing by "
        f"frequency, {unigram_loss:.4f}; {best}train for more steps, or change optimizer.learning_rate."
    )
