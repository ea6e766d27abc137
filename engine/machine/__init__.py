"""The machine: device names, peak rates, memory, supported dtypes.

hardware.py describes the device and sets malloc. Knows nothing of runs or settings.
"""
