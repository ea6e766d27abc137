"""The machine: device names, peak rates, memory, supported dtypes.

Offers functions that describe the hardware, `AdaptiveThreads` and `ignores_threads`. Knows nothing of runs or settings.
"""
