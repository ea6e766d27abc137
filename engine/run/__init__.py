"""A run and its directory: file names and locks, plan, log, metrics and trackers, evaluation.

Offers `open_run` and `choose_snapshot` (directory.py), `Plan`, `Requests`, `TrainingLog`, `Metrics`, `evaluate`,
and the console's `log_to_console` and `fail`. Knows no optimizer and no kind of model:
`model(x, y)` returns `(anything, loss)`; memory.py alone counts the layers of a GPT.
"""
