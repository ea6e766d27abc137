"""A run and its directory: file names and locks, plan, progress, log, metrics, trackers, evaluation, provenance.

Offers `open_run` and `choose_snapshot` (directory.py), `Plan`, `Clock` and `advance` (progress.py), `Requests`,
`RunLog` (log.py), `MetricsFile`, `evaluate`, `fit_micro_batch` (memory.py), `CapturedStep` (cuda_graph.py),
`record_start` (provenance.py), and the console's `log_to_console` and `fail`. Knows no kind of model: `model(x, y)`
returns `(anything, loss)`.
"""
