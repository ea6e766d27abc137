"""A run and its directory: file names and locks, plan, progress, log, metrics, trackers, evaluation, provenance."""
