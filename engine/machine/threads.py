"""Adaptive thread count: fewer threads of a CPU while other processes need its cores."""

import logging
import time

import torch

from engine import portable

log = logging.getLogger("gpt")
PERIOD = 1.0  # seconds between decisions
LOST = 0.4  # cores that the threads could not use, and
PREEMPTIONS = 50  # a second, from which on other processes are busy
RETRY = 20.0  # seconds


class AdaptiveThreads:
    """Takes away one of torch's threads while other processes are busy, and tries one more every 20 s. An
    operation ends when its slowest thread does, so a thread that waits for a core holds up all others.
    """

    def __init__(self, is_fixed: bool):
        self.is_fixed, self.most = is_fixed, torch.get_num_threads()
        self.was_logged = False
        self.changed = time.perf_counter()
        self._start()

    def _start(self) -> None:
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        self.preemptions = portable.preemptions()

    def adapt(self) -> None:
        """Changes the number of threads if it is time to. Called once a step."""
        now = time.perf_counter()
        seconds = now - self.start
        if self.is_fixed or seconds < PERIOD:
            return
        threads = torch.get_num_threads()
        # Threads that wait for others spin, so that alone they use all of their cores.
        lost = threads - (time.process_time() - self.cpu_start) / seconds
        preemptions = (portable.preemptions() - self.preemptions) / seconds
        if threads > 1 and lost > LOST and preemptions > PREEMPTIONS:
            torch.set_num_threads(threads - 1)
            self.changed = now
            if not self.was_logged:
                log.info("threads     %d of %d: other processes are busy", threads - 1, self.most)
                self.was_logged = True
        elif threads < self.most and now - self.changed > RETRY:
            torch.set_num_threads(threads + 1)
            self.changed = now
        self._start()

    def close(self) -> None:
        """Gives back all threads."""
        if not self.is_fixed:
            torch.set_num_threads(self.most)
