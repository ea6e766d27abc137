"""Reports: a page for one or several runs, and a check of their losses.

    python report.py                                   the newest run, into its own directory
    python report.py run_dir=runs/NAME                 another run, also while it trains
    python report.py run_dirs=[runs/a,runs/b]          several runs over each other
    python report.py run_dirs=runs/NAME.sweep          the runs of a sweep
    python report.py check run_dir=runs/NAME           is it on track? exit status 1 if not

The page is one HTML file that needs no network. `out=FILE` names it (default: report.html in the
run's directory, or in the common directory of several).
"""

import glob
import logging
import os
import sys
from dataclasses import dataclass

from engine.config.arguments import parse, run_program
from engine.errors import UserError, check_only_one
from engine.files import atomic_write, is_page_of
from engine.reports.history import Run
from engine.reports.page import render
from engine.reports.problems import OFF_TRACK, check
from engine.run.directory import METRICS, REPORT, is_run, newest_run, newest_run_hint, shell_path

log = logging.getLogger("gpt")


@dataclass
class ReportArguments:
    """Command-line arguments, `name=value`."""

    run_dir: str | None = None  # null: the newest under runs/
    run_dirs: list[str] | None = None  # several; each a run, a sweep or a pattern
    out: str | None = None  # null: report.html in the directory of the run, or of all runs


def write(runs: list[Run], out: str) -> None:
    """Writes the page of `runs` to `out`, atomically. Raises OSError if that fails, and `UserError` for a run that
    cannot be read.
    """
    html = render(runs)
    with atomic_write(out, "wb") as file:
        file.write(html.encode(errors="replace"))  # a file name may be no UTF-8


def find_runs(names: list[str]) -> list[str]:
    """The run directories of `names`: runs, sweeps, or patterns of either; without names, the newest run. Raises
    `UserError` for a name without a run.
    """
    found = []
    for name in names or [newest_run()]:
        runs: list[str] = []
        for match in [name] if os.path.isdir(name) else sorted(glob.glob(name)):
            inside = sorted(glob.glob(f"{glob.escape(match)}/*"))
            runs += [match] if is_run(match) else filter(is_run, inside)
        if not runs:
            hint = "" if os.path.isdir(name) else newest_run_hint(name)
            raise UserError(f"{name}: no run has logged anything there{hint}")
        found += runs
    return list(dict.fromkeys(found))


def read_runs(run_dirs: list[str]) -> list[Run]:
    """The runs in `run_dirs`. Names runs that cannot be read, and counts lines passed over, on standard error. Raises
    `UserError` if there is no run left.
    """
    runs = []
    for run_dir in run_dirs:
        try:
            run = Run(run_dir)
            _ = run.config, run.starts, run.job  # reads them now
        except (UserError, OSError) as error:
            if len(run_dirs) == 1:
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        if run.passed_over:
            path = os.path.join(run_dir, METRICS)
            print(f"warning: {path}: passed over {run.passed_over} damaged or foreign lines", file=sys.stderr)
        runs.append(run)
    if not runs:
        raise UserError("none of the runs can be read")
    return runs


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    is_check = arguments[:1] == ["check"]
    config = parse(ReportArguments, arguments[is_check:])
    if is_check and config.out is not None:
        raise UserError(f"out={config.out}: check writes no page; leave it out")
    check_only_one(run_dir=config.run_dir, run_dirs=config.run_dirs)
    run_dirs = find_runs([*filter(None, [config.run_dir]), *(config.run_dirs or [])])
    runs = read_runs(run_dirs)
    if is_check:
        verdicts = []
        for run in runs:
            verdict, sentences = check(run)
            print(f"{run.path}, step {run.step} of {run.total_steps}: {verdict}", *sentences, sep="\n- ")
            verdicts.append(verdict)
        return int(OFF_TRACK in verdicts or len(runs) < len(run_dirs))
    folder = os.path.commonpath([os.path.abspath(path) for path in run_dirs])
    out = config.out or os.path.join(folder, REPORT)
    if os.path.lexists(out) and not is_page_of(out, "report.py"):
        raise UserError(f"{out}: exists and is not a report; remove it, or give out=FILE")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    write(runs, out)
    print(shell_path(out))
    return 0


if __name__ == "__main__":
    run_program(main, ReportArguments)
