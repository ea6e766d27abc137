"""On one GPU: CUDA_VISIBLE_DEVICES=0 python -m pytest tests/test_gpu.py"""

import itertools
import math
import random

import pytest
import torch

import main
from engine.errors import UserError
from engine.run.requests import Requests
from engine.signals import REQUESTS, Stopped
from engine.snapshots.storage import load
from main import configure, train
from model import MLP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SMALL = [
    "experiment=shakespeare_gpu",
    "model.ngram_rows=64",
    "data=pydoc",
    "trainer.max_epochs=null",
    "trainer.eval_every_steps=1000",
    "optimizer.schedule=constant",
    "model.resid_pdrop=0.1",
    "samples=false",
    "report=false",
]


def weights(run_dir, *overrides):
    train(configure(*SMALL, f"run_dir={run_dir}", *overrides))
    return load(f"{run_dir}/gpt_snapshot.pt").model_state


@pytest.mark.parametrize("graph", ["true", "false"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(graph, tmp_path, monkeypatch):
    exact = ["trainer.deterministic=true", f"trainer.cuda_graph={graph}", "trainer.max_steps=20"]
    whole = weights(tmp_path / "whole", *exact)
    checks = itertools.count()

    def check(requests):
        if next(checks) == 9:
            raise Stopped(REQUESTS.index("SIGTERM"))

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Requests, "check", check)
        weights(tmp_path / "parts", *exact)
    assert load(f"{tmp_path}/parts/gpt_snapshot.pt").step == 9
    parts = weights(tmp_path / "parts", *exact)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("accumulated", ["null", "4"])
def test_a_cuda_graph_trains_like_separate_launches(accumulated, tmp_path):
    steps = ["trainer.max_steps=30", f"trainer.micro_batch_size={accumulated}"]
    losses = [
        train(configure(*SMALL, f"run_dir={tmp_path}/{graph}", f"trainer.cuda_graph={graph}", *steps))
        for graph in ("true", "false")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_a_model_that_changes_from_step_to_step_is_refused(tmp_path, monkeypatch):
    forward, dice = MLP.forward, random.Random(0)
    monkeypatch.setattr(MLP, "forward", lambda self, x: forward(self, x) if dice.random() < 0.5 else 0 * x)
    with pytest.raises(UserError, match="changes from step to step"):
        weights(tmp_path, "trainer.max_steps=100")


def test_float16_trains_with_a_loss_scale(tmp_path):
    steps = ["trainer.amp_dtype=float16", "trainer.max_steps=10"]
    assert math.isfinite(train(configure(*SMALL, f"run_dir={tmp_path}", *steps)))
    assert load(f"{tmp_path}/gpt_snapshot.pt").scaler_state


def test_an_optimizer_that_counts_steps_on_the_cpu_resumes_under_a_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "create_optimizer", lambda model, _: torch.optim.AdamW(model.parameters()))
    weights(tmp_path, "trainer.max_steps=9")
    weights(tmp_path, "trainer.max_steps=20")
    snapshot = load(f"{tmp_path}/gpt_snapshot.pt")
    assert {float(state["step"]) for state in snapshot.optimizer_state.values()} == {20.0}
