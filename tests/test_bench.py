"""Benchmarks: the published page shows the measured figures."""

import json

from conftest import ROOT, start

from benchmarks import bench


def test_the_tables_in_the_docs_are_those_of_results_json():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {section} -->" in page for section in bench.SECTIONS)
    assert page == bench.page(page, results)


def test_a_measurement_runs_and_unknown_arguments_are_refused():
    run = start("growth", "width", "64", script="benchmarks/measure.py", env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["characters_per_s"] > 0 and figures["peak_bytes"] > 2**20
    for argument in ("sections=steps", "round=3", "rounds=0"):
        run = start(argument, script="benchmarks/bench.py")
        assert run.returncode == 1 and argument in run.stderr and "Traceback" not in run.stderr
