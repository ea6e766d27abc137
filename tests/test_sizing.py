"""Sizing: null fields are chosen for a text and a time limit; given values and the choice are kept."""

import copy
import dataclasses
import functools
import itertools
import re
import shlex
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from conftest import equal, latest, metrics, patched_main, read_until, succeed

from config import Config, as_config
from engine.config.overrides import text_name
from engine.config.schema import flatten
from engine.errors import UserError
from engine.parallel import distributed
from engine.sizing import choose as sizing
from engine.sizing import rule
from engine.sizing.choose import restore_choice
from main import configure

OWN = ["data=text", "trainer.threads=1", "trainer.log_every_steps=1", "report=false", "samples=false"]
SMALL = ["data.block_size=16", "model.n_layer=1", "model.n_embd=16"]


@pytest.fixture(autouse=True)
def cpu_whose_clock_stands_still(monkeypatch):
    monkeypatch.setattr(distributed, "_device", torch.device("cpu"))
    monkeypatch.setattr(sizing, "seconds_left", lambda deadline: deadline)


@functools.cache
def compose(*overrides: str) -> Config:
    return as_config(configure(*overrides))


def settings(*overrides: str, recipe: str = "auto") -> Config:
    own = ["data=text", "data.path=x.txt"] * (recipe == "auto")
    return copy.deepcopy(compose(f"experiment={recipe}", *own, *overrides))


def choose_for(
    config: Config, characters: int, minutes: float = 1.5, flops: float = 1e11, device: str = "cpu", final: int = 0
) -> tuple[dict, list[str], list[str]]:
    """The settings chosen on a machine of so many floating-point operations a second, the overrides that choose them,
    and the `trainer.compile` of the steps that were timed.
    """
    config.model.vocab_size = 65
    before, compiled = flatten(dataclasses.asdict(config)), []

    def time_step(config: Config) -> float:
        compiled.append(config.trainer.compile)
        seconds = sizing.step_characters(config) * sizing.flops_per_character(config) / flops
        return seconds * (0.7 if compiled[-1] == "true" else 1)

    distributed._device = torch.device(device)
    sizing.choose(config, characters, 60 * minutes, time_step, final)
    chosen = flatten(dataclasses.asdict(config))
    overrides = [f"{key}={chosen[key]}" for key in chosen if chosen[key] != before[key]]
    return chosen, overrides, compiled


def choose(*overrides: str, characters: int = 200_000, minutes: float = 1.5, **machine) -> dict:
    """The settings chosen."""
    config = settings(f"trainer.max_minutes={minutes:g}", *overrides)
    return choose_for(config, characters, minutes, **machine)[0]


def costs(chosen: dict, characters: int, flops: float) -> tuple[float, float]:
    """Seconds of a step and of an evaluation."""
    layers, width = chosen["model.n_layer"], chosen["model.n_embd"]
    context = chosen["data.block_size"]
    character_s = (72 * layers * width**2 + 12 * layers * width * context + 390 * width) / flops
    held_out = characters - int(characters * chosen["data.train_split"])
    step_s = chosen["trainer.batch_size"] * context * character_s
    return step_s, held_out * sizing.SCORING_COST * character_s


def test_everything_is_chosen_and_the_printed_overrides_repeat_it():
    chosen, overrides, _ = choose_for(settings(), 200_000)
    assert [key for key in (*sizing.CHOSEN, "trainer.max_steps") if chosen[key] is None] == []
    again = flatten(dataclasses.asdict(settings(*overrides, "trainer.max_minutes=null")))
    differ = {key for key in chosen if chosen[key] != again[key]}
    # The time is null; the others follow from the text and data.block_size.
    assert differ == {"trainer.max_minutes", "model.vocab_size", "model.block_size"}


@pytest.mark.parametrize(
    "key, value",
    [
        ("data.block_size", 48), ("model.n_layer", 7), ("model.n_embd", 66), ("model.n_head", 3),
        ("model.attn_pdrop", 0.37), ("optimizer.learning_rate", 0.001), ("optimizer.weight_decay", 0.7),
        ("trainer.batch_size", 5), ("data.train_split", 0.5), ("trainer.max_steps", 7),
    ],
)  # fmt: skip
def test_given_values_are_kept(key, value):
    chosen = choose(f"{key}={value}")
    assert chosen[key] == value
    assert chosen["model.n_embd"] % (2 * chosen["model.n_head"]) == 0
    assert None not in [chosen[key] for key in sizing.CHOSEN]


