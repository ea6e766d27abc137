"""Sweeps: what became of each job, and the table of them all that a sweep ends with.

    python main.py -m optimizer.learning_rate=1e-3,3e-3 trainer.seed=1,2,3

Everything is read from the directories of the jobs, so it does not matter which of Hydra's
launchers ran them, when, or where.
"""

import atexit
import contextlib
import csv
import glob
import logging
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.parallel.launch import quoted
from engine.reports.history import median_rate
from engine.run.directory import JOB, METRICS, shown
from engine.run.metrics import read_lines
from engine.run.progress import format_loss
from engine.run.signals import Stopped

log = logging.getLogger("gpt")
RESULTS = "results.csv"  # in the directory of the sweep


@contextlib.contextmanager
def recorded(run_dir: str, overrides: list[str]) -> Iterator[None]:
    """Keeps in `run_dir` which job of a sweep this is, and how it ended: finished, failed or
    stopped; a job that was killed counts as stopped.
    """
    path = os.path.join(run_dir, JOB)

    def write(status: str) -> None:
        try:
            with atomic_write(path) as file:
                yaml.safe_dump({"overrides": overrides, "status": status}, file)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error

    write("stopped")
    try:
        yield
    except Stopped:
        raise
    except Exception:
        write("failed")
        raise
    write("finished")


@dataclass
class Job:
    """A job of a sweep as its directory has it. Losses are held-out ones, nats per character; what
    there is nothing of is None.
    """

    directory: str
    overrides: list[str]
    steps: int | None
    best_loss: float | None
    best_step: int | None
    last_loss: float | None
    characters_per_s: float | None
    status: str

    @classmethod
    def read(cls, run_dir: str) -> "Job":
        """The job in `run_dir`."""
        with open(os.path.join(run_dir, JOB)) as file:
            job = yaml.safe_load(file)
        lines = read_lines(os.path.join(run_dir, METRICS), "split", "loss")
        val = held_out(lines)
        best = min(val, key=lambda line: line["loss"], default={})
        return cls(
            directory=run_dir,
            overrides=job["overrides"],
            steps=lines[-1]["step"] if lines else None,
            best_loss=best.get("loss"),
            best_step=best.get("step"),
            last_loss=val[-1]["loss"] if val else None,
            characters_per_s=median_rate(lines),
            status=job["status"],
        )


def last_loss(run_dir: str) -> float | None:
    """The held-out loss that a run has logged last; None if it has logged none."""
    val = held_out(read_lines(os.path.join(run_dir, METRICS), "split", "loss"))
    return val[-1]["loss"] if val else None


def held_out(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["split"] == "val"]


def read_jobs(sweep_dir: str) -> list[Job]:
    """The jobs that a sweep has begun, lowest held-out loss first, those without one last.

    Raises `UserError` for one that cannot be read.
    """
    jobs = []
    for path in sorted(glob.glob(os.path.join(glob.escape(sweep_dir), "*", JOB))):
        folder = os.path.dirname(path)
        try:
            jobs.append(Job.read(folder))
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
            raise UserError(
                f"{folder}: {JOB} or {METRICS} cannot be read: {one_line(error)}"
            ) from error
    return sorted(jobs, key=lambda job: (job.best_loss is None, job.best_loss or 0))


def table(jobs: list[Job]) -> list[str]:
    """The lines of a table of `jobs`: the overrides in which they differ, and their results."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    head = ("overrides", "steps", "best loss", "at step", "last loss", "characters/s", "status")
    rows = [
        (
            " ".join(o for o in job.overrides if o not in common),
            f"{job.steps or 0}",
            format_loss(job.best_loss),
            f"{job.best_step or '-'}",
            format_loss(job.last_loss),
            f"{job.characters_per_s:,.0f}" if job.characters_per_s else "-",
            job.status,
        )
        for job in jobs
    ]
    return columns([head, *rows])


def table_over_seeds(jobs: list[Job]) -> list[str]:
    """The lines of a table of the finished jobs that differ in `trainer.seed` alone: mean and
    standard deviation of their losses. Empty if there are none.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}  # of each, best and last loss
    for job in jobs:
        rest = tuple(o for o in job.overrides if not o.startswith("trainer.seed="))
        if job.status == "finished" and job.best_loss is not None and job.last_loss is not None:
            groups.setdefault(rest, []).append((job.best_loss, job.last_loss))
    if all(len(group) == 1 for group in groups.values()):
        return []
    common = set.intersection(*map(set, groups)) if len(groups) > 1 else set()

    def spread(losses: tuple[float, ...]) -> str:
        if len(losses) == 1:
            return format_loss(losses[0])
        return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"

    rows = [
        (
            " ".join(o for o in rest if o not in common),
            f"{len(group)}",
            *map(spread, zip(*group, strict=True)),
        )
        for rest, group in groups.items()
    ]
    return columns([("overrides", "seeds", "best loss", "last loss"), *rows])


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def log_results(sweep_dir: str) -> None:
    """Logs what became of the jobs in `sweep_dir`, and writes it to `results.csv` there."""
    try:
        jobs = read_jobs(sweep_dir)
    except UserError as error:
        log.error("no table of this sweep: %s", error)
        return
    if not jobs:
        return
    log.info(
        "sweep       %d jobs in %s, by held-out loss, nats per character", len(jobs), sweep_dir
    )
    over_seeds = table_over_seeds(jobs)
    for line in [*table(jobs), *([""] if over_seeds else []), *over_seeds]:
        log.info("%s", line)
    if jobs[0].best_loss is not None:
        log.info("sample      python sample.py run_dir=%s", shown(jobs[0].directory))
    path = os.path.join(sweep_dir, RESULTS)
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, vars(jobs[0]))
            writer.writeheader()
            writer.writerows(vars(job) | {"overrides": " ".join(job.overrides)} for job in jobs)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


class Results(Callback):
    """Hydra's callback of `conf/config.yaml`: puts all jobs of a sweep into one directory, names
    each by its swept overrides, and prints the table when the sweep ends, however it ends.

    Every job would compose `hydra.sweep.dir` anew, and find another where it is the recipe or the
    run's name that differs. Hydra's own call at the end comes only where no job failed.
    """

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        sweep_dir, given = config.hydra.sweep.dir, config.hydra.overrides
        own = [f"hydra.sweep.dir={quoted(sweep_dir)}"]
        parsed = OverridesParser.create().parse_overrides(list(given.task))
        swept = " ".join(sorted(o.key_or_group for o in parsed if o.is_sweep_override()))
        if swept and not any(o.startswith("hydra.sweep.subdir=") for o in given.hydra):
            name = f'${{job_name:${{hydra.overrides.task}},"{swept}"}}'
            own.append(f"hydra.sweep.subdir={quoted(name)}")
        with read_write(config), open_dict(config):
            given.hydra.extend(own)
        atexit.register(log_results, os.path.abspath(sweep_dir))
