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


def is_too_early(run: Run) -> bool:
    """Whether a run in progress has too few steps for a warning."""
    return run.step < min(FIRST_JUDGED, run.total_steps)


def loss_warning(run: Run) -> str:
    """A sentence if the held-out loss has risen, or else if it is worse than guessing; empty if neither."""
    return rise_warning(run) or unigram_warning(run)


def rise_warning(run: Run) -> str:
    """A sentence if the held-out loss has risen by 0.02 nats since its best step, else "". A best step of 0 means the
    pretrained weights; a run that was never better than guessing is left to `unigram_warning`.
    """
    if run.best is None:
        return ""
    step, lowest, last = run.best["step"], run.best["loss"], run.val[-1]["loss"]
    has_learned = not is_too_early(run) and lowest < (run.starts[-1].get("unigram_loss") or math.inf)
    if last - lowest < 0.02 or not (step == 0 or has_learned):
        return ""
    return (
        f"The held-out loss has risen: it was lowest at step {step}, {lowest:.4f}, and is now {last:.4f}; "
        f"{BEST_IS_USED}train for fewer steps, lower optimizer.learning_rate, or raise optimizer.weight_decay or "
        "model.resid_pdrop."
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
