"""Benchmarks: the published page shows the measured figures."""

import json

import pytest
from conftest import ROOT

from benchmarks import bench, measure
from engine.errors import UserError


def test_the_tables_in_the_docs_are_those_of_results_json():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {section} -->" in page for section in bench.SECTIONS)
    assert page == bench.page(page, results)


def test_a_measurement_runs_and_unknown_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(measure, "_matmul_flops", lambda: 1e12)
    figures = measure.growth("width", "64")
    assert figures["characters_per_s"] > 0 and figures["peak_bytes"] > 2**20
    for argument in ("sections=steps", "round=3", "rounds=0"):
        with pytest.raises(UserError, match=argument):
            bench.program([argument])
