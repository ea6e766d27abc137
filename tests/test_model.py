import dataclasses

import numpy as np
import pytest
import torch
from conftest import small_gpt

from engine.errors import UserError
from engine.generation import LayerCache, pick
from engine.kernels import native, ops
from model import GPT, Block, GPTConfig

ARCHS = ("gpt2", "modern", "shifted", "n-grams")
PATHS = ("plain", "torch's", "native")


def tiny(arch="gpt2", **settings) -> GPT:
    """A small model in which everything matters; `shifted` is modern with `token_shift`, `n-grams` the same with
    n-gram embeddings.
    """
    if arch == "n-grams":
        settings.setdefault("ngram_rows", 50)
    if arch in ("shifted", "n-grams"):
        arch, settings["token_shift"] = "modern", True
    return small_gpt(arch, std=0.3, **{"n_layer": 3, **settings}).eval()


def take(path: str, monkeypatch) -> dict[str, int]:
    """Has attention computed in this way; returns the sizes of a model that can be."""
    if path == "native":
        if native.library(torch.float32) is None:
            pytest.skip("needs kernels for float32")
        return {"n_embd": 64}
    monkeypatch.setattr(native, "library", lambda _: None)
    monkeypatch.setattr(ops, "MAX_PLAIN_ATTENTION", 0 if path == "torch's" else 1000)
    return {}


# --- causality ---


def changed_at_each(idx: torch.Tensor) -> torch.Tensor:
    """As many copies of `idx` (T,) as it is long, each with another character changed."""
    return (idx + torch.eye(len(idx), dtype=idx.dtype)) % 11


def check_causality(logits: torch.Tensor, changed: torch.Tensor) -> None:
    """Each logit depends on its whole context, and on nothing after it. Row t of `changed` (T, T, V) has the logits
    after character t was changed.
    """
    differs = (changed != logits).any(dim=-1)
    assert torch.equal(differs, torch.ones_like(differs).triu())


@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-6), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_logit_depends_on_a_later_character_and_a_cache_changes_none(arch, path, dtype, error, monkeypatch):
    """To `error`, relative to all logits: with a cache they are rounded in another order."""
    model = tiny(arch, **take(path, monkeypatch), block_size=40, n_layer=2)

    def cached(rows: torch.Tensor) -> torch.Tensor:
        cache = [LayerCache(model.config, len(rows), rows.device, dtype) for _ in model.blocks]
        pieces = rows.split([5, 20, *[1] * 15], dim=1)
        return torch.cat([model(piece, piece, cache)[0] for piece in pieces], dim=1)

    idx, both = torch.randint(11, (40,)), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        for compute in (lambda rows: model(rows)[0], cached):
            both.append(compute(idx.expand(40, -1)))
            check_causality(both[-1], compute(changed_at_each(idx)))
    assert (both[1] - both[0]).norm() <= error * both[0].norm()


@pytest.mark.parametrize("arch, path", [("gpt2", "plain"), ("n-grams", "torch's")])
def test_no_logit_depends_on_a_later_character_when_compiled(arch, path, monkeypatch):
    model = tiny(arch, **take(path, monkeypatch), n_layer=1)
    idx = torch.randint(11, (12,))
    expected = model(idx.expand(12, -1))[0]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    logits = compiled(idx.expand(12, -1))[0]
    assert torch.allclose(logits, expected, atol=1e-5)
    check_causality(logits, compiled(changed_at_each(idx))[0])


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("arch", ARCHS)
def test_fused_attention_equals_plain_attention(arch, path, monkeypatch):
    idx, results = torch.randint(11, (4, 12)), []
    sizes = take(path, monkeypatch)
    for chosen in (path, "plain"):
        take(chosen, monkeypatch)
        model = tiny(arch, **sizes)
        logits, loss = model(idx, idx)
        loss.backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*results, strict=True))


# --- initial weights ---


@pytest.mark.parametrize("arch, settings", [("gpt2", {}), ("modern", {"token_shift": True, "ngram_rows": 50})])
def test_initial_weights_are_those_of_the_paper_or_of_nanochat_and_the_prediction_is_uniform(arch, settings):
    torch.manual_seed(0)
    sizes = {"n_layer": 8, "n_head": 4, "n_embd": 128, "vocab_size": 65, "block_size": 32}
    model = GPT(GPTConfig(arch=arch, **sizes, **settings))
    for name, parameter in model.named_parameters():
        if arch == "gpt2":
            width = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # attention's and the MLP's alike
        elif name.endswith(("c_proj.weight", "head.weight", "shift.weight", "ngrams.weight")):
            width = 0
        else:
            width = 1.0 if name == "tok_emb.weight" else 128**-0.5
        if parameter.dim() == 2 or arch == "modern":
            assert parameter.std().item() == pytest.approx(width, rel=0.05), name
    idx, targets = torch.randint(65, (2, 4, 32))
    assert model(idx, targets)[1].item() == pytest.approx(4.174, abs=0.1 if arch == "gpt2" else 0.001)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_token_shift_adds_the_previous_position_to_the_mlp_input(arch):
    model, seen = tiny(arch, token_shift=True, n_layer=1), {}
    block = model.blocks[0]
    block.ln_2.register_forward_hook(lambda *a: seen.update(norm=a[-1]))
    block.mlp.register_forward_pre_hook(lambda _, inputs: seen.update(mlp=inputs[0]))
    model(torch.randint(11, (2, 12)))
    norm, mlp = seen["norm"], seen["mlp"]
    assert torch.equal(mlp[:, 0], norm[:, 0])
    expected = norm[:, 1:] + norm[:, :-1] * block.shift.weight
    assert torch.allclose(mlp[:, 1:], expected, atol=1e-6)