def test_steps_and_rates_follow_a_given_width():
    narrow, wide = (choose(f"model.n_embd={width}") for width in (128, 512))
    assert wide["trainer.max_steps"] < narrow["trainer.max_steps"] / 8
    assert wide["optimizer.learning_rate"] != narrow["optimizer.learning_rate"]
    assert wide["optimizer.weight_decay"] != narrow["optimizer.weight_decay"]


@pytest.mark.parametrize("characters", [1_000, 30_000, 1_000_000, 100_000_000])
@pytest.mark.parametrize("minutes", [0.2, 1.5, 60])
@pytest.mark.parametrize("flops", [1e10, 1e12, 1e14])
def test_steps_and_evaluations_fit_into_the_time(characters, minutes, flops):
    chosen = choose(characters=characters, minutes=minutes, flops=flops)
    step_s, evaluation_s = costs(chosen, characters, flops)
    steps, context = chosen["trainer.max_steps"], chosen["data.block_size"]
    evaluations_s = -(-steps // chosen["trainer.eval_every_steps"]) * evaluation_s
    assert steps * step_s / sizing.FILLED + evaluations_s <= 60 * minutes
    assert evaluations_s <= 0.1 * (steps * step_s + evaluations_s) or steps < 50
    assert characters * (1 - chosen["data.train_split"]) > context  # a window fits into the held-out part


@pytest.mark.parametrize("characters", [2_000, 25_000, 60_000, 300_000, 2_000_000, 10**8])
def test_more_time_gives_no_smaller_a_model(characters):
    sizes = [rule.best_sizes(characters, 1e10 * 1.1**i) for i in range(100)]
    for smaller, larger in itertools.pairwise(sizes):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True)), (smaller, larger)
    assert sizes[0] != sizes[-1]


def test_the_evaluation_halfway_fits_into_the_time():
    typed = ("data.train_split=0.5", "trainer.eval_every_steps=100000")
    chosen = choose(*typed, characters=10_000_000, minutes=3, flops=1e12)
    step_s, evaluation_s = costs(chosen, 10_000_000, 1e12)
    used = chosen["trainer.max_steps"] * step_s + 2 * evaluation_s
    assert 100 < used <= 180 and evaluation_s > 20


