"""Reports: reads run directories, compares runs with recorded ones, shows them.

For others: `history` reads a run, `page` renders runs as one HTML file, `reference` judges whether a run
is on track, `sweep` is Hydra's callback that prints the table of a sweep. Nothing here trains.
"""
