"""The benchmarks: what they publish is what was measured."""

import json

from conftest import ROOT, start

from benchmarks import bench


def test_the_published_page_is_made_from_the_published_figures():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    assert (ROOT / "docs" / "benchmarks.md").read_text() == bench.report(results)


def test_a_measurement_is_made_and_one_that_does_not_exist_is_refused():
    run = start("measure", "growth", "width", "64", script="benchmarks/bench.py")
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["characters_per_s"] > 0 and figures["peak_bytes"] > 2**20
    for argument in ("sections=steps", "round=3", "rounds=0"):
        run = start(argument, script="benchmarks/bench.py")
        assert run.returncode == 1 and argument in run.stderr and "Traceback" not in run.stderr
    run = start("--help", script="benchmarks/bench.py")
    assert run.returncode == 0 and "sections=" in run.stdout
