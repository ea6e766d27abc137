"""Reports: a page for a run or several, and a check against the recipe's reference.

    python report.py                                   the newest run, into its own directory
    python report.py run_dir=runs/NAME                 another run, also while it trains
    python report.py run_dirs=[runs/a,runs/b]          several runs over each other
    python report.py run_dirs=runs/NAME.sweep          the runs of a sweep
    python report.py check run_dir=runs/NAME           is it on track? exit status 1 if not

The page is one HTML file that needs no network. `out=FILE` names it (default: report.html in the
run's directory), `reference=FILE` names another file than docs/reference.json.
"""

import functools
import glob
import os
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import OmegaConf

from config import Config, compose, plain
from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.reports.history import Run
from engine.reports.page import render
from engine.reports.reference import OFF_TRACK, check, load_references
from engine.run.directory import REPORT, is_run, newest_run

REFERENCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "docs", "reference.json")


@dataclass
class ReportArguments:
    """The arguments of both commands, `name=value`."""

    run_dir: str | None = None  # without: the newest under runs/
    run_dirs: list[str] | None = None  # several; each a run, a sweep or a pattern
    reference: str = REFERENCES  # recorded loss curves of the recipes
    out: str | None = None  # without: report.html in the directory of the run, or of all runs


@functools.cache  # composing takes a tenth of a second
def compose_recipe(name: str | None) -> dict[str, Any]:
    """The resolved configuration of a recipe, without a name that of the defaults; do not modify
    it. Raises `UserError` if there is no such recipe.
    """
    composed = compose([f"experiment={name}"] if name else [])
    return plain(cast(Config, OmegaConf.to_object(composed)))


def write(run_dirs: list[str], out: str, reference: str = REFERENCES) -> str:
    """Writes the page of the runs in `run_dirs` to `out`, atomically; returns `out`.

    Raises `UserError` for a directory that is not a run's, and if `out` cannot be written.
    """
    runs = [Run.read(path, compose_recipe) for path in run_dirs]
    html = render(runs, load_references(reference))
    try:
        with atomic_write(out) as file:
            file.write(html)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}") from error
    return out


def find_runs(run_dir: str | None, run_dirs: list[str] | None) -> list[str]:
    """The directories of the runs named, or of the newest run; a pattern, and the directory of a
    sweep, stand for the runs they hold.
    """
    if run_dir is not None and run_dirs is not None:
        raise UserError("run_dir and run_dirs: give one of them")
    if run_dirs is None:
        return [run_dir or newest_run()]
    if not run_dirs:
        raise UserError("run_dirs=[]: names no run")
    found = []
    for name in run_dirs:
        matches = [name] if os.path.isdir(name) else sorted(glob.glob(name))
        inside = [path for match in matches for path in sorted(glob.glob(f"{match}/*"))]
        runs = list(filter(is_run, matches)) or list(filter(is_run, inside))
        if not runs:
            raise UserError(
                f"run_dirs: {name} is not the directory of a run or a sweep, and "
                "matches none that has logged something; several are [runs/a,runs/b]"
            )
        found += runs
    return list(dict.fromkeys(found))


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    command = "report"
    if arguments and "=" not in arguments[0] and not os.path.isdir(arguments[0]):
        command, *arguments = arguments
    if command not in ("report", "check"):
        raise UserError(f"{command}: not a command; there are report, check")
    config = parse(ReportArguments, arguments)
    if command == "check" and config.out is not None:
        raise UserError(f"out={config.out}: check writes no page; leave it out")
    run_dirs = find_runs(config.run_dir, config.run_dirs)
    if command == "report":
        folder = os.path.commonpath([os.path.abspath(path) for path in run_dirs])
        folder = run_dirs[0] if len(run_dirs) == 1 else folder
        print(write(run_dirs, config.out or os.path.join(folder, REPORT), config.reference))
        return 0
    references, status = load_references(config.reference), 0
    for run in [Run.read(path, compose_recipe) for path in run_dirs]:
        verdict, sentences = check(run, references)
        print(f"{run.path}, step {run.step} of {run.total_steps}: {verdict}")
        print("\n".join(f"- {sentence}" for sentence in sentences))
        status = 1 if verdict == OFF_TRACK else status
    return status


if __name__ == "__main__":
    run_program(main, ReportArguments)
