"""Progress of a run from 0 to 1: of its steps or, if there is a time limit, of the time, whichever is further."""

import time

from engine.snapshots.state import State

MANY_STEPS = 100  # in runs of so many, the clock moves progress by at most MOST a step: a laptop may have slept
MOST = 0.05


class Clock:
    """Counts the seconds of training into `state`: wall time from the end of each start's first step, with evaluations
    and saves. If the state has no `limit_s` yet, it is what is left until `deadline`, as `time.monotonic()` gives it,
    when the clock first starts.
    """

    def __init__(self, state: State, deadline: float | None = None):
        self.state, self.deadline = state, deadline
        self.started: float | None = None

    def start(self) -> None:
        """Starts the clock, once."""
        if self.started is None:
            now = time.monotonic()
            self.started = now - self.state.seconds
            if self.deadline is not None and self.state.limit_s is None:
                self.state.limit_s = self.state.seconds + max(self.deadline - now, 1.0)

    def read(self) -> float:
        """Updates the seconds; returns their share of the limit, 0 without one."""
        if self.started is not None:
            self.state.seconds = time.monotonic() - self.started
        return self.state.seconds / self.state.limit_s if self.state.limit_s else 0.0


def advance(state: State, steps: int, share: float) -> None:
    """Sets the progress of `state`, in a run of `steps` steps, with that `share` of its time limit used."""
    if steps >= MANY_STEPS:
        share = min(share, state.progress + MOST)
    state.progress = max(state.step / steps, share)


def expected_steps(state: State, steps: int) -> int:
    """The steps for which the learning rate is scheduled: `steps`, or fewer if the clock is ahead of them."""
    if state.progress <= state.step / steps:
        return steps
    return max(state.step + 1, round(state.step / state.progress))
