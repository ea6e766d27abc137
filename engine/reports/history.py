"""Run history: metrics, configuration and provenance of a run, read from its directory."""

import functools
import math
import os
import statistics
from typing import Any

import yaml

from engine.config.settings import IRRELEVANT, flatten
from engine.errors import UserError
from engine.run.directory import ENVIRONMENT, JOB, METRICS, read_config
from engine.run.metrics import format_loss, read_lines
from engine.text import unit_of


class Run:
    """A run that has ended or is still training. Raises `UserError` for a damaged line of metrics."""

    def __init__(self, path: str):
        self.path = path  # the run directory
        # Lines of `metrics.jsonl` of either split whose loss is finite; empty without a file.
        self.train: list[dict[str, Any]] = []
        self.val: list[dict[str, Any]] = []
        self.diverged: dict[str, Any] | None = None  # the last line that is not finite, or says why
        self.final: dict[str, Any] | None = None  # of the final part of the text, if it was scored
        # The last step logged, and wall time up to it, evaluations and saves included.
        self.step, self.seconds = 0, 0.0
        for line in read_lines(os.path.join(path, METRICS), "split", "loss", "seconds"):
            self.step, self.seconds = line["step"], line["seconds"]
            if line["split"] == "final":
                self.final = line
            elif line["loss"] is None or "diverged" in line:
                self.diverged = line
            elif line["split"] in ("train", "val"):
                getattr(self, line["split"]).append(line)

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the lowest held-out loss, the first of equals."""
        return min(self.val, key=lambda line: line["loss"], default=None)

    @property
    def characters_per_s(self) -> float | None:
        """The median throughput."""
        rates = [line["tokens_per_s"] for line in self.train if line.get("tokens_per_s")]
        return statistics.median(rates) if rates else None

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """See `read_config`."""
        return read_config(self.path)

    @property
    def unit(self) -> str:
        """What the model predicts."""
        return unit_of(self.config["data"].get("encoding"))

    @functools.cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The lines of `environment.jsonl`, one per start. Raises `UserError` without one."""
        path = os.path.join(self.path, ENVIRONMENT)
        if starts := read_lines(path):
            return starts
        raise UserError(f"{path}: is missing or empty; reports are of runs that main.py started")

    @functools.cached_property
    def job(self) -> dict[str, Any]:
        """`job.yaml` of a sweep's job: `overrides`, and `status`: finished, failed, stopped; empty for another run."""
        path = os.path.join(self.path, JOB)
        if not os.path.exists(path):
            return {}
        with open(path) as file:
            return yaml.safe_load(file)

    @property
    def total_steps(self) -> int:
        return self.starts[-1]["total_steps"]

    @property
    def has_ended(self) -> bool:
        """Whether it has all its steps, or `trainer.patience` ended it."""
        patience = flatten(self.config).get("trainer.patience")
        is_over = patience is not None and self.best is not None and self.best not in self.val[-patience:]
        return is_over or self.step >= self.total_steps


def best_first(runs: list[Run]) -> list[Run]:
    """`runs`, lowest held-out loss first, those without one last."""
    return sorted(runs, key=lambda run: run.best["loss"] if run.best else math.inf)


def name_runs(runs: list[Run]) -> list[str]:
    """A name for each run: for jobs of one sweep, the overrides that they do not all share; otherwise
    the directory, relative to their common one.
    """
    folders = [os.path.dirname(os.path.abspath(run.path)) for run in runs]
    if len(runs) == 1 or len(set(folders)) > 1 or not all(run.job for run in runs):
        return [os.path.relpath(run.path, os.path.commonpath(folders)) for run in runs]
    shared = set.intersection(*(set(run.job["overrides"]) for run in runs))
    own = [[o.partition("=") for o in run.job["overrides"] if o not in shared] for run in runs]
    return [" ".join(f"{key.split('.')[-1]}={value}" for key, _, value in job) for job in own]


def seed_means(runs: list[Run], names: list[str]) -> list[tuple[str, str, str]]:
    """Means over seeds of the lowest held-out loss, over finished runs that differ only in the seed and in
    settings that change the loss no more than a seed. Returns rows, lowest mean first: label (from the
    `names` of its runs), mean, and range from lowest to highest loss (nats per character).
    """
    groups: dict[str, dict[int, tuple[float, str]]] = {}  # by settings: the loss and name of each seed
    for run, name in zip(runs, names, strict=True):
        if run.best is not None and run.has_ended:
            settings = flatten(run.config)
            seed = settings.get("trainer.seed", 0)
            ignored = IRRELEVANT | {"trainer.max_minutes"}  # from which the steps follow
            relevant = sorted((key, str(value)) for key, value in settings.items() if key not in ignored)
            group = groups.setdefault(f"{run.starts[-1]['text_sha256']} {relevant}", {})
            group.setdefault(seed, (run.best["loss"], name))
    means = []
    for group in groups.values():
        if len(group) > 1:
            losses, members = zip(*group.values(), strict=True)
            shared = [word for word in members[0].split() if all(word in name.split() for name in members)]
            which = " ".join(shared) or (", ".join(members) if len(groups) > 1 else "")
            label = f"mean of {len(members)} seeds{': ' if which else ''}{which}"
            span = f"{format_loss(min(losses))} to {format_loss(max(losses))}"
            means.append((label, format_loss(statistics.mean(losses)), span))
    return sorted(means, key=lambda row: float(row[1]))
