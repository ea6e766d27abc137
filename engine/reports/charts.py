"""Charts: curves over the steps of training, in the coordinates of their values."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.reports.history import Run

# A chart for each of these keys of the training metrics: (key, title, unit of its values, digits under the pointer).
CHARTS = (
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


@dataclass
class Chart:
    """Curves with at least a point, and the line of the best held-out loss."""

    title: str
    unit: str
    digits: int
    curves: list[Curve]
    from_zero: bool = True
    best: dict[str, Any] | None = None

    def add(self, curve: Curve) -> None:
        if curve.points:
            self.curves.append(curve)

    @property
    def right(self) -> float:
        """The last step, and a margin."""
        return 1.015 * max(1, *(step for curve in self.curves for step, _ in curve.points))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value shown. The highest points of a faint curve, where training
        began, may lie outside: they would flatten the rest.
        """
        values = [0.0] if self.from_zero else []
        for curve in self.curves:
            found = sorted(value for _, value in curve.points)
            values += found[: math.ceil(0.97 * len(found))] if curve.faint else found
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return (0.0 if self.from_zero else min(low, max(0.0, low - margin))), high + margin


def draw_charts(runs: list[Run], labels: list[str]) -> list[Chart]:
    """The loss of one run, or of several over each other, and a chart for each of `CHARTS`."""
    alone, unit = len(runs) == 1, runs[0].unit
    best = runs[0].best if alone else None
    loss = Chart("Loss", f"nats per {unit}", 4, [], from_zero=False, best=best)
    others = {key: Chart(title, of.format(unit=unit), digits, []) for key, title, of, digits in CHARTS}
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        name = "" if alone else f"{label}, "
        train_hue = TRAIN_HUE if alone else hue(i)
        loss.add(Curve(f"{name}training", points(run.train, "loss"), train_hue, faint=True))
        loss.add(Curve(f"{name}held-out", points(run.val, "loss"), hue(i)))
        for key, chart in others.items():
            chart.add(Curve(label, points(run.train, key), hue(i)))
    return [chart for chart in (loss, *others.values()) if chart.curves]


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


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high`, at most six, and their labels: 12000 is 12k."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    size = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= 5)
    values = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    return [(v, f"{v / 1000:g}k" if v >= 10_000 else f"{v:g}") for v in values]
