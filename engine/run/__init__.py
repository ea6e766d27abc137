"""A run and its directory: file names and locks, plan, log, metrics and trackers, evaluation, memory, provenance.

Offers `open_run` and `choose_snapshot` (directory.py), `Plan`, `Requests`, `TrainingLog`, `Metrics`, `evaluate`,
`fit_micro_batch` (memory.py), `log_parts` and `record_run` (provenance.py), and the console's `log_to_console`
and `fail`. Knows no kind of model: `model(x, y)` returns `(anything, loss)`; memory.py alone counts the layers of a
GPT, and provenance.py alone logs the settings of an optimizer.
"""
