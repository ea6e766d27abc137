"""Sweeps: the status of each job, and the table of all jobs that a sweep ends with.

    python main.py -m optimizer.learning_rate=1e-3,3e-3 trainer.seed=1,2,3

Everything is read from the directories of the jobs, so it does not matter which of Hydra's
launchers ran them, when, or where.
"""

import atexit
import csv
import glob
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from engine.config.overrides import quoted, without
from engine.errors import UserError
from engine.files import atomic_write
from engine.parallel.distributed import launched_rank
from engine.parallel.slurm import export_torchrun_env
from engine.reports.history import read_history
from engine.run.directory import JOB, relative_path
from engine.run.progress import format_loss

log = logging.getLogger("gpt")
RESULTS = "results.csv"  # in the directory of the sweep


class Sweep(Callback):
    """Hydra's callback of `conf/config.yaml`: one directory for all jobs of a sweep, `job.yaml` in
    each job's own, and the table at the end.
    """

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        """Fixes the directory of the sweep, which each job would otherwise compose from its own
        recipe or run_name, and names the jobs by their swept overrides.
        """
        sweep_dir, given = config.hydra.sweep.dir, config.hydra.overrides
        own = [f"hydra.sweep.dir={quoted(sweep_dir)}"]
        parsed = OverridesParser.create().parse_overrides(list(given.task))
        swept = " ".join(sorted(o.key_or_group for o in parsed if o.is_sweep_override()))
        if swept and not any(o.startswith("hydra.sweep.subdir=") for o in given.hydra):
            name = f'${{job_name:${{hydra.overrides.task}},"{swept}"}}'
            own.append(f"hydra.sweep.subdir={quoted(name)}")
        with read_write(config), open_dict(config):
            given.hydra.extend(own)
        # Not on_multirun_end: Hydra calls it only if no job failed and the sweep was not stopped.
        atexit.register(log_results, os.path.abspath(sweep_dir))

    def on_job_start(self, config: DictConfig, **_) -> None:
        export_torchrun_env()  # a task of submitit has no rank yet
        write_status(config, "stopped")  # unless it ends otherwise

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_) -> None:
        done = job_return.status == JobStatus.COMPLETED
        write_status(config, "finished" if done else "failed")


def write_status(config: DictConfig, status: str) -> None:
    """Writes `job.yaml`, the overrides and the status of a sweep's job, on rank 0."""
    if config.hydra.mode != RunMode.MULTIRUN or launched_rank() != 0:
        return
    overrides = without(list(config.hydra.overrides.task), "launch.")
    with atomic_write(os.path.join(config.hydra.runtime.output_dir, JOB)) as file:
        yaml.safe_dump({"overrides": overrides, "status": status}, file)


@dataclass
class Job:
    """A job of a sweep. Losses are held-out ones, nats per character; unknown values are None."""

    directory: str
    overrides: list[str]
    steps: int
    best_loss: float | None
    best_step: int | None
    last_loss: float | None
    characters_per_s: float | None
    status: str

    @classmethod
    def read(cls, run_dir: str) -> "Job":
        with open(os.path.join(run_dir, JOB)) as file:
            job = yaml.safe_load(file)
        history = read_history(run_dir)
        best = history.best or {}
        return cls(
            run_dir, job["overrides"], history.step, best.get("loss"), best.get("step"),
            history.last_loss, history.characters_per_s, job["status"],
        )  # fmt: skip


def read_jobs(sweep_dir: str) -> list[Job]:
    """The jobs started so far, lowest held-out loss first, those without one last. Raises
    `UserError` for damaged metrics.
    """
    paths = sorted(glob.glob(os.path.join(glob.escape(sweep_dir), "*", JOB)))
    jobs = [Job.read(os.path.dirname(path)) for path in paths]
    return sorted(jobs, key=lambda job: (job.best_loss is None, job.best_loss or 0))


def table(jobs: list[Job]) -> list[str]:
    """The lines of a table of `jobs`, each named by the overrides in which it differs."""
    rows = [("job", "best loss", "at step", "steps", "status")]
    for name, job in zip(names([job.overrides for job in jobs]), jobs, strict=True):
        best = (format_loss(job.best_loss), f"{job.best_step or '-'}")
        rows.append((name, *best, f"{job.steps}", job.status))
    return columns(rows)


def table_over_seeds(jobs: list[Job]) -> list[str]:
    """The lines of a table of the finished jobs that differ only in `trainer.seed`: mean and
    standard deviation of their best losses. Empty if there are none.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    for job in jobs:
        if job.status == "finished" and job.best_loss is not None:
            key = tuple(without(job.overrides, "trainer.seed="))
            groups.setdefault(key, []).append(job.best_loss)
    if all(len(losses) == 1 for losses in groups.values()):
        return []
    rows = [("job", "seeds", "best loss")]
    for name, losses in zip(names(list(groups)), groups.values(), strict=True):
        deviation = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        rows.append((name, f"{len(losses)}", f"{statistics.mean(losses):.4f}{deviation}"))
    return columns(rows)


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """For each job, its overrides without those that all share and without their groups."""
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    own = [[o.partition("=") for o in job if o not in shared] for job in jobs]
    return [" ".join(f"{key.split('.')[-1]}={value}" for key, _, value in job) for job in own]


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def log_results(sweep_dir: str) -> None:
    """Logs the tables of the jobs in `sweep_dir`, and writes `results.csv` there."""
    try:
        jobs = read_jobs(sweep_dir)
    except UserError as error:
        log.error("no table of this sweep: %s", error)
        return
    if not jobs:
        return
    log.info("sweep       %d jobs in %s; losses are held-out ones", len(jobs), sweep_dir)
    over_seeds = table_over_seeds(jobs)
    for line in [*table(jobs), *([""] if over_seeds else []), *over_seeds]:
        log.info("%s", line)
    if jobs[0].best_loss is not None:
        log.info("sample      python sample.py run_dir=%s", relative_path(jobs[0].directory))
    path = os.path.join(sweep_dir, RESULTS)
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, vars(jobs[0]))
            writer.writeheader()
            writer.writerows(vars(job) | {"overrides": " ".join(job.overrides)} for job in jobs)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
