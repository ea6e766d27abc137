"""Run history: metrics, configuration and provenance of a run, read from its directory."""

import functools
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from engine.config.schema import IRRELEVANT, as_typed, flatten
from engine.errors import UserError
from engine.files import masked
from engine.run.directory import CONFIG, ENVIRONMENT, JOB, METRICS, read_yaml
from engine.run.metrics import format_loss, parse_lines
from engine.text.documents import unit_of

Number = int | float
# What reports read of a line of metrics, and of that of a start.
MEASUREMENT = {
    "step": Number, "split": str, "seconds": Number, "progress": Number | None, "samples": list | None,
    "loss": Number | None, "lr": Number | None, "grad_norm": Number | None, "tokens_per_s": Number | None,
}  # fmt: skip
START = {
    "step": Number, "total_steps": Number, "started": str, "recipe": str | None, "overrides": list | None,
    "unigram_loss": Number | None, "text_sha256": str, "repeated_share": Number | None,
}  # fmt: skip


def has_types(line: dict[str, Any], types: dict[str, Any]) -> bool:
    """Whether the values of a line have these types, and its numbers are finite."""
    values = {key: line.get(key) for key in types}
    is_finite = all(abs(value) < 1e300 for value in values.values() if isinstance(value, Number))
    return is_finite and all(isinstance(values[key], kind) for key, kind in types.items())


class Run:
    """A run that has ended or is still training."""

    def __init__(self, path: str):
        self.path = path  # the run directory
        # Lines of `metrics.jsonl` of either split whose loss is finite; empty without a file.
        self.train: list[dict[str, Any]] = []
        self.val: list[dict[str, Any]] = []
        self.diverged: dict[str, Any] | None = None  # the last line that is not finite, or says why
        self.final: dict[str, Any] | None = None  # of the final part of the text, if it was scored
        # The last step logged, and wall time up to it, evaluations and saves included.
        self.step, self.seconds = 0, 0.0
        self.progress = 0.0  # from 0 to 1; 0 if the run did not log it
        lines = parse_lines(os.path.join(path, METRICS), "split", "loss", "seconds")
        sound = [line for line in lines if line is not None and has_types(line, MEASUREMENT)]
        self.passed_over = len(lines) - len(sound)  # lines that are damaged, or another program's
        for line in sound:
            self.step, self.seconds, self.progress = line["step"], line["seconds"], line.get("progress") or 0.0
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
        """`config.yaml`, nested dictionaries."""
        return masked(read_yaml(os.path.join(self.path, CONFIG), trainer=dict, run_name=str, data=dict))

    @property
    def unit(self) -> str:
        """What the model predicts."""
        return unit_of(self.config["data"].get("encoding"))

    @functools.cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The lines of `environment.jsonl`, one per start. Raises `UserError` without one."""
        path = os.path.join(self.path, ENVIRONMENT)
        if starts := [masked(line) for line in parse_lines(path) if line is not None and has_types(line, START)]:
            return starts
        raise UserError(f"{path}: is missing, empty or damaged; reports are of runs that main.py started")

    @functools.cached_property
    def job(self) -> dict[str, Any]:
        """`job.yaml` of a sweep's job: `overrides`, and `status`: finished, failed, stopped; empty for another run."""
        path = os.path.join(self.path, JOB)
        job = read_yaml(path, overrides=list, status=str) if os.path.exists(path) else {}
        return job | {"overrides": [*map(str, job["overrides"])]} if job else job

    @property
    def total_steps(self) -> int:
        return self.starts[-1]["total_steps"]

    @property
    def has_ended(self) -> bool:
        """Whether it has all its steps, or the clock or `trainer.patience` ended it."""
        patience = flatten(self.config).get("trainer.patience")
        is_over = isinstance(patience, int) and self.best is not None and self.best not in self.val[-patience:]
        return is_over or self.progress >= 1 or self.step >= self.total_steps


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


