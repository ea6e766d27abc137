"""Report page: one run, or several over each other, as one HTML file that needs no network."""

import math
import os
import shlex
from typing import Any

import jinja2
import yaml

from engine.config.overrides import without
from engine.reports.charts import charts, hue
from engine.reports.history import Run
from engine.reports.reference import check, find_reference
from engine.run.progress import duration, format_loss


def render(runs: list[Run], references: dict[str, Any]) -> str:
    """The page of `runs`, the one with the lowest held-out loss first."""
    runs = sorted(runs, key=lambda run: run.best["loss"] if run.best else math.inf)
    labels = name_runs(runs) if len(runs) > 1 else [runs[0].config.get("run_name", "")]
    parts = charts(runs, labels, references)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=labels[0] if len(runs) == 1 else f"{len(runs)} runs",
        charts=[part.scaled() for part in parts],
        runs=[
            describe(run, references) | {"label": label, "hue": hue(i)}
            for i, (run, label) in enumerate(zip(runs, labels, strict=True))
        ],
        reference=find_reference(runs[0], references)[0]
        if any(part.band for part in parts)
        else None,
    )


def describe(run: Run, references: dict[str, Any]) -> dict[str, Any]:
    """The values that the template shows for one run."""
    verdict, sentences = check(run, references)
    held_out = {line["step"]: line["loss"] for line in run.val}
    facts = {
        "best held-out loss": format_loss(run.best["loss"] if run.best else None),
        "at step": f"{run.best['step']:,}" if run.best else "-",
        "last held-out loss": format_loss(run.last_loss),
        "steps": f"{run.step:,} of {run.total_steps:,}",
        "wall time": duration(run.seconds),
        "characters/s": f"{run.characters_per_s:,.0f}" if run.characters_per_s else "-",
    }
    return {
        "run": run,
        "verdict": verdict,
        "sentences": sentences,
        "facts": facts,
        "samples": [
            line | {"held_out": held_out.get(line["step"])}
            for line in run.train
            if line.get("samples")
        ],
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "commands": commands(run),
    }


def name_runs(runs: list[Run]) -> list[str]:
    """The names of the runs' directories, or their paths where names are the same."""
    names = [os.path.basename(os.path.normpath(run.path)) for run in runs]
    return names if len(set(names)) == len(runs) else [run.path for run in runs]


def commands(run: Run) -> list[tuple[str, str]]:
    """(purpose, command) to repeat a run that Hydra configured, and to sample from it."""
    lines = [("Sample", ["python", "sample.py", f"run_dir={run.path}"])]
    start = run.starts[-1]
    if start["overrides"] is not None:
        words = without(start["overrides"], "run_name=", "run_dir=", "launch.", "trainer.resume=")
        if start["recipe"] is None:  # otherwise main.py adds one
            words.insert(0, "experiment=null")
        if start["hosts"] == 1 and start["processes"] > 1:
            words.append(f"launch.nproc_per_node={start['processes']}")
        lines.insert(0, ("Repeat", ["python", "main.py", *words, "run_name=again"]))
    return [(purpose, shlex.join(line)) for purpose, line in lines]
