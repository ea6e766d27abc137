"""Report page: one run, or several over each other, as one HTML file that needs no network."""

import os
import shlex
from typing import Any

import yaml

from engine.config.settings import IRRELEVANT, as_typed, flatten
from engine.reports.charts import draw_charts, hue, ticks
from engine.reports.history import Run, best_first, name_runs, seed_means
from engine.reports.problems import check
from engine.run.metrics import duration, format_loss


def render(runs: list[Run]) -> str:
    """The page of `runs`, the one with the lowest held-out loss first."""
    runs = best_first(runs)
    labels = name_runs(runs) if len(runs) > 1 else [runs[0].config["run_name"]]
    varied = varied_settings(runs)
    minor = IRRELEVANT - {"trainer.seed"}  # which tells runs apart
    parts = ("encoding", "train_split", "final_split")  # decide what is scored
    scored = {
        # An older run has no final_split.
        (run.starts[-1]["text_sha256"], *(as_typed(run.config["data"].get(part) or 0) for part in parts))
        for run in runs
    }
    described = [shown_values(run, label, hue(i)) for i, (run, label) in enumerate(zip(runs, labels, strict=True))]
    import jinja2  # which only this needs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=labels[0] if len(runs) == 1 else f"{len(runs)} runs",
        charts=draw_charts(runs, labels),
        ticks=ticks,
        varied={key: values for key, values in varied.items() if key not in minor},
        # Differences that change no loss.
        folded={key: values for key, values in varied.items() if key in minor - {"run_name", "run_dir"}},
        are_comparable=len(scored) == 1,
        means=seed_means(runs, labels),
        facts=dict.fromkeys(fact for run in described for fact in run["facts"]),
        runs=described,
    )


def varied_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """The settings in which `runs` differ: by key, the value of each run."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [as_typed(settings.get(key)) for settings in flat] for key in keys}
    return {key: v for key, v in values.items() if any(x != v[0] for x in v)}


def shown_values(run: Run, label: str, colour: int) -> dict[str, Any]:
    """The values that the template shows for one run."""
    verdict, sentences = check(run)
    return {
        "label": label,
        "hue": colour,
        "verdict": verdict,
        "sentences": sentences,
        "facts": {
            "best held-out loss": format_loss(run.best["loss"] if run.best else None),
            "at step": f"{run.best['step']:,}" if run.best else "-",
            **({"final loss": format_loss(run.final["loss"])} if run.final else {}),
            "steps": f"{run.step:,} of {run.total_steps:,}",
            "wall time": duration(run.seconds),
            f"{run.unit}s/s": f"{run.characters_per_s:,.0f}" if run.characters_per_s else "-",
        },
        "samples": [line for line in run.train if line.get("samples")],
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "starts": [start | {"command": command(start)} for start in run.starts],
    }


def command(start: dict[str, Any]) -> str:
    """The command line of a start; empty if another program called `train`."""
    if start["overrides"] is None:
        return ""
    recipe = [] if start["recipe"] else ["experiment=null"]  # otherwise main.py adds one
    return shlex.join(["python", "main.py", *recipe, *start["overrides"]])
