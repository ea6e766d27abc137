"""Reports: reads run directories, and shows runs and their problems.

For others: `history` reads a run, `page` renders runs as one HTML file, `problems` judges whether a run
is on track, `sweep` is Hydra's callback that prints the table of a sweep. Nothing here trains.
"""
