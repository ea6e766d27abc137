"""The report of a run: one page, `report.html`, that opens from the disk and needs no network.

    python report.py                                   the newest run, into its own directory
    python report.py run_dir=runs/NAME                 another run; any time, also while it trains
    python report.py run_dirs=[runs/a,runs/b]          several runs, laid over each other
    python report.py run_dirs=runs/NAME.sweep          those of a sweep
    python report.py check run_dir=runs/NAME           is it on track? says so; status 1 if not
    python report.py reference run_dirs=[a,b,c]        a recipe's reference, from runs with 3 seeds

Also `out=FILE` for the page, and `reference=FILE` for another card than docs/reference.json. Beside
the page, `report.png` has its curves where matplotlib is installed.
"""

import glob
import json
import math
import os
import re
import shlex
from dataclasses import dataclass
from typing import Any

import jinja2
import yaml

from engine.config.arguments import parse, run_program
from engine.config.settings import OWN, flatten
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.parallel.launch import quoted, without
from engine.reports.history import Run, median_rate
from engine.reports.reference import (
    CARD,
    check,
    curve,
    load_card,
    not_comparable,
    save_card,
    tolerance,
    verdict,
)
from engine.run.directory import REPORT, is_run, newest_run
from engine.run.progress import duration

TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
MOST_POINTS = 1000  # of one curve; more would not be seen
LONGEST_LABEL = 48  # characters; more would leave no room for the curves
TRAIN_HUE, VAL_HUE = 28, 215
GOLDEN_ANGLE = 137.5  # degrees


# --------------------------------------------------------------------------------------------------
# Charts, as numbers from 0 to 1000 for the page to draw


@dataclass
class Series:
    """A curve: `points` are (step, value), `hue` an angle of the colour circle; a faint one stands
    behind, one with `dots` has few points.
    """

    name: str
    points: list[tuple[float, float]]
    hue: float
    faint: bool = False
    dots: bool = False


