"""Benchmarks: compares this trainer with others on this machine; see README.md.

    python benchmarks/bench.py                              every section, three rounds
    python benchmarks/bench.py sections=step,start rounds=5
    python benchmarks/bench.py nanogpt=DIRECTORY            a checkout of nanoGPT beside `loss`
    python benchmarks/bench.py report                       the tables again, nothing measured

The figures go into benchmarks/results.json, and from there into the tables of docs/benchmarks.md.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the application

from benchmarks.measure import GENERATORS, PEERS, SIZES
from engine.config.arguments import parse, run_program
from engine.errors import UserError
from engine.kernels import build
from engine.machine import hardware

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"

# In bfloat16 where the hardware computes in it, else in float32; Transformers' default is float32.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = "bfloat16" if hardware.computes_in_bfloat16(DEVICE) else "float32"
TRAINERS = ["this", *(f"{peer}, {PRECISION}" for peer in PEERS), "Transformers Trainer, float32"]
RECIPES = ["shakespeare_cpu", "shakespeare_half", "shakespeare_quick", "shakespeare_lowest", "nanogpt_cpu"]
GROWTH = {
    "width": (64, 128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "context": (32, 64, 128, 256, 512, 1024),
    "vocabulary": (65, 1000, 5000, 20000),
}
# The arguments of each measurement, of the function in measure.py that is named as its section.
SECTIONS: dict[str, list[tuple[str, ...]]] = {
    "step": [(size, trainer) for size in SIZES for trainer in dict.fromkeys(TRAINERS)],
    "loss": [(recipe,) for recipe in RECIPES],
    "generate": [(size, package) for size in GENERATORS for package in ("this", "Transformers")],
    "start": [("warm",), ("cold",)],
    "growth": [(what, str(value)) for what, values in GROWTH.items() for value in values],
    "processes": [(count, windows) for windows in ("16", "64") for count in ("1", "2")],
}


def run_section(section: str, rounds: int, nanogpt: str | None) -> dict[str, list[dict]]:
    """The figures of each round, by the arguments of the measurement.

    A round makes every measurement once, so that a machine that slows down slows all of them.
    """
    tasks = [(section, *arguments) for arguments in SECTIONS[section]]
    if section == "loss" and nanogpt:
        tasks.append(("nanogpt", nanogpt))
    results: dict[str, list[dict]] = {}
    for number in range(1, rounds + 1):
        for name, *arguments in tasks:
            key = "nanogpt" if name == "nanogpt" else ", ".join(arguments)
            seed = [str(number)] if name == "loss" else []
            command = [sys.executable, "-m", "benchmarks.measure", name, *arguments, *seed]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
            if "ModuleNotFoundError" in run.stderr:
                print(f"{key}: left out: {run.stderr.splitlines()[-1]}", flush=True)
                continue
            if run.returncode:
                raise UserError(f"{section} {key}: {run.stderr.strip()[-2000:]}")
            figures = json.loads(run.stdout.splitlines()[-1])
            results.setdefault(key, []).append(figures)
            print(section, key, json.dumps(figures), flush=True)
    return results


def machine() -> dict:
    """The hardware, versions and date of what is measured now."""
    packages = ("torch", "transformers", "accelerate", "lightning")
    name, cores = hardware.device_name(torch.device("cpu")), len(os.sched_getaffinity(0))
    # Of AMD's, 25 is Zen 4 where there is bfloat16, and 26 is Zen 5; both are called EPYC.
    family = re.findall(r"^cpu family\s*: (\d+)$", hardware.cpuinfo(), re.MULTILINE)
    types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return {
        "cpu": ", ".join([name, *(f"family {number}" for number in family[:1]), f"{cores} cores"]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": [name for name, dtype in types.items() if build.library(dtype) is not None],
        "versions": {p: metadata.version(p) for p in packages if util.find_spec(p)},
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


# --------------------------------------------------------------------------------------------------
# Tables: each function returns the head and the rows of one section on one machine

RATE = "characters_per_s"


def column(rounds: list[dict], name: str) -> list[float]:
    return [figures[name] for figures in rounds]


def ratios(ours: list[dict], others: list[dict]) -> list[float]:
    """Our rate over theirs, round by round."""
    return [a / b for a, b in zip(column(ours, RATE), column(others, RATE), strict=True)]


def spread(values: list[float], form: str = "{:,.0f}") -> str:
    """Median (lowest to highest)."""
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def step_table(figures: dict) -> list[list[str]]:
    sizes = {size: figures[f"{size}, this"] for size in SIZES}
    others = [key.split(", ", 2)[2] for key in figures if key.startswith(next(iter(sizes)))][1:]
    rows = [["size", "this", *others, "share of torch.mm's rate"]]
    for size, ours in sizes.items():
        row = [size, spread(column(ours, RATE))]
        for other in others:
            theirs = figures[f"{size}, {other}"]
            times = spread(ratios(ours, theirs), "{:.2f}")
            row.append(f"{statistics.median(column(theirs, RATE)):,.0f}; {times}")
        rows.append([*row, spread(column(ours, "share_of_matmul"), "{:.0%}")])
    return rows


def loss_table(figures: dict) -> list[list[str]]:
    rows = [["recipe", "held-out loss", "seconds", "window", "trained on"]]
    for recipe, rounds in figures.items():
        name = "nanoGPT itself, its own estimate" if recipe == "nanogpt" else f"`{recipe}`"
        trained = re.findall(r"[\d,]+ (?:steps|characters)", rounds[0]["plan"])
        losses, seconds = column(rounds, "loss"), column(rounds, "seconds")
        row = [name, spread(losses, "{:.4f}"), spread(seconds, "{:.1f}")]
        rows.append([*row, str(rounds[0]["window"]), " = ".join(trained)])
    return rows


def generate_table(figures: dict) -> list[list[str]]:
    head = ["model", "package", "without cache", "with", "with / without", "64 at once", "share of memory bandwidth"]
    rows = [head]
    for key, rounds in figures.items():
        one, cached, many = (column(rounds, name) for name in ("uncached", "cached", "cached_64"))
        gain = statistics.median(b / a for a, b in zip(one, cached, strict=True))
        share = spread(column(rounds, "cached_64_memory"), "{:.0%}")
        rows.append([*key.split(", "), spread(one), spread(cached), f"{gain:.1f}", spread(many), share])
    return rows


def start_table(figures: dict) -> list[list[str]]:
    row = [spread(column(figures["warm"], "import_s"), "{:.1f}")]
    row += [spread(column(figures[name], "first_step_s"), "{:.1f}") for name in ("warm", "cold")]
    return [["`import main`", "first step", "first step, including compiling the kernels"], row]


def growth_table(figures: dict) -> list[list[str]]:
    rows = [["", "characters a second", "share of torch.mm's rate", "peak memory, MiB"]]
    for what in GROWTH:
        of_what = {key: rounds for key, rounds in figures.items() if key.startswith(f"{what},")}
        sizes = [f"{int(key.split(', ')[1]):,}" for key in of_what]
        rates = [statistics.median(column(v, RATE)) for v in of_what.values()]
        shares = [statistics.median(column(v, "share_of_matmul")) for v in of_what.values()]
        peaks = [max(column(v, "peak_bytes")) / 2**20 for v in of_what.values()]
        cells = [sizes, [f"{x:,.0f}" for x in rates], [f"{x:.0%}" for x in shares]]
        cells.append([f"{x:,.0f}" for x in peaks])
        first, *others = (" / ".join(cell) for cell in cells)
        rows.append([f"{what} {first}", *others])
    return rows


def processes_table(figures: dict) -> list[list[str]]:
    rows = [["windows a step and process", "one process", "two", "gain"]]
    for windows in dict.fromkeys(key.split(", ")[1] for key in figures):
        one, two = figures[f"1, {windows}"], figures[f"2, {windows}"]
        gain = spread(ratios(two, one), "{:.2f}")
        rows.append([windows, spread(column(one, RATE)), spread(column(two, RATE)), gain])
    return rows


TABLES = {
    "step": step_table,
    "loss": loss_table,
    "generate": generate_table,
    "start": start_table,
    "growth": growth_table,
    "processes": processes_table,
}


def page(text: str, results: dict) -> str:
    """docs/benchmarks.md, the `text`, with what lies between `<!-- SECTION -->` and `<!-- end -->`
    made anew from {section: [{machine, figures}, ...]}.
    """

    def tables(found: re.Match) -> str:
        out = [found[1]]
        for measured in results.get(found[2], []):
            m = measured["machine"]
            with_peers = found[2] in ("step", "generate")
            versions = [f"{k} {v}" for k, v in m["versions"].items() if with_peers or k == "torch"]
            cpu = m["cpu"] + ", no bfloat16" * ("bfloat16" not in m["kernels"])
            rounds = len(next(iter(measured["figures"].values())))
            caption = f"{m['gpu'] or cpu}, {m['date']}, {rounds} rounds; {', '.join(versions)}."
            rows = TABLES[found[2]](measured["figures"])
            rows.insert(1, ["---"] * len(rows[0]))
            out += ["", f"{caption} {measured.get('note', '')}".rstrip(), ""]
            out += [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*out, "", found[3]])

    return re.sub(r"(<!-- (\w+) -->).*?(<!-- end -->)", tables, text, flags=re.DOTALL)


@dataclass
class Arguments:
    """The arguments of `python benchmarks/bench.py`."""

    sections: str = ",".join(SECTIONS)
    rounds: int = 3
    nanogpt: str | None = None


def program(arguments: list[str]) -> None:
    only_report = arguments == ["report"]
    settings = parse(Arguments, [] if only_report else arguments)
    sections = settings.sections.split(",")
    for section in sections:
        if section not in SECTIONS:
            raise UserError(f"sections={section}: must be among {', '.join(SECTIONS)}")
    if settings.rounds < 1:
        raise UserError(f"rounds={settings.rounds}: must be at least 1")
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    here = machine()
    for section in [] if only_report else sections:
        figures = run_section(section, settings.rounds, settings.nanogpt)
        earlier = [  # what this machine measured before is replaced
            entry
            for entry in results.get(section, [])
            if any(entry["machine"][key] != here[key] for key in ("cpu", "gpu", "kernels"))
        ]
        results[section] = [*earlier, {"machine": here, "figures": figures}]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))
    print(f"written: {RESULTS.name} and {PAGE}")


if __name__ == "__main__":
    run_program(program)
