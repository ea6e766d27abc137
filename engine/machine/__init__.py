"""The machine: device names, peak rates, memory, what its processors compute in.

Offers plain functions of a `torch.device`, and `AdaptiveThreads`. Knows nothing of runs or settings.
"""
