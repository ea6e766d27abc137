"""Benchmarks: the published pages show the measured figures and the tables of formulas, which are the model's."""

import json

import pytest
import torch
from conftest import ROOT

from benchmarks import bench, measure, scaling
from benchmarks.measure import flops_per_character
from engine.errors import UserError
from model import GPT, GPTConfig


def test_docs_have_the_tables_that_the_script_prints():
    assert scaling.tables() in (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("name", scaling.SIZES)
def test_parameter_and_operation_counts_equal_the_models(name):
    size, vocabulary = scaling.SIZES[name], scaling.VOCABULARY
    heads = size.width // 64
    shape = {"n_layer": size.layers, "n_head": heads, "n_embd": size.width}
    with torch.device("meta"):
        config = GPTConfig(arch="modern", vocab_size=vocabulary, block_size=size.context, **shape)
        model = GPT(config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    flops = flops_per_character(size.layers, size.width, size.context, vocabulary)
    assert flops == model.flops_per_character()
    number, unit = name.split()
    assert size.parameters == pytest.approx(float(number) * {"M": 1e6, "B": 1e9}[unit], rel=0.05)


@pytest.mark.parametrize("processes", [8, 64])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_communicates_as_the_formulas(processes, strategy, accumulation):
    size = scaling.Size(layers=3, width=192, context=8)
    kept, calls = scaling.simulated(processes, strategy, accumulation, size)
    found = [kept, *(sum(bytes for kind, bytes in calls if kind == k) for k in "gr")]
    assert found == list(scaling.formula(processes, strategy, accumulation, size))
    # Root and blocks are gathered forward, and again backward, where each is reduced once the next one is gathered.
    order = "".join(kind for kind, _ in calls)
    assert order == accumulation * "gggggggrgrrr" if strategy == "fsdp" else set(order) == {"r"}
    assert scaling.sent(size, 1) == 0


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
