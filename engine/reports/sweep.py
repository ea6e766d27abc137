"""Sweeps: the status of each job, and the table of all jobs that a sweep ends with.

    python main.py -m optimizer.learning_rate=1e-3,3e-3 trainer.seed=1,2,3

Everything is read from the directories of the jobs, whichever of Hydra's launchers ran them.
"""

import atexit
import glob
import logging
import os
import re
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from engine.config.overrides import override_key, quoted
from engine.errors import UserError
from engine.files import atomic_write, masked
from engine.parallel import distributed
from engine.reports.history import Run, are_comparable, best_first, caveat, name_runs, seed_means
from engine.run.directory import JOB, shell_path
from engine.run.metrics import format_loss

log = logging.getLogger("gpt")


def check_sweep(arguments: list[str]) -> None:
    """Raises `UserError` for a sweep under a launcher, or with --cfg."""
    if distributed.size() > 1:
        raise UserError(
            "-m: the jobs of a sweep run one after another, in one process: start it with python main.py -m, "
            "without a launcher"
        )
    typed = {argument.partition("=")[0]: argument.partition("=")[2] for argument in arguments}
    is_named = typed.keys() & {"run_name", "run_dir", "experiment"}
    if re.match(r"[^\[\"'].*,", typed.get("data.path", "")) and not is_named:  # or the first text would name them all
        raise UserError("-m: a sweep over texts needs a name: run_name=NAME")
    if typed.keys() & {"--cfg", "-c"}:
        raise UserError("--cfg: prints one configuration; leave out -m")


class Sweep(Callback):
    """Hydra's callback of `conf/config.yaml`: one directory for all jobs of a sweep, `job.yaml` in
    each job's own, and the table at the end.
    """

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        """Fixes the directory of the sweep, which each job would otherwise compose from its own
        recipe or run_name, and names the jobs by their swept overrides.
        """
        sweep_dir, given = config.hydra.sweep.dir, config.hydra.overrides
        typed: Any = OmegaConf.to_container(given.hydra, resolve=False)  # may have ${hydra.job.num}, unknown here
        own = [quoted("hydra.sweep.dir", sweep_dir)]
        parsed = OverridesParser.create().parse_overrides(list(given.task))
        swept = " ".join(sorted(o.key_or_group for o in parsed if o.is_sweep_override()))
        if swept and not any(override_key(o) == "hydra.sweep.subdir" for o in typed):
            name = f"${{job_name:${{hydra.overrides.task}},'{swept}'}}"
            own.append(quoted("hydra.sweep.subdir", name))
        with read_write(config), open_dict(config):
            given.hydra.extend(own)
        # Not on_multirun_end: Hydra calls it only if no job failed and the sweep was not stopped.
        atexit.register(log_results, os.path.abspath(sweep_dir))

    def on_job_start(self, config: DictConfig, **_) -> None:
        write_status(config, "stopped")  # unless it ends otherwise
        path = os.path.join(config.hydra.sweep.dir, "multirun.yaml")  # Hydra's
        if os.path.exists(path):
            content = Path(path).read_text(encoding="utf-8")
            with atomic_write(path) as file:
                file.write(masked(content))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_) -> None:
        done = job_return.status == JobStatus.COMPLETED
        write_status(config, "finished" if done else "failed")


def write_status(config: DictConfig, status: str) -> None:
    """Writes `job.yaml`, the overrides and the status of a sweep's job."""
    if config.hydra.mode != RunMode.MULTIRUN:
        return
    overrides = masked(list(config.hydra.overrides.task))
    with atomic_write(os.path.join(config.hydra.runtime.output_dir, JOB)) as file:
        yaml.safe_dump({"overrides": overrides, "status": status}, file)


def read_jobs(sweep_dir: str) -> list[Run]:
    """The runs of the jobs started so far, lowest held-out loss first, those without one last."""
    found = sorted(glob.glob(os.path.join(glob.escape(sweep_dir), "*", JOB)))
    return best_first([Run(os.path.dirname(path)) for path in found])


def table(runs: list[Run]) -> list[str]:
    """The lines of a table of jobs, each named by the overrides in which it differs from others, and of the
    means over seeds.
    """
    rows = [("job", "best loss", "at step", "steps", "status")]
    names = name_runs(runs)
    for run, name in zip(runs, names, strict=True):
        loss, at = (format_loss(run.best["loss"]), run.best["step"]) if run.best else ("-", "-")
        rows.append((name, loss, f"{at}", f"{run.step}", run.job["status"]))
    means, verdict = seed_means(runs, names)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(len(row[0]) for row in [*rows, *means])  # a mean's range may be wider than its column
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [*rows, *means]]
    return [*lines, verdict] if verdict else lines


def log_results(sweep_dir: str) -> None:
    """Logs the table of the jobs in `sweep_dir`."""
    try:
        jobs = read_jobs(sweep_dir)
        if not jobs:
            return
        lines, with_loss = table(jobs), [job for job in jobs if job.best]
        warning, may_recommend = caveat(with_loss), with_loss and are_comparable(with_loss)
    except UserError as error:  # a damaged file of one of them
        log.error("%s", error)
        return
    log.info("sweep       %d jobs in %s; held-out losses", len(jobs), sweep_dir)
    for line in lines:
        log.info("%s", line)
    if warning:
        log.warning("%s", warning)
    if may_recommend:
        log.info("sample      python sample.py run_dir=%s", shell_path(jobs[0].path))