@dataclass
class Chart:
    """Curves over the steps of training, and perhaps a band (step, low, high) of where they should
    be, and a mark (step, words).
    """

    title: str
    unit: str
    series: list[Series]
    digits: int
    from_zero: bool = False
    band: list[tuple[float, float, float]] | None = None
    band_name: str = ""
    mark: tuple[float, str] | None = None


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points: the means of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, six of them or fewer."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    size = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= 5)
    return [i * size for i in range(int(-(-low // size)), int(high // size) + 1)]


def geometry(chart: Chart) -> dict[str, Any]:
    """What the page draws of a chart: paths in a square of 1000 x 1000, ticks in per cent."""
    xs = [x for series in chart.series for x, _ in series.points]
    low_x, high_x = (0.0, max(xs) * 1.015)
    low, high = limits(chart)

    def x(value: float) -> float:
        return 1000 * (value - low_x) / (high_x - low_x)

    def y(value: float) -> float:
        return 1000 * (high - value) / (high - low)

    def path(points: list[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)

    band = [row for row in chart.band or [] if row[0] <= high_x]
    around = [*((s, top) for s, _, top in band), *((s, bottom) for s, bottom, _ in band[::-1])]
    return {
        "chart": chart,
        "lines": [(series, path(series.points)) for series in chart.series],
        "dots": [
            (series, "".join(f"M{x(a):.1f} {y(b):.1f}h0" for a, b in series.points))
            for series in chart.series
            if series.dots or len(series.points) == 1
        ],
        "band": path(around) + "Z" if around else "",
        "mark": x(chart.mark[0]) if chart.mark else None,
        "x_ticks": [(x(value) / 10, short(value)) for value in ticks(low_x, high_x)],
        "y_ticks": [(y(value) / 10, short(value)) for value in ticks(low, high)],
        "data": {
            "high": high_x,
            "digits": chart.digits,
            "series": [{"name": s.name, "hue": s.hue, "points": s.points} for s in chart.series],
        },
    }


def limits(chart: Chart) -> tuple[float, float]:
    """The lowest and highest value that a chart shows, with a little room.

    The few highest points of a faint curve, where training began, may lie outside: they would press
    flat what matters.
    """
    values = [v for s in chart.series if not s.faint for _, v in s.points]
    faint = sorted(v for s in chart.series if s.faint for _, v in s.points)
    values += faint[: len(faint) - len(faint) * 3 // 100]
    low, high = 0.0 if chart.from_zero else min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if chart.from_zero else max(0.0, low - room)), high + room


def short(value: float) -> str:
    """12000 as 12k."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,g}"


def charts(runs: list[Run], labels: list[str], card: dict[str, Any]) -> list[Chart]:
    """Losses, learning rate and throughput of one run, or of several over each other."""
    loss, rate, speed = (list[Series]() for _ in range(3))
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        alone = len(runs) == 1
        hue = hue_of(i)
        for split, faint, what in (("train", True, "training"), ("val", False, "held out")):
            points = thin([(line["step"], line["loss"]) for line in getattr(run, split)])
            name = what if alone else f"{label}, {what}"
            if points and (alone or not faint or len(points) > 1):  # or it looks like held out
                own = TRAIN_HUE if alone and faint else hue
                loss.append(Series(name, points, own, faint, dots=not faint and len(points) < 60))
        for series, key in ((rate, "lr"), (speed, "tokens_per_s")):
            known = [line for line in run.train if line.get(key) is not None]
            points = thin([(line["step"], line[key]) for line in known])
            if points:
                series.append(Series(label, points, hue))
    best = runs[0].best if len(runs) == 1 else None
    band, band_name = reference_band(runs, card)
    result = [
        Chart(
            "Loss",
            "nats per character",
            loss,
            digits=4,
            band=band,
            band_name=band_name,
            mark=(best["step"], f"best: {best['loss']:.4f} at step {best['step']}")
            if best
            else None,
        ),
        Chart("Learning rate", "per step", rate, digits=6, from_zero=True),
        Chart("Throughput", "characters a second", speed, digits=0, from_zero=True),
    ]
    return [chart for chart in result if chart.series]


def hue_of(number: int) -> int:
    """The hue of the run with this number, each far from those of the runs before."""
    return round(VAL_HUE + number * GOLDEN_ANGLE) % 360


def reference_band(
    runs: list[Run], card: dict[str, Any]
) -> tuple[list[tuple[float, float, float]] | None, str]:
    """Where the held-out loss of the recipe lies, if all `runs` are of one that has a reference,
    and what to call that; of a recipe that is evaluated once, where its training loss lies.
    """
    reference = card.get(runs[0].recipe or "")
    if reference is None or len({run.recipe for run in runs}) > 1:
        return None, ""
    if any(changes(run)[1] or not_comparable(run, reference) for run in runs):
        return None, ""
    split = "val" if len(reference["val"]) > 1 else "train"
    allowed = tolerance(reference, split)
    rows = [
        (step, mean - allowed[step], mean + allowed[step]) for step, mean, _ in reference[split]
    ]
    name = {"val": "held-out", "train": "training"}[split]
    return rows, f"{name} loss of 99 % of the recipe's runs"


def draw_png(parts: list[Chart], path: str) -> bool:
    """The charts as a picture, where matplotlib is installed; returns whether it is."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from colorsys import hls_to_rgb

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(8, 3 + 2.5 * len(parts)), sharex=True, squeeze=False,
        height_ratios=[2] + [1] * (len(parts) - 1), layout="constrained",
    )  # fmt: skip
    for part, axis in zip(parts, axes[:, 0], strict=True):
        for series in part.series:
            colour = hls_to_rgb(series.hue / 360, 0.42, 0.7)
            style = {"linewidth": 0.8, "alpha": 0.6} if series.faint else {"linewidth": 1.8}
            marker = "o" if series.dots or len(series.points) == 1 else None
            x, y = zip(*series.points, strict=True)
            axis.plot(x, y, color=colour, label=series.name, marker=marker, markersize=4, **style)
        if part.band:
            steps, low, high = zip(*part.band, strict=True)
            axis.fill_between(steps, low, high, color="grey", alpha=0.25, label=part.band_name)
        if part.mark:
            axis.axvline(part.mark[0], color="grey", linestyle=":", label=part.mark[1])
        axis.set_ylim(*limits(part))
        axis.set_ylabel(f"{part.title}, {part.unit}", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


# --------------------------------------------------------------------------------------------------
# The page


def name_runs(runs: list[Run]) -> list[str]:
    """A short name for each of several runs: the settings in which they differ, or where these are
    many, their directories.
    """
    names = [
        ", ".join(f"{k.split('.')[-1]}={v}" for k, v in row.items()) for row in differing(runs)
    ]
    if len(set(names)) < len(runs) or max(map(len, names)) > LONGEST_LABEL:
        names = [os.path.basename(os.path.normpath(run.path)) for run in runs]
    return names if len(set(names)) == len(runs) else [run.path for run in runs]


def differing(runs: list[Run]) -> list[dict[str, Any]]:
    """For each run, the settings whose values are not the same in all, but for their names."""
    configs = [flatten(run.config) for run in runs]
    keys = sorted(set().union(*configs) - {*OWN, "trainer.snapshot_path"})
    keys = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    return [{key: config.get(key) for key in keys} for config in configs]


def commands(run: Run) -> list[tuple[str, str]]:
    """(what it is for, the command) to do a run again, to go on with it, and to read from it."""
    start = run.starts[-1]
    overrides = start["overrides"]
    if overrides is None:
        overrides = [f"experiment={run.recipe}"] if run.recipe else []
        overrides += [override(key, now) for key, (_, now) in changes(run)[0].items()]
    own = ("run_name=", "run_dir=", "launch.", "trainer.resume=")
    words = without(overrides, *own)
    if not any(word.startswith("experiment=") for word in words):
        words.insert(0, "experiment=null")
    launcher = ["python"]
    each, left = divmod(start["processes"], start["hosts"])
    if start["hosts"] > 1:
        count = "N" if left else each  # not the same on all hosts
        launcher = ["torchrun", f"--nnodes={start['hosts']}", f"--nproc_per_node={count}"]
        launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29400"]
    elif start["processes"] > 1:
        words.append(f"launch.nproc_per_node={start['processes']}")
    go_on, what = words, "Go on from where it stopped"
    if run.total_steps == run.step:
        go_on = [w for w in words if not w.lstrip("+").startswith("trainer.max_")]
        go_on += ["trainer.max_epochs=null", f"trainer.max_steps={2 * run.step}"]
        what = "Train on, twice as long"
    lines = [
        ("Once more, in another directory", [*launcher, "main.py", *words, "run_name=again"]),
        (what, [*launcher, "main.py", *go_on, override("run_dir", run.path)]),
        ("Read what it has learned", ["python", "sample.py", f"run_dir={run.path}"]),
    ]
    return [(what, shlex.join(line)) for what, line in lines]


def override(key: str, value: Any) -> str:
    """An override of Hydra's that sets `key` to `value`."""
    if not isinstance(value, str):
        value = json.dumps(value)
    elif not re.fullmatch(r"[\w./:-]+", value):
        value = quoted(value)
    return f"{key}={value}"


def changes(run: Run) -> tuple[dict[str, tuple[Any, Any]], str | None]:
    """A run's differences from its recipe, or why there are none to be told."""
    try:
        return run.changes, None
    except UserError as error:  # a recipe that is no longer there
        return {}, str(error)


def describe(run: Run, card: dict[str, Any]) -> dict[str, Any]:
    """What the page says of one run."""
    changed, unknown = changes(run)
    on_track, words = check(run, card) if unknown is None else (None, [unknown])
    rate = median_rate(run.train)
    held_out = {line["step"]: line["loss"] for line in run.val}
    facts = {
        "best held-out loss": f"{run.best['loss']:.4f}" if run.best else "",
        "at step": f"{run.best['step']:,}" if run.best else "",
        "last held-out loss": f"{run.val[-1]['loss']:.4f}" if run.val else "",
        "steps": f"{run.step:,} of {run.total_steps:,}",
        "wall time": duration(run.seconds),
        "characters/s": f"{rate:,.0f}" if rate else "",
    }
    return {
        "run": run,
        "on_track": on_track,
        "verdict": verdict(run, on_track),
        "words": words,
        "changed": changed,
        "facts": facts,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "samples": [
            {"step": line["step"], "loss": line["loss"], "held_out": held_out.get(line["step"]),
             "texts": line["samples"]}
            for line in run.train
            if line.get("samples")
        ],
        "commands": commands(run),
    }  # fmt: skip


def page(runs: list[Run], card: dict[str, Any]) -> tuple[str, list[Chart]]:
    """The page, the run with the lowest held-out loss first, and its charts."""
    runs = sorted(runs, key=lambda run: run.best["loss"] if run.best else math.inf)
    names = name_runs(runs) if len(runs) > 1 else [runs[0].config.get("run_name", "")]
    parts = charts(runs, names, card)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("report.html.jinja").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        charts=[geometry(part) for part in parts],
        runs=[
            describe(run, card) | {"label": name, "hue": hue_of(i)}
            for i, (run, name) in enumerate(zip(runs, names, strict=True))
        ],
        apart=differing(runs),
        reference=card.get(runs[0].recipe or "") if parts and parts[0].band else None,
    )
    return html, parts


def write(run_dirs: list[str], out: str, reference: str = CARD, png: bool = False) -> str:
    """Writes the page of the runs in `run_dirs` to `out`, whole or not at all, and with `png` a
    picture beside it, where matplotlib is installed; returns what it has written, in words.

    Raises `UserError` for a directory that is not a run's, and where `out` cannot be written.
    """
    html, parts = page([Run.read(path) for path in run_dirs], load_card(reference))
    picture = f"{os.path.splitext(out)[0]}.png"
    try:
        with atomic_write(out) as file:
            file.write(html)
        drawn = png and parts and draw_png(parts, picture)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}") from error
    if not png or not parts:
        return out
    if drawn:
        return f"{out} and {picture}"
    return f"{out} (and a .png, too, after pip install matplotlib)"


# --------------------------------------------------------------------------------------------------
# The command line


@dataclass
class CheckConfig:
    """The arguments of `check`, `name=value`."""

    run_dir: str | None = None  # without: the newest under runs/
    reference: str = CARD  # the card


@dataclass
class ReportConfig(CheckConfig):
    """The arguments of `report`."""

    run_dirs: str | None = None  # several: a list or a pattern
    out: str | None = None  # the page; without: report.html in the run's directory


@dataclass
class ReferenceConfig:
    """The arguments of `reference`."""

    run_dirs: str | None = None  # a list or a pattern; without: the newest under runs/
    reference: str = CARD  # the card to write


COMMANDS = {"report": ReportConfig, "check": CheckConfig, "reference": ReferenceConfig}


def find_runs(run_dir: str | None, run_dirs: str | None) -> list[str]:
    """The directories that `run_dir` or `run_dirs` name, or the newest run's; patterns are followed
    to the runs among what they match.
    """
    if run_dir is not None and run_dirs is not None:
        raise UserError("run_dir and run_dirs: give one of them")
    if run_dirs is None:
        return [run_dir or newest_run()]
    given: Any = [run_dirs]
    if run_dirs.startswith("["):
        try:
            given = yaml.load(run_dirs, yaml.BaseLoader)  # in which every name is a text
        except yaml.YAMLError as error:
            raise UserError(f"run_dirs={run_dirs}: not a list such as [runs/a,runs/b]") from error
    if not given:
        raise UserError(f"run_dirs={run_dirs}: names no run")
    found = []
    for name in given:
        matches = [str(name)] if os.path.isdir(str(name)) else sorted(glob.glob(str(name)))
        runs = [path for path in matches if is_run(path)]
        if not runs:  # the directory of a sweep
            inside = (path for match in matches for path in sorted(glob.glob(f"{match}/*")))
            runs = [path for path in inside if is_run(path)]
        if not runs:
            raise UserError(
                f"run_dirs={run_dirs}: {name} is not the directory of a run, and matches none "
                "that has logged something; several are [runs/a,runs/b]"
            )
        found += runs
    return list(dict.fromkeys(found))


def main(arguments: list[str]) -> int:
    """Does what the command line says; returns the exit status."""
    command = arguments[0] if arguments and "=" not in arguments[0] else "report"
    if command not in COMMANDS and os.path.isdir(command):
        command = "report"  # of which it is no argument: says what would be one
    if command not in COMMANDS:
        raise UserError(f"{command}: not a command; there are {', '.join(COMMANDS)}")
    config: Any = parse(COMMANDS[command], arguments[arguments[:1] == [command] :])
    run_dirs = find_runs(*(vars(config).get(name) for name in ("run_dir", "run_dirs")))
    if command == "check":
        run = Run.read(run_dirs[0])
        on_track, words = check(run, load_card(config.reference))
        what = f"{run_dirs[0]}, step {run.step} of {run.total_steps}"
        print(f"{what}: {verdict(run, on_track)}")
        print("\n".join(f"- {sentence}" for sentence in words))
        return 0 if on_track else 1
    if command == "reference":
        name, reference = curve([Run.read(path) for path in run_dirs])
        save_card({**load_card(config.reference), name: reference}, config.reference)
        print(f"{name}: {config.reference} has its reference now")
        return 0
    folder = run_dirs[0]
    if len(run_dirs) > 1:
        folder = os.path.commonpath([os.path.abspath(path) for path in run_dirs])
    print(write(run_dirs, config.out or os.path.join(folder, REPORT), config.reference, png=True))
    return 0


if __name__ == "__main__":
    run_program(main)
