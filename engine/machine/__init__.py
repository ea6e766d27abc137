"""The machine: device names, peak rates, memory, what its processors compute in.

Offers functions that describe the hardware, and `AdaptiveThreads`. Knows nothing of runs or settings.
"""
