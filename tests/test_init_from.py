"""Fine-tuning: what a run that begins with pretrained weights takes over, and what it does not."""

import logging
import re
import shutil

import pytest
import torch
from conftest import ROOT, TINY, metrics, model_snapshot, start
from hydra import compose, initialize_config_dir

import export
from config import Config, register, validate
from engine.config.overrides import follow_overrides
from engine.errors import UserError
from engine.interop import pretrained as init_from
from engine.parallel.distributed import World
from engine.snapshots.storage import load
from model import GPT

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
EXPORTABLE = {
    "gpt2": {"arch": "gpt2"},
    "untied, without biases": {"arch": "gpt2", "bias": False, "tie_weights": False},
    "modern": {"arch": "modern"},
}
MODELS = {**EXPORTABLE, "with a token shift": {"arch": "modern", "token_shift": True}}


def composed(*overrides: str) -> Config:
    """The configuration of `python main.py OVERRIDES`."""
    register()
    given = ["data=text", "data.path=x", *overrides]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=given)
    follow_overrides(config, given)
    return validate(config)


@pytest.fixture
def source(tmp_path):
    """Writes the snapshot of a small model with the vocabulary "abcd"; returns its path."""

    def write(name: str = "source.pt", **settings) -> str:
        (tmp_path / name).write_bytes(model_snapshot("abcd", **settings).to_bytes())
        return str(tmp_path / name)

    return write


def begun(vocabulary: str, *overrides: str) -> GPT:
    """The model that a run with these overrides and a text of this vocabulary begins with."""
    config = composed(*overrides)
    learned = init_from.prepare(config, None, ALONE)
    config.model.vocab_size = len(vocabulary)
    torch.manual_seed(config.trainer.seed)
    model = GPT(config.model)
    init_from.load_pretrained(learned, model, vocabulary)
    return model


# --- what is taken over ---


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_characters_in_common_keep_their_rows_and_new_ones_lie_around_the_mean(settings, source):
    path = source(n_embd=256, **settings)
    learned = load(path).model_state
    own = begun("bdxy", f"init_from={path}").state_dict()
    assert own.keys() == learned.keys()
    for name, weights in own.items():
        if name not in ("tok_emb.weight", "head.weight"):
            assert torch.equal(weights, learned[name]), name
            continue
        assert torch.equal(weights[:2], learned[name][[1, 3]])
        drawn = weights[2:] - learned[name].mean(dim=0)
        deviation = {"gpt2": 0.02, "modern": 1.0 * (name == "tok_emb.weight")}[settings["arch"]]
        assert drawn.mean().abs() < 0.15 * deviation + 1e-6
        assert drawn.std() == pytest.approx(deviation, rel=0.1, abs=1e-6)
        assert deviation == 0 or not torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("settings", EXPORTABLE.values(), ids=EXPORTABLE)