def test_given_steps_are_evaluated_as_often_as_they_pay_for():
    chosen = choose("trainer.max_steps=200", characters=1_000_000, minutes=60)
    step_s, evaluation_s = costs(chosen, 1_000_000, 1e11)
    evaluations_s = evaluation_s * -(-200 // chosen["trainer.eval_every_steps"])
    assert evaluations_s < 0.15 * 200 * step_s


def test_a_short_text_keeps_most_of_its_characters_for_training_and_a_window_fits_into_the_rest():
    for characters, held_out in ((1000, 100), (10_000, 1000), (30_000, 1500), (300_000, 15_000), (3_000_000, 20_000)):
        chosen = choose(characters=characters, minutes=0.2, flops=1e10)
        assert characters * (1 - chosen["data.train_split"]) == pytest.approx(held_out, rel=1e-3)
    context = choose("data.block_size=1024", characters=15_000)
    assert 1024 < 15_000 - int(15_000 * context["data.train_split"]) < 1100
    split = choose("data.train_split=0.97", characters=3000)
    assert 1 <= split["data.block_size"] < 3000 - int(3000 * 0.97)


def test_a_killed_run_keeps_its_choice_and_the_command_it_prints_repeats_it(tmp_path, begin):
    text = tmp_path / "a book.txt"
    text.write_text("to be or not to be, that is the question\n" * 60)
    quoted = f"data.path='{text}'"
    first, second = tmp_path / "first", tmp_path / "second"
    command = [*OWN, quoted, "trainer.max_minutes=10", *SMALL, f"run_dir={first}"]
    process = begin(*command, "trainer.save_every_steps=10")
    out = read_until(process, "step 20/")
    process.kill()
    process.wait(timeout=30)
    result = succeed(*command)
    assert "resuming from" in result.stdout and "to repeat this run" not in result.stdout
    config = yaml.safe_load((first / "config.yaml").read_text())
    assert config["run_name"] == "a_book" and config["trainer"]["max_steps"] > 30
    [added] = re.findall("to repeat this run, add: (.*) run_name=NEW_NAME", out)
    result = succeed(*command, *shlex.split(added), f"run_dir={second}")
    assert metrics(first) == metrics(second)
    snapshots = [latest(run) for run in (first, second)]
    assert equal(*(dataclasses.replace(snapshot, config={}) for snapshot in snapshots))


LATE = """
import time, trainer
patched = trainer.Trainer.train
def late(self, deadline=None, **options):
    return patched(self, deadline and time.monotonic() + 1.5, **options)
trainer.Trainer.train = late
"""


def test_a_machine_that_became_slower_ends_in_time_and_the_same_command_finds_the_run_finished(tmp_path):
    text, run_dir = tmp_path / "book.txt", tmp_path / "run"
    text.write_text("to be or not to be, that is the question\n" * 600)
    command = [*OWN, f"data.path={text}", "trainer.max_minutes=10", *SMALL, f"run_dir={run_dir}"]
    result = succeed(*command, nproc=2, script=patched_main(tmp_path, LATE))
    steps, planned = map(int, re.search(r"the time is over: (\d+) steps of (\d+)", result.stdout).groups())
    snapshot = latest(run_dir)
    assert 20 <= steps < planned and snapshot.step == steps and snapshot.progress >= 1
    assert 0.3 < snapshot.seconds < 4
    lines = metrics(run_dir)
    assert [(line["step"], line["split"]) for line in lines[-2:]] == [(steps, "train"), (steps, "val")]
    assert lines[-2]["lr"] < 0.1 * lines[0]["lr"]  # the schedule has ended, too
    assert f"this run is finished: it has {steps} steps of {planned}" in succeed(*command).stdout


def resumed(chosen: dict, *overrides: str, characters: int = 10**9) -> dict:
    """The settings of `overrides`, for a run that was started with those `chosen`."""
    config = settings(*overrides)
    restore_choice(config, characters, chosen)
    return flatten(dataclasses.asdict(config))


def test_steps_that_are_given_without_a_time_decide_the_passes_and_the_evaluations():
    decayed = []
    for steps in (100, 6000):
        chosen = choose("trainer.max_minutes=null", f"trainer.max_steps={steps}", characters=1_000_000)
        decayed.append(chosen["optimizer.weight_decay"] * chosen["optimizer.learning_rate"] * steps)
        assert chosen["trainer.save_every_steps"] == chosen["trainer.eval_every_steps"]
    # Weights decay by more in all, the more passes there are.
    assert 10 < decayed[1] / decayed[0] < 30  # 44 with the same decay
    assert 10 <= 6000 / chosen["trainer.eval_every_steps"] <= sizing.MAX_EVALUATIONS
    again = resumed(chosen, "trainer.max_minutes=null", "trainer.max_steps=6000")
    for key in ("trainer.eval_every_steps", "trainer.save_every_steps"):
        assert again[key] == chosen[key]


def test_the_final_part_is_not_training_text_and_its_scoring_time_is_counted():
    whole = choose(characters=300_000)
    part = choose("data.final_split=0.4", characters=500_000)
    for key in sizing.SIZES:
        assert part[key] == whole[key]
    assert part["data.train_split"] == pytest.approx(0.6 * whole["data.train_split"], abs=1e-6)
    assert part["trainer.max_steps"] < whole["trainer.max_steps"]
    beside = choose(characters=300_000, final=200_000)  # of data.test_path
    assert beside["trainer.max_steps"] == pytest.approx(part["trainer.max_steps"], rel=0.01)


def test_n_gram_decay_grows_with_the_passes_and_short_texts_have_no_n_grams():
    decays = []
    for minutes, characters in ((1, 300_000), (10, 300_000), (10, 80_000)):
        chosen = choose(characters=characters, minutes=minutes)
        assert chosen["model.ngram_rows"] > 0
        decays.append(chosen["optimizer.ngram_decay"])
        assert chosen["optimizer.ngram_decay"] * chosen["optimizer.learning_rate"] < 0.75
    assert decays[0] < decays[1] < decays[2]
    pretrained = choose("init_from=x", characters=300_000, minutes=10)
    assert pretrained["optimizer.ngram_decay"] < decays[0]
    assert pretrained["optimizer.weight_decay"] < chosen["optimizer.weight_decay"]
    assert choose(characters=30_000)["model.ngram_rows"] == 0


def test_neither_n_grams_nor_evaluations_are_added_to_an_older_run():
    older = choose(characters=300_000)
    del older["model.ngram_rows"], older["optimizer.ngram_decay"]
    again = resumed(older, "trainer.max_minutes=1.5")
    assert again["model.ngram_rows"] == again["optimizer.ngram_decay"] == 0
    config = settings("trainer.eval_every_steps=null", recipe="nanogpt_cpu")  # every epoch
    restore_choice(config, 30_000, {"trainer": {"max_steps": 10, "max_minutes": None, "eval_every_steps": 100}})
    assert config.trainer.eval_every_steps is None


@pytest.mark.parametrize("limit", [[], ["trainer.max_steps=1000000"], ["trainer.max_epochs=1000"]])
def test_a_run_that_resumes_keeps_its_choice_and_a_longer_time_trains_on(limit):
    chosen = choose(*limit)
    for minutes in (1.5, 4.5, 1.7, 0.31):
        again = resumed(chosen, f"trainer.max_minutes={minutes}", *limit)
        assert [key for key in sizing.CHOSEN if again[key] != chosen[key]] == []
        assert again["trainer.max_steps"] == round(chosen["trainer.max_steps"] * minutes / 1.5)
        assert resumed(again, f"trainer.max_minutes={minutes}", *limit) == again


def test_a_longer_time_adds_no_passes_that_overfit():
    chosen = choose(characters=200_000)
    again = resumed(chosen, "trainer.max_minutes=60", characters=200_000)
    trained = again["trainer.max_steps"] * again["trainer.batch_size"] * again["data.block_size"]
    passes = trained / (200_000 * again["data.train_split"])
    assert passes == pytest.approx(rule.USEFUL_PASSES, abs=0.1)
    assert resumed(again, "trainer.max_minutes=60", characters=200_000) == again
    # Steps that the user gives are not limited.
    given = ("trainer.max_minutes=null", "trainer.max_steps=100000")
    assert resumed(chosen, *given, characters=200_000)["trainer.max_steps"] == 100_000


def test_the_steps_of_a_run_with_a_time_limit_are_raised_without_it(caplog):
    caplog.set_level("INFO", "gpt")
    chosen = choose("trainer.max_steps=7")
    assert resumed(chosen, "trainer.max_minutes=1.5", "trainer.max_steps=9")["trainer.max_steps"] == 7
    assert "7 steps; to train longer, set trainer.max_steps and trainer.max_minutes=null" in caplog.text
    assert resumed(chosen, "trainer.max_minutes=null", "trainer.max_steps=9")["trainer.max_steps"] == 9
    epochs = resumed(chosen, "trainer.max_minutes=null", "trainer.max_epochs=300")
    assert epochs["trainer.max_steps"] is None
    assert resumed(chosen, "trainer.max_minutes=1e-6")["trainer.max_steps"] == 1


def test_epochs_that_end_sooner_than_the_time_decide_the_steps():
    config = settings("trainer.max_minutes=1", "trainer.max_epochs=1", recipe="nanogpt_cpu")
    config.trainer.max_steps = config.trainer.eval_every_steps = None
    choose_for(config, 20_000, 1, 2e12)
    windows = int(20_000 * config.data.train_split) - config.data.block_size
    assert config.trainer.max_steps == -(-windows // config.trainer.batch_size)
    assert config.trainer.eval_every_steps < config.trainer.max_steps


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_max_minutes_with_a_named_recipe_sets_only_the_steps(device):
    config = settings("trainer.max_minutes=1", recipe="nanogpt_cpu")
    config.model.vocab_size = 65
    before = flatten(dataclasses.asdict(config))
    after, *_ = choose_for(config, 1_000_000, 1, 4e11, device)
    changed = {key for key in after if after[key] != before[key]}
    assert changed - {"trainer.compile"} == {"trainer.max_steps"} and (len(changed) == 2) == (device == "cuda")
    assert 4000 < after["trainer.max_steps"] < 6000


def test_steps_on_a_gpu_are_larger_where_the_text_and_the_time_allow():
    def step(**where):
        chosen = choose(**where)
        return chosen["trainer.batch_size"] * chosen["data.block_size"]

    gpu = {"characters": 10_000_000, "minutes": 3, "flops": 1e14}
    assert step(**gpu, device="cuda") > 4 * step(**gpu, device="cpu")
    for less in ({"characters": 100_000}, {"flops": 1e11}):
        assert step(**(gpu | less), device="cuda") == step(**(gpu | less), device="cpu")


@pytest.mark.parametrize(
    "characters, minutes, typed, compiled, timed",
    [
        (10_000_000, 3, "auto", "true", ["false", "auto", "true"]),
        (10_000_000, 0.5, "auto", "false", ["false", "auto"]),
        (100_000, 3, "auto", "false", ["false", "auto"]),
        (10_000_000, 0.5, "true", "true", ["false", "true"]),
        (10_000_000, 3, "false", "false", ["false", "false"]),
    ],
)
def test_a_gpu_compiles_the_chosen_model_where_the_training_is_long(
    characters, minutes, typed, compiled, timed, monkeypatch
):
    monkeypatch.setattr(sizing, "missing_to_compile", lambda device: None)
    config = settings(f"trainer.max_minutes={minutes:g}", f"trainer.compile={typed}")
    chosen, overrides, tried = choose_for(config, characters, minutes, 1e13, "cuda")
    assert tried == timed
    assert chosen["trainer.compile"] == compiled
    assert (f"trainer.compile={compiled}" in overrides) == (typed == "auto")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_time_to_sample_is_reserved_on_a_gpu(device):
    gpu = {"characters": 10_000_000, "minutes": 0.5, "flops": 1e13, "device": device}
    drawn, silent = (choose(f"samples={samples}", **gpu)["trainer.max_steps"] for samples in ("true", "false"))
    assert 0.8 * silent < drawn < 0.95 * silent


def test_two_steps_are_timed_if_each_takes_half_a_minute(monkeypatch):
    clock = itertools.chain([0, 90], itertools.cycle([100, 130]))  # the first step takes longer
    monkeypatch.setattr(sizing.time, "perf_counter", lambda: next(clock))
    trainer = MagicMock(**{"step.return_value": (torch.zeros(()),), "state.step": 0, "plan.total_steps": 9})
    assert sizing.time_steps(trainer) == 30


@pytest.mark.parametrize(
    "typed, characters, minutes, says",
    [
        ("report=true", 999, 1.5, "x.txt: 999 characters are too few to choose a model for"),
        ("data.final_split=0.9", 5000, 1.5, "x.txt: 500 characters beside data.final_split=0.9 are"),
        ("report=true", 100_000, 0.001, "trainer.max_minutes=0.001: too short"),
        ("optimizer.name=adamw", 200_000, 1.5, "optimizer.name=adamw: a learning rate is chosen for muon"),
    ],
)
def test_what_nothing_can_be_chosen_for_gets_one_line(typed, characters, minutes, says):
    with pytest.raises(UserError, match=re.escape(says)):
        choose(typed, characters=characters, minutes=minutes)
    assert choose("trainer.max_steps=2", minutes=0.001)["trainer.max_steps"] == 2  # needs no time


def test_a_run_without_max_minutes_refuses_it_later():
    config = settings("trainer.max_minutes=1", recipe="nanogpt_cpu")
    recorded = {"data.path": config.data.path, "trainer.max_steps": 10, "trainer.max_minutes": None}
    for steps in (None, 11):
        config.trainer.max_steps = steps
        with pytest.raises(UserError, match=r"give trainer\.max_steps above 10 or trainer\.max_epochs, and no"):
            restore_choice(config, 30_000, recorded)
    config.trainer.max_steps = None
    restore_choice(config, 30_000, recorded | {"data.path": "another.txt"})  # refused by the Trainer
    assert config.trainer.max_steps == 10


@pytest.mark.parametrize(
    "path, name",
    [
        ("/a/My Book.txt.gz", "My_Book"),
        ("notes.2024.txt", "notes_2024"),
        ("https://host.org/book.markdown?token=secret", "book"),
        ("books/*.txt", "books"),
        (["b/one.txt", "two.txt"], "one"),
        ("*", "text"),
    ],
)
def test_a_run_is_named_after_its_text(path, name):
    assert text_name(path) == name