def are_comparable(runs: list[Run]) -> bool:
    """Whether the held-out losses of `runs` are of the same text."""
    parts = ("encoding", "train_split", "final_split", "held_out", "val_path")  # decide what is scored
    scored = {
        # An older run has not all of them.
        (run.starts[-1]["text_sha256"], *(as_typed(run.config["data"].get(part) or 0) for part in parts))
        for run in runs
    }
    return len(scored) <= 1


def caveat(runs: list[Run]) -> str:
    """A sentence on what a comparison of the losses of `runs` cannot say; empty for runs of one kind."""
    if not are_comparable(runs):
        return "The runs have different texts, encodings or splits: their losses cannot be compared."
    if len({run.total_steps for run in runs}) > 1:
        return (
            "The runs have different numbers of steps, and therefore see the text in different orders, like runs with "
            "different seeds: 0.01 nats may be chance; compare means over several seeds."
        )
    return ""


T_95 = (12.706, 4.303, 3.182, 2.776)  # for 1 to 4 degrees of freedom


def students_t(freedom: float) -> float:
    """Half the width of a 95 % interval, in standard errors: a quantile of Student's t distribution. Below 5 degrees of
    freedom, which are rounded down, from a table; then to 0.2 % (Cornish-Fisher expansion).
    """
    if freedom < 5:
        return T_95[int(freedom) - 1]
    return 1.95996 + 2.3722 / freedom + 2.8225 / freedom**2 + 2.5558 / freedom**3


def compare_means(best: Sequence[float], next_best: Sequence[float]) -> str:
    """A sentence on whether the means of two samples of losses differ: Welch's t interval."""
    a, b = (statistics.variance(losses) / len(losses) for losses in (best, next_best))
    # Welch and Satterthwaite's degrees of freedom.
    freedom = (a + b) ** 2 / (a**2 / (len(best) - 1) + b**2 / (len(next_best) - 1)) if a + b else 1
    half = students_t(freedom) * math.sqrt(a + b)
    apart = statistics.mean(next_best) - statistics.mean(best)
    verdict = "differ" if apart > half else "do not differ by more than chance"
    return f"the best two means {verdict}: by {apart:.4f} ± {half:.4f} (95 %)"


def seed_means(runs: list[Run], names: list[str]) -> tuple[list[tuple[str, str, str]], str]:
    """Means over seeds of the lowest held-out loss, over finished runs that differ only in the seed and in
    settings that change the loss no more than a seed. Returns rows, lowest mean first: label (from the
    `names` of its runs), mean, and its 95 % interval with the standard deviation (nats per character); and whether the
    best two differ, empty for fewer than two or if they cannot be compared.
    """
    groups: dict[str, dict[str, tuple[Run, str]]] = {}  # by settings: the run and name of each seed
    for run, name in zip(runs, names, strict=True):
        if run.best is not None and run.has_ended:
            settings = flatten(run.config)
            seed = str(settings.get("trainer.seed", 0))
            ignored = IRRELEVANT | {"trainer.max_minutes"}  # from which the steps follow
            relevant = sorted((key, str(value)) for key, value in settings.items() if key not in ignored)
            groups.setdefault(f"{run.starts[-1]['text_sha256']} {relevant}", {}).setdefault(seed, (run, name))
    means = []
    for group in groups.values():
        if len(group) > 1:
            members = [name for _, name in group.values()]
            losses = [run.best["loss"] for run, _ in group.values() if run.best]
            shared = [word for word in members[0].split() if all(word in name.split() for name in members)]
            which = " ".join(shared) or (", ".join(members) if len(groups) > 1 else "")
            label = f"mean of {len(members)} seeds{': ' if which else ''}{which}"
            mean, deviation = statistics.mean(losses), statistics.stdev(losses)
            half = students_t(len(losses) - 1) * deviation / math.sqrt(len(losses))
            row = (label, format_loss(mean), f"± {half:.4f} (95 %), deviation {deviation:.4f}")
            means.append((mean, losses, row))
    means.sort(key=lambda entry: entry[0])
    counted = [run for group in groups.values() for run, _ in group.values()]
    verdict = compare_means(means[0][1], means[1][1]) if len(means) > 1 and are_comparable(counted) else ""
    return [row for _, _, row in means], verdict