def test_an_exported_model_is_as_good_as_its_snapshot(settings, source, tmp_path):
    path = source(**settings)
    export.export(load(path), path, str(tmp_path / "exported"))
    one, other = (
        begun("abcdx", f"init_from={begin}").state_dict() for begin in (path, tmp_path / "exported")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_of_a_run_its_best_snapshot_is_taken(source, tmp_path):
    best = model_snapshot("abcd")
    source("gpt_snapshot.pt", bias=False)
    (tmp_path / "gpt_snapshot.best.pt").write_bytes(best.to_bytes())
    own = begun("abcd", f"init_from={tmp_path}").state_dict()
    assert all(torch.equal(own[name], best.model_state[name]) for name in best.model_state)


def test_architecture_and_sizes_are_those_of_the_source_whatever_the_recipe_says(source):
    path = source(arch="gpt2", bias=False, tie_weights=False)
    config = composed("experiment=shakespeare_cpu", f"init_from={path}")
    assert (config.model.arch, config.model.n_embd) == ("modern", 128)
    init_from.prepare(config, None, ALONE)
    m = config.model
    assert (m.arch, m.n_layer, m.n_head, m.n_embd) == ("gpt2", 2, 4, 32)
    assert (m.bias, m.tie_weights, m.block_size, config.data.block_size) == (False, False, 24, 24)
    assert config.optimizer.name == "muon"  # of the recipe, as all the rest


def test_the_log_says_what_was_kept(source, caplog):
    log = logging.getLogger("gpt")
    before, log.propagate = (log.level, log.propagate), True
    try:
        with caplog.at_level(logging.INFO, "gpt"):
            begun("bdxyz", f"init_from={source()}")
    finally:
        log.propagate = before[1]
    assert "source.pt, step 7, held-out loss 1.2500" in caplog.text
    assert "2 of the 4 learned ones kept, 2 left out; 3 new: 'xyz'" in caplog.text


# --- another context ---


@pytest.mark.parametrize("arch, length", [("gpt2", 10), ("modern", 10), ("modern", 40)])
def test_the_context_may_be_shorter_and_with_rotary_positions_longer(arch, length, source):
    path = source(arch=arch)
    model = begun("abcd", f"init_from={path}", f"data.block_size={length}")
    assert model.config.block_size == length
    if arch == "gpt2":
        assert torch.equal(model.pos_emb.weight, load(path).model_state["pos_emb.weight"][:length])
    assert model(torch.zeros(1, length, dtype=torch.int64))[0].isfinite().all()


# --- refusals ---


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["model.n_layer=3"], "model.n_layer=3: init_from={} has 2; leave it out"),
        (["model=modern"], "model.arch=modern: init_from={} has gpt2; leave it out"),
        (["model.bias=false"], "model.bias=false: init_from={} has true; leave it out"),
        (["model.model_type=gpt-nano"], "model.n_embd=48: init_from={} has 32; leave it out"),
        (["data.block_size=25"], "data.block_size=25: init_from={} has learned 24 positions"),
    ],
)
def test_another_architecture_than_the_sources_is_refused_with_both(overrides, says, source):
    path = source()
    with pytest.raises(UserError, match=re.escape(says.format(path))):
        begun("abcd", f"init_from={path}", *overrides)


@pytest.mark.parametrize(
    "override",
    ["model=gpt2", "model.n_layer=2", "model.model_type=null", "model.bias=null", "data=pydoc"],
)
def test_what_is_the_same_or_left_open_may_be_named(override, source):
    settings = [f"init_from={source()}", "experiment=overfit", "model.n_embd=32", override]
    assert begun("abcd", *settings).config.n_layer == 2


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "thing: no such snapshot"),
        (b"some text", "thing: not a whole snapshot"),
        ({}, "there is no snapshot at "),
        ({"config.json": b"{"}, "thing: not an exported model"),
    ],
)
def test_what_weights_cannot_be_read_from_gets_one_line(content, says, tmp_path):
    path = tmp_path / "thing"
    if isinstance(content, dict):
        path.mkdir()
        for name, inner in content.items():
            (path / name).write_bytes(inner)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        begun("abcd", f"init_from={path}")
    assert str(error.value).startswith(f"init_from={path}: ") and "\n" not in str(error.value)


def test_weights_that_do_not_fit_are_refused(source, tmp_path):
    for name, change in [
        ("blocks.0.mlp.c_fc.weight", lambda state, name: state.update({name: state[name][:-1]})),
        ("ln_f.bias", lambda state, name: state.pop(name)),
    ]:
        snapshot = model_snapshot("abcd")
        change(snapshot.model_state, name)
        (tmp_path / "odd.pt").write_bytes(snapshot.to_bytes())
        with pytest.raises(UserError, match=re.escape(name)):
            begun("abcd", f"init_from={tmp_path / 'odd.pt'}")


# --- whole runs ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on one text, and two other texts of the same language, one with some new characters."""
    from pydoc_data import topics

    text = "\n\n".join(text for _, text in sorted(topics.topics.items()))
    folder = tmp_path_factory.mktemp("trained")
    (folder / "one.txt").write_text(text[:150_000])
    (folder / "other.txt").write_text(text[200_000:260_000] + "éß" * 20)
    learn(
        folder / "one.txt", folder / "one", "trainer.max_steps=300", "trainer.eval_every_steps=300"
    )
    return folder


SETTINGS = [
    "experiment=null", "data=text", "data.block_size=32", "trainer.batch_size=32",
    "trainer.threads=1", "trainer.use_amp=false", "trainer.eval_every_steps=10",
    "optimizer.learning_rate=3e-3",
]  # fmt: skip
SIZES = ["model=modern", "model.n_layer=2", "model.n_head=2", "model.n_embd=48"]