def test_n_gram_embeddings_depend_on_the_last_three_and_four_characters():
    model = tiny("n-grams", ngram_rows=10_007)

    def embed(*ids: int) -> torch.Tensor:
        return model.ngrams(torch.tensor([ids]))[0]

    differs = (embed(1, 2, 3, 4, 5) - embed(0, 2, 3, 4, 5)).any(dim=1)
    assert differs.tolist() == [True] * 4 + [False]
    assert not torch.equal(embed(1, 2, 3)[-1], embed(3, 2, 1)[-1])
    text = torch.randint(11, (1, 5000), generator=torch.Generator().manual_seed(1))
    distinct = model.ngrams(text).unique(dim=1).size(1)
    # Each distinct sequence of four has a sum of its own, as have the three at the start.
    assert distinct == text.unfold(1, 4, 1).unique(dim=1).size(1) + 3


# --- generation ---


@pytest.mark.parametrize("arch", ARCHS)
def test_cached_generation_equals_uncached_also_past_block_size(arch):
    model, idx = tiny(arch), torch.randint(11, (3, 4))
    options = {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 1.3, "seed": 7}
    cached = model.generate(idx, 30, **options)
    assert cached.shape == (3, 34) and torch.equal(cached[:, :4], idx)
    assert torch.equal(cached, model.generate(idx, 30, use_cache=False, **options))


@pytest.mark.parametrize("length", [1, 12, 20])
def test_a_full_context_is_encoded_again_from_its_last_half(length):
    model = tiny("modern")
    out = model.generate(torch.randint(11, (1, length)), 24)
    seen = min(length, 12)
    for end in range(length, out.size(1)):
        if seen > 12:
            seen = 6
        logits, _ = model(out[:, end - seen : end])
        assert out[0, end] == logits[0, -1].argmax()
        seen += 1


def test_a_compiled_model_generates_without_compiling():
    def fail(*_):
        raise AssertionError("compiled")

    model = tiny("modern")
    model.compile(backend=fail)
    assert model.generate(torch.zeros(1, 1, dtype=torch.int64), 3).shape == (1, 4)
    with pytest.raises(Exception, match="compiled"):
        model(*torch.zeros(2, 1, 2, dtype=torch.int64))


def test_characters_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0])
    logits = probabilities.log().expand(20_000, -1)
    ids = pick(logits, 1.0, None, None, [np.random.default_rng((3, i)) for i in range(20_000)])
    shares = ids.bincount(minlength=5) / 20_000
    deviations = (probabilities * (1 - probabilities) / 20_000).sqrt()
    assert ((shares - probabilities).abs() <= 4 * deviations).all()


def test_top_k_and_top_p_keep_only_the_likeliest():
    logits = torch.tensor([[0.3, 0.5, 0.15, 0.05]]).log().expand(4000, -1)
    generators = [np.random.default_rng(i) for i in range(4000)]

    def drawn(top_k=None, top_p=None, temperature=1.0):
        return set(pick(logits, temperature, top_k, top_p, generators).tolist())

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1} and drawn(top_k=100) == {0, 1, 2, 3}
    assert drawn(top_p=0.79) == {0, 1} and drawn(top_p=0.81) == {0, 1, 2}
    for least in (1e-3, 1e-40, 1e-300):  # the last two underflow in float32
        assert drawn(top_p=least) == drawn(temperature=least) == {1}


def test_a_model_in_training_generates_without_dropout_and_is_in_training_between_characters():
    model, idx = tiny(pdrop=0.5), torch.zeros(1, 1, dtype=torch.int64)
    expected = model.generate(idx, 20)
    model.train()
    drawn = []
    for ids in model.stream(idx, 20):
        assert torch.is_grad_enabled() and all(module.training for module in model.modules())
        drawn.append(ids)
    assert torch.equal(torch.stack(drawn, dim=1), expected[:, 1:])
    assert torch.equal(model.generate(idx, 20), expected) and model.training


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}])
def test_impossible_sampling_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tiny().generate(torch.zeros(1, 1, dtype=torch.long), 3, do_sample=True, **options)


