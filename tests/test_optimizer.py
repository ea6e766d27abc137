"""The optimizer: weight decay, Muon's parameters, and Muon's steps."""

import pytest
import torch
from conftest import small_gpt

from char_dataset import CharDataset, DataConfig
from engine import optim
from engine.machine import hardware
from engine.optim import Muon, OptimizerConfig, create_optimizer
from trainer import Trainer, TrainerConfig


@pytest.mark.parametrize("bfloat16, tolerance", [(True, 2e-4), (False, 2e-3)])
def test_muon_takes_the_steps_of_torchs_muon(bfloat16, tolerance, monkeypatch):
    monkeypatch.setattr(hardware, "computes_in_bfloat16", lambda device: bfloat16)
    monkeypatch.setattr(optim, "normalize_rows", lambda x: x)
    torch.manual_seed(0)
    shapes = [(24, 8), (8, 24), (8, 8), (24, 8), (1, 8)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    a = Muon(ours, **settings)
    b = torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=tolerance)  # torch's is in bfloat16
        assert (p - 1).abs().max() > 0.01


@pytest.mark.parametrize("bfloat16, tolerance", [(True, 0.01), (False, 1e-5)])
def test_a_normalized_update_has_equal_row_norms_and_an_orthogonal_matrixs_norm(bfloat16, tolerance, monkeypatch):
    monkeypatch.setattr(hardware, "computes_in_bfloat16", lambda device: bfloat16)
    torch.manual_seed(0)
    for shape in ((24, 8), (8, 24), (8, 8), (1, 8)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape) * torch.logspace(-3, 0, shape[0])[:, None]
        Muon([p], lr=1.0).step()
        wide = shape[0] < shape[1]
        sizes = p.detach().norm(dim=0 if wide else 1)
        assert torch.allclose(sizes, sizes.mean().expand_as(sizes), rtol=tolerance)
        assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=tolerance)
        alike = torch.nn.Parameter(torch.zeros(shape))
        alike.grad = p.grad
        with monkeypatch.context() as patch:
            patch.setattr(optim, "normalize_rows", lambda x: x)
            Muon([alike], lr=1.0).step()
        cosine = torch.cosine_similarity(p, alike, dim=0 if wide else 1)
        assert torch.allclose(cosine, torch.ones(()), atol=tolerance)
        p.grad = torch.zeros(shape)
        before, muon = p.detach().clone(), Muon([p], lr=1.0)
        muon.step()  # nothing is made of nothing
        assert torch.equal(p, before)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("tied, embeddings", [(True, False), (False, False), (False, True)])
def test_every_parameter_is_in_exactly_one_group(name, tied, embeddings):
    model = small_gpt("gpt2", tie_weights=tied)
    optimizer = create_optimizer(model, OptimizerConfig(name=name, decay_embeddings=embeddings))
    members = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    for key, parameter in model.named_parameters():
        decays = embeddings or "emb" not in key or (tied and key == "tok_emb.weight")
        assert (id(parameter) in decayed) == (parameter.dim() == 2 and decays), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_group_has_the_configured_values(name):
    values = {"learning_rate": 0.007, "beta1": 0.81, "beta2": 0.83, "weight_decay": 0.03, "momentum": 0.77}
    model = small_gpt("modern", tie_weights=False, ngram_rows=5)
    groups = create_optimizer(model, OptimizerConfig(name=name, ngram_decay=0.7, **values)).param_groups
    assert all(group["lr"] == 0.007 for group in groups)
    if name == "muon":
        muon, *groups = groups
        assert (muon["momentum"], muon["weight_decay"]) == (0.77, 0.03)
    assert all(group["betas"] == (0.81, 0.83) for group in groups)
    assert {group["weight_decay"] for group in groups} == {0.03, 0.0, 0.7}
    [ngrams] = [group["params"] for group in groups if group["weight_decay"] == 0.7]
    assert ngrams == [model.ngrams.weight]


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    model = small_gpt("modern")
    model.blocks[0].edited = torch.nn.Conv1d(4, 2, 3)  # decays as matrices do, but is none
    optimizer = create_optimizer(model, OptimizerConfig(name="muon"))
    assert optimizer.param_groups[1]["params"][0] is model.blocks[0].edited.weight
    model(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))[1].backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        hidden = name.startswith("blocks.") and "edited" not in name
        assert ("momentum_buffer" in optimizer.state[parameter]) == hidden, name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_tutorials_line_loads_the_optimizer_state_of_a_snapshot(name, text_file, tmp_path):
    train, _ = CharDataset(DataConfig(path=str(text_file), block_size=8)).split()
    sizes = {"vocab_size": train.vocab_size, "block_size": 8}
    model = small_gpt("gpt2", 0.0, **sizes)
    trained = create_optimizer(model, OptimizerConfig(name=name))
    config = TrainerConfig(max_steps=2, batch_size=4, threads=1, trackers=[])
    Trainer(config, model, trained, train, run_dir=str(tmp_path)).train()
    snapshot = torch.load(tmp_path / "gpt_snapshot.pt", weights_only=True)
    loaded = create_optimizer(small_gpt("gpt2", 0.0, **sizes), OptimizerConfig(name=name))
    loaded.load_state_dict(snapshot["optimizer_state"])
    a, b = trained.state_dict()["state"], loaded.state_dict()["state"]
    assert a.keys() == b.keys() and a
    assert all(torch.equal(a[i][key], b[i][key]) for i in a for key in a[i])
    loaded.load_state_dict(trained.state_dict())
