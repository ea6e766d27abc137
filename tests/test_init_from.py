"""Fine-tuning: what a run copies from pretrained weights."""

import dataclasses
import logging
import os
import re
import shlex
import shutil
import signal

import pytest
import torch
from conftest import ARCHITECTURES, TINY, UNREAD, best, latest, metrics, model_snapshot, start, succeed

from config import Config
from engine.errors import UserError
from engine.interop.pretrained import load_pretrained, read_init_weights
from engine.signals import Stopped
from engine.snapshots.storage import load
from main import configure, train
from model import GPT


@pytest.fixture
def source(tmp_path):
    """Writes the snapshot of a small model with the vocabulary "abcd"; returns its path."""

    def write(name: str = "source.pt", **settings) -> str:
        (tmp_path / name).write_bytes(model_snapshot("abcd", **settings).to_bytes())
        return str(tmp_path / name)

    return write


def configured(source, block_size: int = 128) -> Config:
    """The configuration of a run from `source`, whose recipe has another model."""
    config = Config(init_from=str(source))
    config.model = dataclasses.replace(config.model, arch="modern", bias=None, tie_weights=None)
    config.data = dataclasses.replace(config.data, block_size=block_size)
    return config


def tuned(vocabulary: str, source, block_size: int = 128) -> GPT:
    """The model that a run from `source` on a text of this vocabulary starts with."""
    config = configured(source, block_size)
    pretrained = read_init_weights(config, None)
    config.model.vocab_size = len(vocabulary)
    torch.manual_seed(config.trainer.seed)
    model = GPT(config.model)
    load_pretrained(pretrained, model, vocabulary)
    return model


# --- weights and architecture ---


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_shared_characters_keep_their_rows_and_new_ones_are_drawn_around_the_mean(settings, source):
    path = source(**settings | {"n_embd": 256})
    learned = load(path).model_state
    own = tuned("bdxy", path).state_dict()
    assert own.keys() == learned.keys()
    for name, weights in own.items():
        if name == "ngrams.codes":  # a character keeps its own
            assert weights.tolist() == [2, 4, 7, 8]
            continue
        if name not in ("tok_emb.weight", "head.weight"):
            assert torch.equal(weights, learned[name]), name
            continue
        assert torch.equal(weights[:2], learned[name][[1, 3]])
        drawn = weights[2:] - learned[name].mean(dim=0)
        deviation = {"gpt2": 0.02, "modern": 1.0 * (name == "tok_emb.weight")}[settings["arch"]]
        assert drawn.mean().abs() < 0.15 * deviation + 1e-6
        assert drawn.std() == pytest.approx(deviation, rel=0.1, abs=1e-6)
        assert deviation == 0 or not torch.equal(weights[2], weights[3])


def test_init_from_a_run_directory_reads_its_best_snapshot(source, tmp_path, caplog):
    caplog.set_level(logging.INFO, "gpt")
    source("gpt_snapshot.pt", bias=False)
    learned = load(source("gpt_snapshot.best.pt")).model_state
    own = tuned("abcd", tmp_path).state_dict()
    assert all(torch.equal(own[name], learned[name]) for name in learned)
    assert "gpt_snapshot.best.pt, step 7, held-out loss 1.2500" in caplog.text
    tuned("bdxyz", tmp_path)
    assert "vocabulary  reused 2 of 4 characters, dropped 2, added 3: 'xyz'" in caplog.messages


@pytest.mark.parametrize("settings", [{"arch": "gpt2", "bias": False, "tie_weights": False}, {"arch": "modern"}])
def test_architecture_and_sizes_are_the_pretrained_models_and_the_context_is_the_shorter(settings, source, caplog):
    caplog.set_level(logging.INFO, "gpt")
    path = source(**settings)
    for asked, length in (10, 10), (40, 24):
        model = tuned("abcd", path, asked)
        wanted = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": length, **settings}
        assert wanted.items() <= dataclasses.asdict(model.config).items()
        assert f"layers 2, heads 4, width 32, of the pretrained model; context {length}" in caplog.text
        if settings["arch"] == "gpt2":
            learned = load(path).model_state["pos_emb.weight"]
            assert torch.equal(model.pos_emb.weight, learned[:length])
        assert model(torch.zeros(1, length, dtype=torch.int64))[0].isfinite().all()
    config = configured(path)
    read_init_weights(config, None)
    assert config.data.block_size == 24


# --- refusals ---