def test_an_impossible_context_is_refused():
    with pytest.raises(ValueError, match="T >= 1"):
        tiny().generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="13 characters of context, but block_size is 12"):
        tiny()(torch.zeros(1, 13, dtype=torch.long))


# --- dropout ---


def is_half_of(dropped: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether about half of `whole` is left, twice as large, where it is not 0 anyway."""
    there = whole != 0
    kept = (dropped != 0) & there
    share = kept.sum() / there.sum()
    return abs(share - 0.5) < 0.05 and torch.allclose(dropped[kept], 2 * whole[kept], atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_of_embeddings_and_residual_stream_has_the_configured_rate(arch):
    model = tiny(arch, pdrop=0.5, n_embd=64, block_size=40)
    block, seen = model.blocks[0], {}
    block.attn.attn_pdrop = 0
    idx = torch.randint(11, (4, 40))
    for name, module in (("block", block), ("attn", block.attn), ("mlp", block.mlp)):
        module.register_forward_hook(lambda _, given, made, name=name: seen.update({name: (given, made)}))
    model.train()(idx)
    embedded = model.tok_emb(idx)
    if arch == "gpt2":
        assert is_half_of(seen["block"][0][0], embedded + model.pos_emb.weight)
    else:  # normalised since, which leaves a 0 as it was
        assert abs((seen["block"][0][0] == 0).float().mean() - 0.5) < 0.05
    model.eval()
    for name, module in (("attn", block.attn), ("mlp", block.mlp)):
        given, made = seen[name]
        assert is_half_of(made, module(*given)), name


@pytest.mark.parametrize("path", ["plain", "torch's"])
def test_dropout_of_attention_weights_has_the_configured_rate(path, monkeypatch):
    take(path, monkeypatch)
    attention = ops._plain_attention if path == "plain" else ops._torch_attention
    qkv = torch.randn(4, 40, 3, 2, 40)
    qkv[:, :, 2] = torch.eye(40)[:, None]  # values that bring out the weights themselves
    qkv = qkv.view(4, 40, -1)
    dropped, whole = (attention(qkv, 2, None, None, p) for p in (0.5, 0.0))
    assert is_half_of(dropped, whole)
    model, idx = tiny(attn_pdrop=0.5), torch.randint(11, (1, 12))
    for training in (True, False):
        first, second = (model.train(training)(idx)[0] for _ in range(2))
        assert torch.equal(first, second) != training


@pytest.mark.parametrize("arch", ARCHS)
def test_activation_checkpointing_repeats_dropout(arch):
    gradients, calls = [], []
    idx = torch.randint(11, (4, 12))
    for recompute in (False, True):
        model = tiny(arch, pdrop=0.5, activation_checkpointing=recompute).train()
        model.blocks[0].register_forward_pre_hook(lambda *_, n=recompute: calls.append(n))
        torch.manual_seed(5)
        model(idx, idx)[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert calls == [False, True, True]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


# --- configuration ---


def test_sizes_are_given_or_from_model_type_or_gpt2():
    def sizes(**settings):
        config = GPTConfig(**settings)
        return config.n_layer, config.n_head, config.n_embd

    assert sizes() == sizes(model_type="gpt2") == (12, 12, 768)
    assert sizes(model_type="gpt-mini", n_layer=2) == (2, 6, 192)
    assert sizes(model_type="gpt-mini", n_layer=6, n_head=6, n_embd=192) == (6, 6, 192)
    assert sizes(n_layer=1) == (1, 12, 768)


def test_an_older_snapshots_configuration_builds_the_same_model():
    recorded = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "attention": "auto"}
    assert GPTConfig.recorded(recorded) == GPTConfig(n_layer=2, n_head=2, n_embd=16)
    again = dataclasses.asdict(GPTConfig(arch="modern", model_type="gpt-mini", n_layer=2))
    assert GPTConfig.recorded(again).n_layer == 2
    with pytest.raises(UserError, match=r"model\.width, which GPTConfig does not have"):
        GPTConfig.recorded({"width": 3})


def test_a_parameter_that_was_added_keeps_its_own_values(monkeypatch):
    class Scaled(Block):
        def __init__(self, config):
            super().__init__(config)
            self.gamma = torch.nn.Parameter(torch.full((config.n_embd,), 0.5))

    monkeypatch.setattr("model.Block", Scaled)
    config = GPTConfig(model_type="gpt-nano", vocab_size=5, block_size=4)
    assert (GPT(config).blocks[1].gamma == 0.5).all()
    with torch.device("meta"), pytest.raises(UserError, match=r"blocks\.0\.gamma: .*init_weights"):
        GPT(config)
