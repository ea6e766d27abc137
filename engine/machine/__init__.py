"""The machine: device names, peak rates, memory, the types that it computes in.

Offers functions that describe the hardware, and `AdaptiveThreads`. Knows nothing of runs or settings.
"""
