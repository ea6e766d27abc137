"""The machine: device names, peak rates, memory, supported dtypes.

Offers functions that describe the hardware, and `AdaptiveThreads`. Knows nothing of runs or settings.
"""
