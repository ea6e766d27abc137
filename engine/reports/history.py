"""Run history: metrics, configuration and provenance of a run, read from its directory."""

import functools
import os
import statistics
from typing import Any

import yaml

from engine.config.overrides import key_of, without
from engine.config.settings import IRRELEVANT
from engine.errors import UserError, one_line
from engine.run.directory import CONFIG, ENVIRONMENT, JOB, METRICS
from engine.run.metrics import read_lines


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
            else:
                (self.train if line["split"] == "train" else self.val).append(line)

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the lowest held-out loss, the first of equals."""
        return min(self.val, key=lambda line: line["loss"], default=None)

    @property
    def last_loss(self) -> float | None:
        """The held-out loss logged last."""
        return self.val[-1]["loss"] if self.val else None

    @property
    def characters_per_s(self) -> float | None:
        """The median throughput."""
        rates = [line["tokens_per_s"] for line in self.train if line.get("tokens_per_s")]
        return statistics.median(rates) if rates else None

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml`, nested dictionaries. Raises `UserError` if it cannot be read."""
        path = os.path.join(self.path, CONFIG)
        try:
            with open(path, encoding="utf-8") as file:
                return yaml.safe_load(file)
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read: {one_line(error)}") from error

    @functools.cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The lines of `environment.jsonl`, one per start. Raises `UserError` without one."""
        path = os.path.join(self.path, ENVIRONMENT)
        if starts := read_lines(path):
            return starts
        raise UserError(f"{path}: cannot be read; main.py writes it when a run starts")

    @functools.cached_property
    def job(self) -> dict[str, Any]:
        """`job.yaml` of a sweep's job: `overrides`, and `status`: finished, failed or stopped; empty for
        another run.
        """
        path = os.path.join(self.path, JOB)
        if not os.path.exists(path):
            return {}
        with open(path) as file:
            return yaml.safe_load(file)

    @property
    def total_steps(self) -> int:
        return self.starts[-1]["total_steps"]

    @property
    def recipe(self) -> str | None:
        """The recipe named or chosen at the last start; None without one."""
        return self.starts[-1]["recipe"]

    @property
    def changes(self) -> list[str]:
        """The overrides of all starts that affect the loss by more than another seed does."""
        typed = dict.fromkeys(o for start in self.starts for o in start["overrides"] or ())
        return [o for o in without(typed, "experiment=", "launch.") if key_of(o) not in IRRELEVANT]


def name_runs(runs: list[Run]) -> list[str]:
    """A name for each run: of the jobs of one sweep the overrides that not all of them share, of others
    the directory, below the one that holds all.
    """
    folders = [os.path.dirname(os.path.abspath(run.path)) for run in runs]
    if len(runs) == 1 or len(set(folders)) > 1 or not all(run.job for run in runs):
        return [os.path.relpath(run.path, os.path.commonpath(folders)) for run in runs]
    shared = set.intersection(*(set(run.job["overrides"]) for run in runs))
    own = [[o.partition("=") for o in run.job["overrides"] if o not in shared] for run in runs]
    return [" ".join(f"{key.split('.')[-1]}={value}" for key, _, value in job) for job in own]
