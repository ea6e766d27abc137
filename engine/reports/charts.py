"""Charts: curves over the steps of training, scaled to a square for the page to draw."""

import math
from dataclasses import dataclass
from typing import Any

from engine.reports.history import Run
from engine.reports.reference import find_reference

# A chart for each of these keys of the training metrics: (key, title, unit, digits in the tip).
CHARTS = (
    ("lr", "Learning rate", "per step", 6),
    ("tokens_per_s", "Throughput", "characters per second", 0),
)
MAX_POINTS = 1000  # of one curve; more could not be seen
MAX_DOTS = 60  # a curve of fewer points shows each of them
TRAIN_HUE, VAL_HUE, GOLDEN_ANGLE = 28, 215, 137.5  # degrees of the colour circle

Points = list[tuple[float, float]]  # (step, value)
Band = tuple[list[tuple[float, float, float]], str]  # (step, low, high), label


@dataclass
class Series:
    """A curve; a faint one stands behind the others."""

    name: str
    points: Points
    hue: float
    faint: bool = False


@dataclass
class Chart:
    """Curves, and perhaps a band (rows of step, low, high; label) and a mark (step, label)."""

    title: str
    unit: str
    series: list[Series]
    digits: int
    from_zero: bool = True
    band: Band | None = None
    mark: tuple[float, str] | None = None

    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value shown.

        The highest points of a faint curve, where training began, may lie outside: they would
        flatten the rest.
        """
        values = [v for s in self.series if not s.faint for _, v in s.points]
        faint = sorted(v for s in self.series if s.faint for _, v in s.points)
        values += faint[: len(faint) - len(faint) * 3 // 100]
        low, high = 0.0 if self.from_zero else min(values), max(values)
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        return (0.0 if self.from_zero else max(0.0, low - margin)), high + margin

    def scaled(self) -> dict[str, Any]:
        """What the page draws: paths in a square of 1000 x 1000, ticks in per cent, and the values
        for the tip under the pointer.
        """
        right = 1.015 * max(step for series in self.series for step, _ in series.points)
        low, high = self.limits()

        def place(points: Points) -> list[str]:
            return [
                f"{1000 * x / right:.1f} {1000 * (high - y) / (high - low):.1f}" for x, y in points
            ]

        def lines(points: Points) -> str:
            return "M" + "L".join(place(points))

        def dots(series: Series) -> str:
            few = len(series.points) == 1 or (not series.faint and len(series.points) < MAX_DOTS)
            return "".join(f"M{point}h0" for point in place(series.points)) if few else ""

        band = [row for row in (self.band[0] if self.band else ()) if row[0] <= right]
        outline = [(step, top) for step, _, top in band] + [
            (s, bottom) for s, bottom, _ in band[::-1]
        ]
        return {
            "chart": self,
            "curves": [(series, lines(series.points), dots(series)) for series in self.series],
            "band": lines(outline) + "Z" if band else "",
            "mark": 1000 * self.mark[0] / right if self.mark else None,
            "x_ticks": [(100 * x / right, short(x)) for x in ticks(0, right)],
            "y_ticks": [(100 * (high - y) / (high - low), short(y)) for y in ticks(low, high)],
            "data": {
                "right": right,
                "digits": self.digits,
                "series": [{"name": s.name, "hue": s.hue, "points": s.points} for s in self.series],
            },
        }


def charts(runs: list[Run], labels: list[str], references: dict[str, Any]) -> list[Chart]:
    """The loss of one run, or of several over each other, and a chart for each of `CHARTS`."""
    parts = [loss_chart(runs, labels, references)]
    for key, title, unit, digits in CHARTS:
        curves = [(label, points(run.train, key)) for run, label in zip(runs, labels, strict=True)]
        series = [Series(label, found, hue(i)) for i, (label, found) in enumerate(curves) if found]
        parts.append(Chart(title, unit, series, digits))
    return [part for part in parts if part.series]


def loss_chart(runs: list[Run], labels: list[str], references: dict[str, Any]) -> Chart:
    """Training and held-out losses, the reference band and, of a single run, its best step."""
    alone, series = len(runs) == 1, []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        name = "" if alone else f"{label}, "
        train, val = points(run.train, "loss"), points(run.val, "loss")
        if train and (alone or len(train) > 1):  # a single dot would look like a held-out one
            series.append(
                Series(f"{name}training", train, TRAIN_HUE if alone else hue(i), faint=True)
            )
        if val:
            series.append(Series(f"{name}held-out", val, hue(i)))
    best = runs[0].best if alone else None
    mark = (best["step"], f"best: {best['loss']:.4f} at step {best['step']}") if best else None
    band = reference_band(runs, references)
    return Chart("Loss", "nats per character", series, 4, from_zero=False, band=band, mark=mark)


def reference_band(runs: list[Run], references: dict[str, Any]) -> Band | None:
    """The band of the recipe's held-out loss, if all `runs` can be compared with it; of its
    training loss if the recipe is evaluated only once.
    """
    first, *others = [find_reference(run, references)[0] for run in runs]
    if first is None or any(other is not first for other in others):
        return None
    split, name = ("val", "held-out") if len(first["val"]) > 1 else ("train", "training")
    rows = [(step, mean - width, mean + width) for step, mean, width in first[split]]
    return rows, f"{name} loss of 99 % of the recipe's runs"


def points(lines: list[dict[str, Any]], key: str) -> Points:
    """The (step, value) of a key, thinned to `MAX_POINTS` means of neighbours."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    size = -(-len(found) // MAX_POINTS)
    if size <= 1:
        return found
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def hue(number: int) -> int:
    """The colour of a run, far from those before it."""
    return round(VAL_HUE + number * GOLDEN_ANGLE) % 360


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most six."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    size = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= 5)
    return [i * size for i in range(int(-(-low // size)), int(high // size) + 1)]


def short(value: float) -> str:
    """12000 as 12k."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,g}"
