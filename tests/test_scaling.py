"""The formulas of docs/scaling.py, and that docs/scaling.md shows what they give."""

import importlib.util

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
scaling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaling)


def test_the_page_shows_the_tables_that_the_script_prints():
    assert scaling.tables() in (ROOT / "docs" / "scaling.md").read_text()


def test_the_sizes_are_what_they_are_called():
    for size in scaling.SIZES:
        number, unit = size.split()
        parameters = sum(p.numel() for p in scaling.gpt(size).parameters())
        stated = float(number) * {"M": 1e6, "B": 1e9}[unit]
        assert parameters == pytest.approx(stated, rel=0.05)


def test_memory_falls_with_processes_under_fsdp_alone_and_nothing_is_sent_by_one():
    model = scaling.gpt("85 M")
    memory = {
        strategy: [scaling.cost(model, n, strategy).memory for n in (1, 8, 64)]
        for strategy in ("ddp", "fsdp")
    }
    assert memory["fsdp"] == sorted(memory["fsdp"], reverse=True)
    assert len(set(memory["ddp"])) == 1
    for strategy in memory:
        assert scaling.cost(model, 1, strategy).sent == 0
        assert scaling.cost(model, 1, strategy).efficiency == (1, 1)
    less = scaling.cost(model, 8, "fsdp", checkpointing=True)
    assert (
        less.memory < memory["fsdp"][1] and less.compute_s > scaling.cost(model, 8, "ddp").compute_s
    )
