"""How the threads of a process wait for each other; to be imported before torch.

OpenMP's threads meet after every operation. Those that come first spin, by default for about a
millisecond. On a busy machine that takes the CPU from the very thread they wait for, and from the
other programs: a step on two cores, one of them in use, took five times as long. Here they spin for
some ten microseconds, then sleep (docs/experiments.md).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch loads it