def learn(text, run_dir, *settings, **kwargs) -> str:
    sizes = [] if any(s.startswith("init_from") for s in settings) else SIZES
    result = start(
        *SETTINGS, *sizes, f"data.path={text}", f"run_dir={run_dir}", *settings, **kwargs
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_reaches_a_loss_in_a_tenth_of_the_steps_that_fresh_weights_need(trained, tmp_path):
    text, warmup = trained / "other.txt", "optimizer.warmup_steps=10"
    begin = f"init_from={trained / 'one'}"
    said = learn(text, tmp_path / "tuned", begin, warmup, "trainer.max_steps=10")
    assert "gpt_snapshot.best.pt, step 300" in said and re.search(r"; \d new: '.*ßé'", said)
    learn(text, tmp_path / "fresh", warmup, "trainer.max_steps=100")
    tuned, fresh = (metrics(tmp_path / name, "val") for name in ("tuned", "fresh"))
    assert tuned[0]["step"] == 10 and fresh[-1]["step"] == 100
    assert tuned[0]["loss"] < fresh[-1]["loss"]
    # the schedule begins anew: the warm-up, too
    tuned, fresh = (metrics(tmp_path / name, "train") for name in ("tuned", "fresh"))
    assert tuned[0]["lr"] == fresh[0]["lr"] == pytest.approx(3e-3 * 10 / 11)
    snapshot = load(str(tmp_path / "tuned" / "gpt_snapshot.pt"))
    assert snapshot.step == 10 and snapshot.config["init_from"] == str(trained / "one")


def test_a_run_that_began_without_weights_is_not_given_any_and_others_know_theirs(tmp_path):
    run, tuned = ([*TINY, f"run_dir={tmp_path / name}"] for name in ("run", "tuned"))
    weights = f"init_from={tmp_path / 'run'}"
    assert start(*run, "trainer.max_steps=2").returncode == 0
    refused = start(*run, "trainer.max_steps=4", weights)
    assert refused.returncode == 1 and "this run has begun without it" in refused.stderr
    for steps, *settings in (2, weights), (3,), (4, weights):
        result = start(*tuned, f"trainer.max_steps={steps}", *settings)
        assert result.returncode == 0 and "init_from was" not in result.stdout, result.stderr


@pytest.mark.slow
def test_a_run_goes_on_without_the_weights_it_began_with(trained, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(trained / "one", source)
    tune = [trained / "other.txt", tmp_path / "run", f"init_from={source}"]
    learn(*tune, "trainer.max_steps=4")
    shutil.rmtree(source)
    said = learn(*tune, "trainer.max_steps=8", "trainer.log_every_steps=1")
    assert "this run resumes from its own snapshot" in said and "resuming from" in said
    learn(tune[0], tmp_path / "straight", f"init_from={trained / 'one'}", "trainer.max_steps=8")
    one, other = (load(str(tmp_path / x / "gpt_snapshot.pt")) for x in ("run", "straight"))
    weights = other.model_state
    assert all(torch.equal(one.model_state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_begin_with_the_same_weights(strategy, source, tmp_path):
    learned = load(source()).model_state
    still = ["optimizer.learning_rate=1e-30", "trainer.max_steps=1", "trainer.use_amp=false"]
    tiny = [s for s in TINY if not s.startswith(("model.", "data.block_size"))]
    result = start(
        *tiny,
        *still,
        f"init_from={tmp_path / 'source.pt'}",
        f"trainer.strategy={strategy}",
        f"run_dir={tmp_path / 'run'}",
        nproc=2,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("4 of the 4 learned ones kept") == 1
    snapshot = load(str(tmp_path / "run" / "gpt_snapshot.pt"))
    rows = [snapshot.vocabulary.index(character) for character in "abcd"]
    for name, weights in snapshot.model_state.items():
        kept = weights[rows] if name in ("tok_emb.weight", "head.weight") else weights
        assert torch.equal(kept, learned[name]), name


def test_two_processes_refuse_together(tmp_path):
    result = start(*TINY, "init_from=nowhere", f"run_dir={tmp_path}", nproc=2, timeout=60)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error (rank")]
    assert result.returncode != 0 and len(errors) == 2, result.stderr
    assert all("init_from=nowhere: no such snapshot" in line for line in errors)
