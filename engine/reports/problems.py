"""Problems of a run: its loss is not finite, has risen, or is worse than guessing."""

import math
import operator

from engine.repeats import MOSTLY_REPEATED, REPEATED
from engine.reports.history import Run

ON_TRACK, OFF_TRACK, TOO_FEW = "on track", "NOT on track", "too few steps to tell"
FIRST_JUDGED = 50  # steps; earlier losses say little
BEST_IS_USED = "sample.py and export.py use the best snapshot; "


def check(run: Run) -> tuple[str, list[str]]:
    """The verdict on a run, and its problems, one sentence each."""
    problems = []
    if run.diverged:
        reason = run.diverged.get("diverged", "the loss is not finite")
        problems.append(f"The run diverges: step {run.diverged['step']}: {reason}.")
    if warning := loss_warning(run):
        problems.append(warning)
    verdict = OFF_TRACK if problems else ON_TRACK
    if run.step < FIRST_JUDGED and not run.diverged:
        verdict = TOO_FEW
    if (run.starts[-1].get("repeated_share") or 0) >= MOSTLY_REPEATED:
        problems.append(REPEATED)
    return verdict, problems


def loss_warning(run: Run) -> str:
    """A sentence if the held-out loss has risen by 0.02 nats since its best step, or else if it is above that of
    guessing by the characters' frequencies; without an evaluation, if the training loss is. Empty if neither, or if it
    is too early to tell.
    """
    guessing = run.starts[-1].get("unigram_loss") or math.inf
    is_early = run.step < min(FIRST_JUDGED, run.total_steps)
    lines = run.val[-1:] or run.train[-5:]
    if not lines:
        return ""
    lowest = min(reversed(lines), key=operator.itemgetter("loss"))
    step, loss, best = lowest["step"], lowest["loss"], run.best
    # A best step of 0 means the pretrained weights. What was never better than guessing has not risen.
    if best and loss - best["loss"] >= 0.02 and (best["step"] == 0 or (not is_early and best["loss"] < guessing)):
        return (
            f"The held-out loss has risen: it was lowest at step {best['step']}, {best['loss']:.4f}, and is now "
            f"{loss:.4f}; {BEST_IS_USED}train for fewer steps, lower optimizer.learning_rate, or raise "
            "optimizer.weight_decay or model.resid_pdrop."
        )
    if is_early or loss <= guessing:
        return ""
    hint = BEST_IS_USED if best and best["step"] != step else ""
    return (
        f"The {'held-out' if best else 'training'} loss at step {step}, {loss:.4f}, is worse than guessing by "
        f"frequency, {guessing:.4f}; {hint}train for more steps, or change optimizer.learning_rate."
    )