@pytest.mark.parametrize(
    "files, says",
    [
        ({}, "thing: no such snapshot"),
        ({"thing": "some text"}, "thing: not a complete snapshot"),
        ({"thing/main.log": ""}, "there is no snapshot at "),
        ({"thing/config.json": "{"}, "thing: not an exported model"),
    ],
)
def test_an_unreadable_source_gets_one_line(files, says, tmp_path):
    path = tmp_path / "thing"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"^init_from={path}: .*") as error:
        tuned("abcd", path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_text_model_is_not_trained_on_bytes(source):
    config = configured(source())
    config.data = dataclasses.replace(config.data, encoding="bytes")
    with pytest.raises(UserError, match=r"was trained with data\.encoding=utf-8; set the same"):
        read_init_weights(config, None)


@pytest.mark.parametrize(
    "name, change",
    [
        ("blocks.0.mlp.c_fc.weight", lambda weights: weights[:-1]),
        ("blocks.0.mlp.c_fc.weight", lambda weights: weights * torch.nan),
        ("ln_f.bias", lambda weights: None),
    ],
)
def test_weights_that_do_not_fit_are_refused(name, change, tmp_path):
    snapshot = model_snapshot("abcd")
    state = snapshot.model_state
    state[name] = change(state[name])
    snapshot.model_state = {name: weights for name, weights in state.items() if weights is not None}
    (tmp_path / "odd.pt").write_bytes(snapshot.to_bytes())
    with pytest.raises(UserError, match=re.escape(name)):
        tuned("abcd", tmp_path / "odd.pt")


# --- whole runs ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on one text, and two other texts of the same language, one with some new characters."""
    from pydoc_data import topics

    text = "\n\n".join(text for _, text in sorted(topics.topics.items()))
    folder = tmp_path_factory.mktemp("trained")
    (folder / "one.txt").write_text(text[:150_000])
    (folder / "other.txt").write_text(text[200_000:260_000] + "éß" * 20)
    learn(folder / "one.txt", folder / "one", "trainer.max_steps=300", "trainer.eval_every_steps=300")
    return folder


SETTINGS = [
    "experiment=null", "data=text", "data.block_size=32", "trainer.batch_size=32",
    "trainer.threads=1", "trainer.use_amp=false", "trainer.eval_every_steps=10",
    "optimizer.learning_rate=3e-3",
]  # fmt: skip
SIZES = ["model=modern", "model.n_layer=2", "model.n_head=2", "model.n_embd=48"]


def learn(text, run_dir, *settings, **kwargs) -> str:
    sizes = [] if any(s.startswith("init_from") for s in settings) else SIZES
    return succeed(*SETTINGS, *sizes, f"data.path={text}", f"run_dir={run_dir}", *settings, **kwargs).stdout


def test_fine_tuning_needs_a_tenth_of_the_steps_of_fresh_weights(trained, tmp_path):
    text, warmup = trained / "other.txt", "optimizer.warmup_steps=10"
    begin = f"init_from={trained / 'one'}"
    said = learn(text, tmp_path / "tuned", begin, warmup, "trainer.max_steps=10")
    assert "gpt_snapshot.best.pt, step 300" in said and re.search(r"added \d: '.*ßé'", said)
    learn(text, tmp_path / "fresh", warmup, "trainer.max_steps=100")
    tuned, fresh = (metrics(tmp_path / name, "val") for name in ("tuned", "fresh"))
    assert [line["step"] for line in tuned] == [0, 10] and fresh[-1]["step"] == 100
    assert tuned[1]["loss"] < fresh[-1]["loss"]
    # the schedule begins anew: the warm-up, too
    tuned, fresh = (metrics(tmp_path / name, "train") for name in ("tuned", "fresh"))
    assert tuned[0]["lr"] == fresh[0]["lr"] == pytest.approx(3e-3 * 10 / 11)
    snapshot = latest(tmp_path / "tuned")
    assert snapshot.step == 10 and snapshot.config["init_from"] == str(trained / "one")


def test_pretrained_weights_are_the_best_snapshot_if_training_only_worsens_them(trained, tmp_path):
    settings = ["optimizer.learning_rate=1", "trainer.max_steps=10", f"init_from={trained / 'one'}"]
    said = learn(trained / "one.txt", tmp_path / "worse", *settings)
    assert "The held-out loss has risen: it was lowest at step 0" in said
    worse, source = best(tmp_path / "worse"), best(trained / "one")
    assert worse.step == 0 and worse.best_loss == pytest.approx(source.best_loss, abs=1e-5)
    assert all(torch.equal(worse.model_state[name], x) for name, x in source.model_state.items())


def test_a_stop_during_the_first_evaluation_does_not_lose_it(trained, tmp_path, monkeypatch):
    settings = [f"data.path={trained / 'other.txt'}", f"init_from={trained / 'one'}", f"run_dir={tmp_path / 'tuned'}"]
    composed = configure(*SETTINGS, *settings, "trainer.max_steps=2")

    def stopped(trainer):
        signal.raise_signal(signal.SIGTERM)
        trainer.requests.check()

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("trainer.Trainer.evaluate", stopped)
        train(composed)
    train(composed)
    assert [line["step"] for line in metrics(tmp_path / "tuned", "val")] == [0, 2]


def test_a_resumed_run_refuses_another_init_from(tmp_path):
    unsized = [s for s in TINY if not s.startswith("model.")]  # the sizes are the source's
    tuned = f"run_dir={tmp_path / 'tuned'}"
    weights = f"init_from={tmp_path / 'run'}"
    run = f"run_dir={tmp_path / 'run'}"
    train(configure(*TINY, run, "trainer.max_steps=2"))
    with pytest.raises(UserError, match="another run: init_from was null, is "):
        train(configure(*unsized, run, "trainer.max_steps=4", weights))
    spelled = f"init_from={os.path.relpath(tmp_path / 'run')}/"
    for steps, settings in (2, [*unsized, weights]), (3, TINY), (4, [*unsized, spelled]):
        train(configure(*settings, tuned, f"trainer.max_steps={steps}"))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # needed by the first start alone
    log = (tmp_path / "tuned" / "main.log").read_text()
    assert "init_from was" not in log and "resuming from the run's own snapshot" in log
    with pytest.raises(UserError, match=re.escape(f"init_from was {tmp_path}/run, is other.pt")):
        train(configure(*unsized, tuned, "init_from=other.pt", "trainer.max_steps=5"))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_start_from_the_same_weights(strategy, source, tmp_path):
    learned = load(source()).model_state
    tiny = [s for s in TINY if not s.startswith(("model.", "data.block_size"))]
    still = ["optimizer.learning_rate=1e-30", "trainer.max_steps=1", "trainer.use_amp=false"]
    run = [f"init_from={tmp_path / 'source.pt'}", f"trainer.strategy={strategy}", f"run_dir={tmp_path / 'run'}"]
    result = succeed(*tiny, *still, *run, nproc=2)
    assert result.stdout.count("reused 4 of 4 characters") == 1
    snapshot = latest(tmp_path / "run")
    rows = [snapshot.vocabulary.index(character) for character in "abcd"]
    for name, weights in snapshot.model_state.items():
        kept = weights[rows] if name in ("tok_emb.weight", "head.weight") else weights
        assert torch.equal(kept, learned[name]), name


def test_a_text_that_has_grown_is_held_out_where_it_was_and_a_copy_is_recognized(tmp_path):
    """The refusal names init_from, with which the new text is trained on, and the old held-out part held out."""
    lines = [f"line {i * 7919 % 997}\n" for i in range(350)]
    path = tmp_path / "n.txt"
    run = [*UNREAD, f"data.path={path}", "data.block_size=16", "data.train_split=0.9"]
    a, b, c = (f"run_dir={tmp_path / name}" for name in "abc")
    unsized = [setting for setting in run if not setting.startswith("model.")]
    path.write_text("".join(lines[:200]))
    succeed(*run, a)
    (tmp_path / "copy.txt").write_text("another line\n" + path.read_text())
    copy = [f"data.path={tmp_path / 'copy.txt'}", "data.train_split=0.5", f"run_dir={tmp_path / 'copy'}"]
    said = succeed(*unsized, *copy, f"init_from={tmp_path / 'a'}").stdout
    assert re.search(r"warning: init_from: the model was trained on (7|8)\d % of the held-out text", said)
    path.write_text("".join(lines[:300]))
    refused = start(*run, a)
    assert refused.returncode == 1
    command = shlex.split(refused.stderr.partition("on the changed text: python ")[2])
    assert command[1:] == [*unsized, f"init_from={tmp_path / 'a'}", f"run_dir={tmp_path / 'a'}-2"]
    succeed(*unsized, b, f"init_from={tmp_path / 'a'}")
    path.write_text("".join(lines))
    again = [*unsized, c, f"init_from={tmp_path / 'b'}"]
    size = len("".join(lines[:200]))
    first = int(0.9 * size)
    said = succeed(*again).stdout
    assert f"held out    characters {first:,} to {size:,}, as of the pretrained model" in said
    assert "may have the held-out text" not in said
    assert [metrics(tmp_path / name, "val")[-1]["tokens"] for name in "abc"] == [size - first - 1] * 3
    assert "step 8/8" in succeed(*again, "trainer.max_steps=8", f"data.held_out=[{first},{size}]").stdout
    assert "another run: data.held_out was " in start(*again, "data.held_out=[1,100]").stderr
    assert "99 held out" in succeed(*again[:-2], f"run_dir={tmp_path / 'd'}", again[-1], "data.held_out=[1,100]").stdout


def test_documents_that_the_model_knows_are_recognized_in_any_order(tmp_path):
    names = [f"n{i * 7919 % 997}\n" for i in range(400)]
    run = [*UNREAD, "data.shuffle=lines", "data.block_size=16", "data.train_split=0.5"]
    for name, order, more in (("a", 1, ()), ("b", -1, (f"init_from={tmp_path / 'a'}",))):
        (tmp_path / f"{name}.txt").write_text("".join(names[::order]))
        own = [setting for setting in run if not (more and setting.startswith("model."))]
        result = succeed(*own, f"data.path={tmp_path / name}.txt", f"run_dir={tmp_path / name}", *more)
    # Half of the held-out lines, which are drawn at random; windows of several lines know nothing of them.
    assert re.search(r"the model was trained on (4|5)\d % of the held-out text", result.stdout)
