"""The formulas of benchmarks/scaling.py are the model's, and docs/scaling.md shows their tables."""

import pytest
import torch
from conftest import ROOT

from benchmarks import scaling
from benchmarks.measure import flops_per_character
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
