"""The machine: device names, peak rates, memory, supported dtypes."""
