"""Benchmarks: the published page shows the measured figures."""

import itertools
import json
import types

from conftest import ROOT, start

from benchmarks import bench, measure


def test_the_page_is_made_from_the_published_figures():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {section} -->" in page for section in bench.SECTIONS)
    assert page == bench.page(page, results)


def test_only_the_newest_figures_of_each_kind_of_machine_are_shown():
    old = {"cpu": "A", "gpu": None, "kernels": ["bfloat16"], "date": "2026-01-01"}
    entries = [{"machine": old | {"date": "2026-01-02"}}, {"machine": old | {"cpu": "B"}}]
    entries.append({"machine": old | {"cpu": "C", "kernels": []}})
    assert bench.newest(entries) == [entries[0], entries[2]]


def test_the_clock_is_read_once_for_a_block_of_steps(monkeypatch):
    def peer(model, dataset, windows, steps, bfloat16, tick):
        for _ in range(steps):
            tick()

    reads = itertools.count()  # a second apart
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(reads)))
    monkeypatch.setattr(measure, "BLOCK", 5)
    monkeypatch.setattr(measure, "PEERS", {"peer": peer})
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "_transformers_gpt2", lambda *_: None)
    monkeypatch.setattr(measure, "_matmul_flops", lambda: 1.0)
    figures = measure.step("8L/8H/512, 32 x 128", "peer, float32")
    assert figures["characters_per_s"] == 5 * 32 * 128 and next(reads) == 8


def test_a_measurement_runs_and_unknown_arguments_are_refused():
    run = start(
        "growth", "width", "64", script="benchmarks/measure.py", env={"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["characters_per_s"] > 0 and figures["peak_bytes"] > 2**20
    for argument in ("sections=steps", "round=3", "rounds=0"):
        run = start(argument, script="benchmarks/bench.py")
        assert run.returncode == 1 and argument in run.stderr and "Traceback" not in run.stderr
