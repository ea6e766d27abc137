"""Adaptive thread count: fewer CPU threads while other processes need the cores."""

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine import portable

log = logging.getLogger("gpt")
PERIOD = 1.0  # seconds of steps between decisions
# Other processes are busy if both are exceeded:
MIN_LOST = 0.4  # cores that the threads do not get
MIN_PREEMPTIONS = 50  # a second: how often the system takes a core from a thread
RETRY = (2.0, 32.0)  # seconds before one more thread is tried: initial, maximum


class AdaptiveThreads:
    """Drops one of torch's threads while other processes are busy, and regularly tries one more, with exponential
    backoff. An operation ends with its slowest thread, so a thread that waits for a core delays all others.
    `may_have(threads)` is called once, before the first step with that number.
    """

    was_logged = False  # once in a process is enough

    def __init__(self, enabled: bool, may_have: Callable[[int], bool] = lambda threads: True):
        self.enabled, self.most = enabled, torch.get_num_threads()
        self.may_have = functools.cache(may_have)
        self.retry, self.next_try = RETRY[0], 0.0  # seconds; when one more is tried
        # Of the steps since the last decision.
        self.seconds = self.cpu_seconds = self.preemptions = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step. Excludes what runs between steps (evaluation, sampling with one thread)."""
        start, cpu, preemptions = time.perf_counter(), time.process_time(), portable.preemptions()
        yield
        now = time.perf_counter()
        self.seconds += now - start
        self.cpu_seconds += time.process_time() - cpu
        self.preemptions += portable.preemptions() - preemptions

    def adapt(self) -> None:
        """Changes the number of threads if it is time to; called before each step."""
        if self.enabled and self.seconds >= PERIOD:
            self._adapt(time.perf_counter())
            self.seconds = self.cpu_seconds = self.preemptions = 0.0

    def _adapt(self, now: float) -> None:
        threads = torch.get_num_threads()
        # Waiting threads spin, so an undisturbed process uses all of its cores.
        lost = threads - self.cpu_seconds / self.seconds
        if threads > 1 and lost > MIN_LOST and self.preemptions / self.seconds > MIN_PREEMPTIONS:
            if not self.may_have(threads - 1):
                return
            torch.set_num_threads(threads - 1)
            self.next_try, self.retry = now + self.retry, min(2 * self.retry, RETRY[1])
            if not AdaptiveThreads.was_logged:
                log.info("threads     using %d of %d: other processes are busy", threads - 1, self.most)
                AdaptiveThreads.was_logged = True
        elif threads == self.most:
            self.retry = RETRY[0]  # undisturbed
        elif now > self.next_try:
            torch.set_num_threads(threads + 1)

    def close(self) -> None:
        """Gives back all threads."""
        if self.enabled:
            torch.set_num_threads(self.most)


def ignores_threads(compute: Callable[[], list[torch.Tensor]], number: int, *parts: Any) -> bool:
    """Whether `compute()` gives the same tensors, bit for bit, with `number` threads as with the current number: a
    matrix product may sum in another order. Restores the `state_dict` of each of `parts`, which `compute` may change.
    """
    current, results = torch.get_num_threads(), []
    before = copy.deepcopy([part.state_dict() for part in parts])
    for threads in (current, number):
        torch.set_num_threads(threads)
        results.append(compute())
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(copy.deepcopy(state))  # an optimizer keeps references
    torch.set_num_threads(current)
    return all(map(torch.equal, *results))
