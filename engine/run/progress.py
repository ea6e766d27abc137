"""Progress of a run from 0 to 1: of its steps or, if there is a time limit, of the time, whichever is further."""

import collections
import time

import torch

from engine.parallel import distributed
from engine.run.plan import Plan
from engine.snapshots.state import State

MANY_STEPS = 100  # in runs of so many, the clock moves progress by at most MOST a step: a laptop may have slept
MOST = 0.05
MIN_STEPS_FOR_HALFWAY = 20  # the fewest steps of a run that is also evaluated halfway


class Clock:
    """Counts the seconds of training into `state`: wall time from the end of each start's first step, with evaluations
    and saves. If the state has no `limit_s` yet, it is what is left until `deadline`, as `time.monotonic()` gives it,
    when the clock first starts.
    """

    deadline: float | None = None

    def __init__(self, state: State):
        self.state = state
        self.started: float | None = None
        self.queued: collections.deque[torch.cuda.Event] = collections.deque()  # steps that a GPU may not have done

    def count_step(self) -> None:
        """Called after each step: the first starts the clock. With a time limit on a GPU, waits until all steps but two
        are done, as the host runs ahead of the GPU.
        """
        if distributed.device().type == "cuda" and (self.state.limit_s, self.deadline) != (None, None):
            event = torch.cuda.Event()
            event.record()
            self.queued.append(event)
            if len(self.queued) > 2:
                self.queued.popleft().synchronize()
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


def evaluation_is_due(state: State, plan: Plan, every_steps: int | None) -> bool:
    """Whether to evaluate at this step: every `every_steps` steps (None: every epoch), and halfway if the end would be
    the only time, as one point does not show whether a run learns.
    """
    total = expected_steps(state, plan.total_steps)
    interval = every_steps or -(-plan.windows // plan.batch_size)
    is_halfway = interval >= total >= MIN_STEPS_FOR_HALFWAY and (state.loss_step or 0) < total // 2 <= state.step
    return is_halfway or plan.is_due(state.step, every_steps, None if every_steps else 1)


def change_time_limit(state: State, minutes: float | None) -> None:
    """Sets the time limit of a run. If it resumes, another one than before scales the seconds in proportion, as sizing
    does the steps.
    """
    if state.limit_s is not None and minutes != state.minutes:
        state.limit_s = state.limit_s * minutes / state.minutes if minutes and state.minutes else None
    state.minutes = minutes
