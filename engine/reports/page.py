"""Report page: one run, or several over each other, as one HTML file that needs no network."""

import itertools
import math
import os
import shlex
from typing import Any, NamedTuple

import yaml

from engine.config.schema import as_typed, flatten
from engine.reports.history import Run, best_first, caveat, name_runs, seed_means
from engine.reports.problems import check
from engine.run.metrics import duration, format_loss

# A chart for each of these keys of the metrics: (key, title, unit of its values, digits under the pointer).
CHARTS = (
    ("loss", "Loss", "nats per {unit}", 4),
    ("lr", "Learning rate", "per step", 6),
    ("grad_norm", "Gradient norm", "before clipping", 3),
    ("tokens_per_s", "Throughput", "{unit}s per second", 0),
)
MAX_POINTS = 1000  # of one curve; more could not be seen
TRAIN_HUE, VAL_HUE, GOLDEN_ANGLE = 28, 215, 137.5  # degrees of the colour circle

Points = list[tuple[float, float]]  # (step, value)


class Curve(NamedTuple):
    """A named curve; `faint`: drawn as a thin line."""

    name: str
    points: Points
    hue: float
    faint: bool = False


def render(runs: list[Run]) -> str:
    """The page of `runs`, the one with the lowest held-out loss first."""
    runs = best_first(runs)
    labels = name_runs(runs) if len(runs) > 1 else [runs[0].config["run_name"]]
    means, verdict = seed_means(runs, labels)
    described = [shown_values(run, label, hue(i)) for i, (run, label) in enumerate(zip(runs, labels, strict=True))]
    import jinja2  # which only this needs

    loader = jinja2.FileSystemLoader(os.path.dirname(__file__))
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html.jinja").render(
        title=labels[0] if len(runs) == 1 else f"{len(runs)} runs",
        charts=draw_charts(runs, labels),
        ticks=ticks,
        varied=varied_settings(runs),
        caveat=caveat(runs),
        means=means,
        verdict_on_means=verdict,
        facts=dict.fromkeys(fact for run in described for fact in run["facts"]),
        runs=described,
    )


def varied_settings(runs: list[Run]) -> dict[str, list[str]]:
    """The settings in which `runs` differ, beside their names: by key, the value of each run."""
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(itertools.chain(*flat)) if key not in ("run_name", "run_dir")]
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
    return shlex.join(["python", "main.py", *recipe, *map(str, start["overrides"])])


# --- charts: curves over the steps of training, in the coordinates of their values ---


def draw_charts(runs: list[Run], labels: list[str]) -> list[dict[str, Any]]:
    """The `CHARTS` of one run, or of several over each other, without those that would be empty: curves with at least
    a point each, the line of the best held-out loss, and the last step shown, with a margin.
    """
    alone, charts = len(runs) == 1, []
    for key, title, unit, digits in CHARTS:
        curves = []
        for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
            if key != "loss":
                curves.append(Curve(label, points(run.train, key), hue(i)))
                continue
            name, train_hue = ("", TRAIN_HUE) if alone else (f"{label}, ", hue(i))
            curves.append(Curve(f"{name}training", points(run.train, key), train_hue, faint=True))
            curves.append(Curve(f"{name}held-out", points(run.val, key), hue(i)))
        if curves := [curve for curve in curves if curve.points]:
            chart = {"title": title, "unit": unit.format(unit=runs[0].unit), "digits": digits, "curves": curves}
            chart["best"] = runs[0].best if alone and key == "loss" else None
            chart["right"] = 1.015 * max(1, *(step for curve in curves for step, _ in curve.points))
            chart["limits"] = limits(curves, from_zero=key != "loss")
            charts.append(chart)
    return charts


def limits(curves: list[Curve], from_zero: bool) -> tuple[float, float]:
    """The lowest and the highest value shown. The highest points of a faint curve, where training began, may lie
    outside: they would flatten the rest.
    """
    values = [0.0] if from_zero else []
    for curve in curves:
        found = sorted(value for _, value in curve.points)
        values += found[: math.ceil(0.97 * len(found))] if curve.faint else found
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return min(low, max(0.0, low - margin)), high + margin


def points(lines: list[dict[str, Any]], key: str) -> Points:
    """The (step, value) of a key: at most `MAX_POINTS`, equally spaced, up to the last."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    spacing = max(1, -(-len(found) // MAX_POINTS))
    return found[::-spacing][::-1]


def hue(number: int) -> int:
    """The colour of a run, far from those before it."""
    return round(VAL_HUE + number * GOLDEN_ANGLE) % 360


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high`, at most six, and their labels: 12000 is 12k."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    size = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= 5)
    values = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    return [(v, f"{v / 1000:g}k" if v >= 10_000 else f"{v:g}") for v in values]
