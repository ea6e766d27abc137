"""The program as its users start it: the command line, the recipes, and every bad input."""

import dataclasses
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
from operator import attrgetter

import pytest
import torch
import yaml
from conftest import LONG, ROOT, TINY, UNREAD, best, command, latest, metrics, shows_code, start, succeed, wait_until
from omegaconf import OmegaConf

import main
from char_dataset import CharDataset, DataConfig
from config import Config, as_config, compose, help_text
from engine.config.overrides import TEXTS, add_default_recipe
from engine.config.schema import HIDDEN, KEYS
from engine.errors import UserError
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from sample import SampleConfig, score
from trainer import TrainerConfig

RECIPES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def composed(*overrides: str) -> Config:
    return as_config(compose(list(overrides)))


def refuse(*arguments: str, says: str, nproc: int = 0, **kwargs) -> None:
    """The program must end with an error status and one line, which says `says`, from every rank that prints."""
    result = start(*arguments, nproc=nproc, **kwargs)
    assert result.returncode != 0, result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors and all(says in line for line in errors), result.stderr
    if not nproc:  # torchrun adds a summary of its own
        assert result.stderr.splitlines() == errors and len(errors) == 1, result.stderr
    assert not shows_code(result.stderr), result.stderr


# --- recipes ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_says_how_to_run_it(recipe):
    config = composed(f"experiment={recipe}")
    name = "input" if recipe.startswith("auto") else recipe  # that of the text
    assert config.run_name == name and config.run_dir == f"runs/{name}"
    lines = (ROOT / "conf" / "experiment" / f"{recipe}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_" and f"main.py experiment={recipe}" in lines[1]
    if not recipe.startswith("auto"):  # whose sizes are chosen for a text
        with torch.device("meta"):
            model = GPT(dataclasses.replace(config.model, vocab_size=65))
        assert create_optimizer(model, config.optimizer).param_groups


NANOGPT = {
    "model.arch model.bias model.tie_weights": ["gpt2", False, True],
    "trainer.max_epochs trainer.grad_norm_clip": [None, 1.0],
    "optimizer.name optimizer.learning_rate optimizer.weight_decay": ["adamw", 1e-3, 0.1],
    "optimizer.beta1 optimizer.beta2 optimizer.decay_embeddings": [0.9, 0.99, True],
    "optimizer.schedule optimizer.warmup_steps optimizer.min_lr_ratio": ["cosine", 100, 0.1],
}
SIZES = "model.n_layer model.n_head model.n_embd data.block_size"
DROPOUT = "model.embd_pdrop model.resid_pdrop model.attn_pdrop"
STEPS = "trainer.max_steps trainer.batch_size"
ANCESTORS = {
    "mingpt_ddp": {
        SIZES: [8, 8, 512, 128],
        DROPOUT: [0.1] * 3,
        "model.arch model.bias model.tie_weights": ["gpt2", True, False],
        "data.train_split data.truncate": [0.9, 0.02],
        "trainer.max_epochs trainer.max_steps trainer.save_every": [10, None, 3],
        "trainer.batch_size trainer.grad_norm_clip trainer.amp_dtype": [216, 1.0, "auto"],
        "optimizer.name optimizer.learning_rate optimizer.weight_decay": ["adamw", 3e-4, 0.1],
        "optimizer.schedule optimizer.warmup_steps": ["constant", 0],
    },
    "nanogpt_cpu": NANOGPT | {SIZES: [4, 4, 128, 64], DROPOUT: [0.0] * 3, STEPS: [2000, 12]},
    "nanogpt_baby": NANOGPT | {SIZES: [6, 6, 384, 256], DROPOUT: [0.2] * 3, STEPS: [5000, 64]},
}


@pytest.mark.parametrize("recipe", ANCESTORS)
def test_mingpt_and_nanogpt_recipes_have_the_original_hyperparameters(recipe):
    config = composed(f"experiment={recipe}")
    for keys, values in ANCESTORS[recipe].items():
        assert list(attrgetter(*keys.split())(config)) == values, keys


def test_the_overfit_recipe_reaches_its_training_loss(tmp_path):
    # A quarter of the recipe's characters will do.
    short = ["trainer.max_steps=100", "trainer.batch_size=16", "trainer.threads=1", "report=false", "samples=false"]
    succeed("experiment=overfit", "data=pydoc", *short, f"run_dir={tmp_path}")
    assert metrics(tmp_path, "train")[-1]["loss"] < 0.15


# --- Hydra ---


def test_help_prints_every_field_with_its_meaning():
    lines = help_text().splitlines()
    for key in KEYS:
        shown = [x for x in lines if x.startswith(f"  {key}=")]
        assert len(shown) == (key not in HIDDEN)
        for line in shown:
            assert re.search(r"  .*  [A-Za-z]\w+(\[\w+\])?( \| \w+)?  +\S.{8}", line), line


def test_the_configuration_printed_without_a_recipe_has_none(tmp_path):
    result = start("experiment=null", "--cfg", "job", cwd=tmp_path)
    shown = yaml.safe_load(result.stdout)
    assert {"data", "model", "optimizer", "trainer", "run_name", "run_dir"} <= set(shown)
    assert result.returncode == 0 and shown["run_name"] == "run" and shown["trainer"]["seed"]
    assert os.listdir(tmp_path) == []


def test_an_optimizer_that_is_named_comes_with_its_own_settings():
    def learning_rate(*overrides: str) -> float:
        return composed("experiment=shakespeare_cpu", *overrides).optimizer.learning_rate

    assert learning_rate() == 8e-3 and learning_rate("optimizer=adamw") == 3e-4
    assert learning_rate("optimizer=adamw", "optimizer.learning_rate=1e-3") == 1e-3
    for recipe in (ROOT / "conf" / "experiment").iterdir():  # they name a file of conf/optimizer/
        assert "optimizer" not in yaml.safe_load(recipe.read_text()), recipe


def test_the_names_of_the_tutorial_are_accepted():
    typed = ["max_epochs=2", "save_every=3", "use_amp=false", "amp_dtype=bfloat16"]
    trainer = composed("experiment=mingpt_ddp", *(f"trainer.{setting}" for setting in typed)).trainer
    assert (trainer.max_epochs, trainer.save_every, trainer.amp_dtype) == (2, 3, "float32")
    assert dataclasses.replace(trainer) == trainer
    assert TrainerConfig(use_amp=True).amp_dtype == "auto"
    assert TrainerConfig(snapshot_path=None).snapshot_path == TrainerConfig().snapshot_path
    assert GPTConfig(model_type="gpt-nano", block_size=7).block_size == 7


@pytest.mark.parametrize(
    "has_gpu, has_bfloat16, recipe, own",
    [(True, True, "gpu", "auto_gpu"), (False, True, "cpu", "auto"), (False, False, "half", "auto")],
)
def test_the_default_recipe_fits_the_machine(has_gpu, has_bfloat16, recipe, own, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("engine.config.overrides.computes_in_bfloat16", lambda _: has_bfloat16)
    assert add_default_recipe(["data=pydoc"]) == [f"experiment=shakespeare_{recipe}", "data=pydoc"]
    assert add_default_recipe(["data=text", "data.path=x"])[0] == f"experiment={own}"
    assert add_default_recipe(["trainer.device=cpu"])[0] != "experiment=shakespeare_gpu"


@pytest.mark.parametrize(
    "typed, added",
    [
        ("trainer.max_minutes=1", "trainer.max_steps=null trainer.max_epochs=null"),
        ("trainer.max_minutes=1 trainer.max_steps=5", ""),
        ("trainer.max_steps=5", ""),
        ("data.path=x trainer.max_steps=5", "trainer.max_minutes=null"),
        ("data.path=x trainer.max_steps=5 trainer.max_minutes=1", ""),
    ],
)
def test_a_typed_limit_replaces_that_of_the_default_recipe(typed, added):
    chosen = add_default_recipe(["trainer.device=cpu", *typed.split()])
    assert chosen[1:] == [*added.split(), "trainer.device=cpu", *typed.split()]


def test_flags_may_stand_between_overrides():
    typed = ["experiment=auto", "--cfg", "job", "run_name=a", "-m", "trainer.seed=1,2"]
    overrides = [argument for argument in typed if argument not in ("--cfg", "job", "-m")]
    assert add_default_recipe(typed) == ["--cfg", "job", "-m", *overrides]


TYPED = ["1_1", "1e3", "true", "-1.50", "книга.txt", "my-file (1).txt", "s3://a/?b=1&c=2", "<|endoftext|>", "a#b"]
TYPED += ["\t", "\n", " a", "it's", "~/a", "C:\\a\\", r"\n", "[ab]*", ","]


@pytest.mark.parametrize("value", TYPED)
def test_a_text_is_taken_as_typed(value):
    keys = [key for key in TEXTS if not key.startswith("model.")]  # which does not go with init_from
    composed = main.configure("experiment=overfit", "data=text", *(f"{key}={value}" for key in keys))
    assert {OmegaConf.select(composed, key) for key in keys} == {value}


def test_a_text_with_a_meaning_to_hydra_keeps_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1,b=2").mkdir()
    assert add_default_recipe(["-m", "experiment=x", "init_from=a=1,b=2"])[-1] == 'init_from="a=1,b=2"'
    values = ["null", "[a,b]", "a,b", "a${run_dir}", "'é'", '"é"', r"a\,b", "glob(*)", "choice(é,b)", '["é",b]', ""]
    typed = ["-m", "experiment=overfit", *(f"data.path={value}" for value in values)]
    assert add_default_recipe(typed) == typed
    typed = ["-m", "experiment=overfit", "data.path=é,b", "data.path=[é, b (1)]"]
    assert add_default_recipe(typed) == [*typed[:2], 'data.path="é","b"', 'data.path=["é","b (1)"]']
    typed = ["experiment=overfit", "data.separator=[SEP]", "run_name={a:1}"]  # settings that are no lists
    assert add_default_recipe(typed) == [typed[0], 'data.separator="[SEP]"', 'run_name="{a:1}"']


@pytest.mark.parametrize(
    "recipe, says",
    [
        (b"# @package _global_\n\trun_name: a", 'mine.yaml", line 2, column 1'),
        ("# @package _global_\nrun_name: é".encode("latin-1"), "mine.yaml: must be UTF-8"),
        (b"run_name: a", "In 'experiment/mine': a recipe must begin with # @package _global_"),
    ],
)
def test_a_recipe_that_cannot_be_read_gets_one_line(recipe, says, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(recipe)
    refuse(f"--config-dir={tmp_path}", "experiment=mine", "data=pydoc", says=says, cwd=tmp_path)


def test_a_run_directory_holds_what_the_contract_says_and_a_finished_run_keeps_it(tmp_path):
    run = tmp_path / "deep" / "run"
    succeed(*TINY, f"run_dir={run}", cwd=tmp_path)
    assert os.listdir(tmp_path) == ["deep"]  # nothing beside it, no outputs/, no .hydra
    config = yaml.safe_load((run / "config.yaml").read_text())
    snapshot = latest(run)
    assert config == snapshot.config and config["model"]["vocab_size"] == len(snapshot.vocabulary)
    assert "held-out loss" in (run / "main.log").read_text()

    elsewhere = start(*TINY, f"trainer.snapshot_path={run}/gpt_snapshot.pt", f"run_dir={tmp_path}/other")
    assert elsewhere.returncode == 0 and "this run is finished" in elsewhere.stdout
    assert "cannot" not in elsewhere.stdout and os.listdir(tmp_path) == ["deep"]

    (run / "environment.jsonl").unlink()  # a report needs it, the run does not
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix not in (".log", ".owner", "")}
    result = start(*TINY, f"run_dir={run}", "optimizer.learning_rate=0.5")
    assert result.returncode == 0 and "optimizer.learning_rate was 0.0003, is 0.5" in result.stdout
    refuse(*TINY, f"run_dir={run}", "data.truncate=0.03", says="data.truncate was 0.02, is 0.03")
    assert before == {path: path.read_bytes() for path in before}


# --- bad input ---


IMPOSSIBLE = [
    ("data.path", [None, "", [], ["a", None], ["a", ["b"]]]),
    ("data.train_split", [0.0, 1.0]),
    ("data.truncate", [0.0, 1.5]),
    ("data.cache_dir", ["", "s3://bucket/cache"]),
    ("model.arch model.model_type optimizer.name optimizer.schedule", ["perhaps"]),
    ("trainer.amp_dtype trainer.compile trainer.resume trainer.strategy", ["perhaps"]),
    ("model.n_layer model.n_embd model.ngram_rows", [2**63 - 1]),  # the sizes overflow
    ("model.attn_pdrop optimizer.beta2", [1.0]),
    ("optimizer.learning_rate", [0.0, math.inf, math.nan]),
    ("optimizer.min_lr_ratio", [2.0]),
    ("optimizer.weight_decay optimizer.warmup_steps trainer.data_loader_workers trainer.seed", [-1]),
    ("trainer.batch_size", [0, 2**20 + 1]),
    ("data.block_size model.n_layer trainer.max_epochs trainer.max_steps trainer.max_minutes", [0]),
    ("trainer.micro_batch_size trainer.grad_norm_clip trainer.keep_snapshots trainer.patience", [0]),
    ("trainer.save_every trainer.save_every_steps trainer.eval_every_steps trainer.log_every_steps", [0]),
    ("trainer.threads trainer.timeout_s", [0]),
]
KINDS = {"data": DataConfig, "model": GPTConfig, "optimizer": OptimizerConfig, "trainer": TrainerConfig}


@pytest.mark.parametrize(
    "key, value, others",
    [
        *((key, value, {}) for keys, values in IMPOSSIBLE for key in keys.split() for value in values),
        ("data.url", "c.txt", {"path": ["a.txt", "b.txt"]}),
        ("model.n_embd", 10, {"n_head": 3}),  # does not divide
        ("model.n_embd", 12, {"n_head": 4, "arch": "modern"}),  # an odd head
        ("model.bias", True, {"arch": "modern"}),
    ],
)
def test_an_impossible_setting_is_refused_by_name(key, value, others):
    group, _, name = key.partition(".")
    with pytest.raises(UserError) as refused:
        KINDS[group](**{name: value, **others})
    assert str(refused.value).lower().startswith(f"{key}={value}: ".lower())


@pytest.mark.parametrize(
    "override, says",
    [
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("trainer.quux=1", "trainer.quux: unknown key; python main.py --help lists all"),
        ("model.depth=8", "model.depth: unknown key; did you mean model.n_layer?"),  # not data.path
        ("+model.n_layr=3", "model.n_layr: unknown key; did you mean model.n_layer?"),
        ("report=perhaps", "report: Value 'perhaps' is not a valid bool"),
        ("trainer.trackers=wandb", "trainer.trackers: must be a list"),
        ("model.model_type=gpt-mini", "model.n_layer=null model.n_head=null model.n_embd=null"),
        ("optimizer.schedule=[wsd]", "optimizer.schedule: Cannot convert 'list' to string"),
        ("data=book.txt", "a text of your own: data=text data.path=FILE"),
        ("optimizer=ä", "quoted twice: 'optimizer=\"ä\"'"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib: not installed: pip install hydra-joblib-launcher"),
        ("data=text data.path=a,b.txt", "'data.path=a,b.txt' 1. To use it as a list, use key=[value1,value2]"),
        ("book.txt", "book.txt: settings are KEY=VALUE, as in data=text data.path=FILE"),
        ("data=text", "data.path: missing"),
        ("model=null", "model=null: must name a file in conf/model"),
        ("run_name=", "run_name: must not be empty"),
        ("run_name=..", "run_name=..: must be a name without a slash"),
        ("run_name=a/b", "run_name=a/b: must be a name without a slash"),
        ("data.held_out=[5]", "data.held_out=[5]: must be [FROM,TO], two increasing numbers"),
        ("data.val_path=a data.held_out=[0,9]", "data.held_out= and data.val_path=: give only one of them"),
        ("data.val_path=a data.train_split=0.5", "data.val_path= and data.train_split=: give only one of them"),
        ("trainer.log_every_steps=null", "trainer.log_every_steps: must not be null"),
        ("model.vocab_size=10", "follows from"),
        ("data=/a/book.txt", "data=/a/book.txt: no such file; choose from"),
        ("trainer.seed =3", "=3: settings are KEY=VALUE, without spaces"),
        ("--lr=3", "--lr=3: settings have no dashes; did you mean optimizer.learning_rate=?"),
        ("~trainer.max_steps", "trainer.max_steps: TrainerConfig (DictConfig) does not support"),
        ("trainer.seed=${foo}", "trainer.seed: Interpolation key 'foo' not found"),
    ],
)
def test_a_bad_setting_is_explained_with_the_right_one(override, says):
    settings = ["experiment=overfit", *(["data=pydoc"] if not override.startswith("data") else [])]
    with pytest.raises(UserError) as refused:
        composed(*settings, *override.split())
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "override, says",
    [
        ("model.n_layr=3", "model.n_layr: unknown key; did you mean model.n_layer?"),
        ("trainer.batch_size=many", "trainer.batch_size: Value 'many' of type 'str' could not be converted to Integer"),
        ("run_dir=/proc/nowhere", "run_dir=/proc/nowhere"),
        ("trainer.snapshot_path=a/", "trainer.snapshot_path=a/: must name a file"),
        ("trainer.snapshot_path=./job.yaml", "./job.yaml: must name a file of"),
        ("hydra.run.dir=/proc/nowhere", "/proc/nowhere: No such file or directory"),
    ],
)
def test_a_bad_setting_gets_one_line(override, says, tmp_path):
    refuse("experiment=overfit", "data=pydoc", f"run_dir={tmp_path / 'run'}", override, says=says, cwd=tmp_path)
    left = set(os.listdir(tmp_path / "run")) if (tmp_path / "run").exists() else set()
    assert left <= {".lock", ".gpt_snapshot.pt.lock", "main.log"}


def test_two_processes_refuse_a_bad_setting_together_and_exit(tmp_path):
    says = "=1: must be at least the number of processes, 2"
    refuse(*TINY, f"run_dir={tmp_path / 'run'}", "trainer.batch_size=1", says=says, nproc=2, timeout=60)
    # Nothing was trained. torchrun may end rank 0 before it removes its directory.
    assert not {path.name for path in tmp_path.glob("run/*")} & {"gpt_snapshot.pt", "metrics.jsonl", "config.yaml"}


def test_two_runs_do_not_share_their_snapshots(tmp_path, begin):
    shared = f"trainer.snapshot_path={tmp_path / 'shared.pt'}"
    sweep = [*TINY, "optimizer.learning_rate=1e-3,1e-2", f"run_dir={tmp_path / 'run'}"]
    result = start("-m", *sweep, shared)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: trainer.snapshot_path" in result.stderr.splitlines()[-1]
    assert result.stdout.count("all jobs of the sweep would share it") == 2
    apart = "trainer.snapshot_path='memory://${run_dir}/s.pt'"
    result = start("-m", *sweep, apart)
    assert result.returncode == 0 and result.stdout.count("step 6/6 | held-out") == 2
    first = begin(*LONG, shared, f"run_dir={tmp_path / 'a'}")
    wait_until((tmp_path / "a" / "metrics.jsonl").exists, first)
    refuse(*LONG, shared, f"run_dir={tmp_path / 'b'}", says="shared.pt: another run is using it")
    second = start(*LONG, f"run_dir={tmp_path / 'a'}", nproc=2)
    assert second.returncode != 0 and "another run is using it" in second.stderr and first.poll() is None


def test_a_closed_output_pipe_neither_ends_the_run_nor_prints_errors(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        command(*TINY, f"run_dir={tmp_path}"), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
    assert "held-out loss" in (tmp_path / "main.log").read_text() and (tmp_path / "gpt_snapshot.pt").exists()


@pytest.mark.parametrize("script", ["main.py", "sample.py", "report.py", "export.py", "main.py --cfg job"])
def test_help_that_cannot_be_written_is_one_line(script):
    with open("/dev/full", "w") as full:
        program, *asked = script.split()
        line = command(*(asked or ["--help"]), script=program)
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1 and re.fullmatch("error: .*standard output.*\n", result.stderr), result.stderr


def test_names_that_are_not_utf8_are_used_and_reported(tmp_path, text_file):
    text, run = (os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/\xff.txt", b"/run\xe9"))
    os.rename(text_file, text)
    succeed(*UNREAD, "data.block_size=16", f"data.path={text}", f"run_dir={run}", "report=true")
    assert "/run?/report.html" in open(f"{run}/main.log").read() and os.path.exists(f"{run}/report.html")
    succeed(f"run_dir={run}", f"out={tmp_path / 'model'}", script="export.py")
    shutil.copytree(run, tmp_path / "other")
    report = start(f"run_dirs=[{run},{tmp_path / 'other'}]", script="report.py")
    assert (report.returncode, report.stderr) == (0, "")


def test_closed_standard_streams_change_no_exit_status(tmp_path):
    train, sample = command(*TINY, f"run_dir={tmp_path}"), command(f"run_dir={tmp_path}", script="sample.py")
    for program in map(shlex.join, (train, sample)):
        assert subprocess.run(f"exec {program} <&- >&- 2>&-", shell=True, cwd=ROOT, timeout=120).returncode == 0
    assert (tmp_path / ".lock").read_bytes() == b""


def test_initial_weights_depend_on_the_seed(tmp_path):
    """What a step with hardly any learning rate leaves of them."""
    still = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1"]
    weights = []
    for seed in (1, 2):
        main.train(main.configure(*TINY, *still, f"trainer.seed={seed}", f"run_dir={tmp_path / str(seed)}"))
        weights.append(latest(tmp_path / str(seed)).model_state["tok_emb.weight"])
    assert not torch.allclose(*weights)


FINAL = ["data.train_split=0.6", "data.final_split=0.2"]


def test_the_final_part_is_scored_once_by_the_best_snapshot(tmp_path):
    worse = ["optimizer.learning_rate=3", "optimizer.warmup_steps=6", "trainer.eval_every_steps=1"]
    settings = [*TINY, *FINAL, *worse, f"run_dir={tmp_path}"]
    for steps in (6, 6, 8):  # 8: again, as it trains longer
        main.train(main.configure(*settings, f"trainer.max_steps={steps}"))
        assert [line["step"] for line in metrics(tmp_path, "final")] == [steps]
    [line] = [line for line in metrics(tmp_path) if line["split"] == "final"]
    data = DataConfig(path="pydoc:topics", truncate=0.02, train_split=0.6, final_split=0.2)
    final = CharDataset(data).final_part()
    (tmp_path / "final.txt").write_text(final.decode(final.data))
    scored = SampleConfig(score=str(tmp_path / "final.txt"), device="cpu")
    losses = score(scored, best(tmp_path))
    assert line["loss"] == pytest.approx(losses.mean().item(), rel=1e-4) and line["tokens"] == losses.numel()
    assert line["scored_step"] < line["step"]


def test_a_failed_final_score_is_an_error_after_the_report(tmp_path, monkeypatch):
    def fail(*_, **named):
        raise UserError("no score")

    monkeypatch.setattr("main.evaluate", fail)
    settings = [*TINY, "report=true", *FINAL, f"run_dir={tmp_path}"]
    with pytest.raises(UserError, match="no score"):
        main.train(main.configure(*settings))
    assert (tmp_path / "report.html").exists()


def test_processes_that_read_different_texts_do_not_train_together(text_file, monkeypatch):
    config = Config()
    config.data = DataConfig(path=str(text_file), block_size=8)
    monkeypatch.setattr("config.all_gather", lambda own: [own, own | {"text": "another"}])
    with pytest.raises(UserError, match=r"text: the ranks differ, \w+ and another"):
        main.load_text(config, None)


def test_a_model_larger_than_memory_gets_one_line(tmp_path):
    def limit_memory():
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))

    wide = [*TINY, f"run_dir={tmp_path / 'run'}", "model.n_embd=100000"]
    result = start(*wide, preexec_fn=limit_memory)
    assert result.returncode == 1 and "error: out of memory (" in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_resumed_run_names_a_change_that_leaves_too_little_held_out_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = [*TINY, 'run_dir="~/run"', "trainer.max_steps=1"]
    main.train(main.configure(*settings))
    assert (tmp_path / "run" / "gpt_snapshot.pt").exists()
    with pytest.raises(UserError, match=r"another run: data.final_split was 0.0, is 0.099\."):
        main.train(main.configure(*settings, "data.final_split=0.099"))


def test_what_overrides_entail_is_said(tmp_path, text_file):
    recipe = ["experiment=shakespeare_quick", "data=text", f"data.path={text_file}", f"run_dir={tmp_path / 'run'}"]
    small = ["model.n_embd=32", "model.n_head=2", "model.ngram_rows=0", "data.block_size=8", "trainer.device=cpu"]
    small += ["trainer.batch_size=128"]
    epochs = "trainer.max_steps=null", "trainer.max_epochs=1"
    result = succeed(*recipe, *small, *epochs, "optimizer.warmup_steps=99")
    steps = latest(tmp_path / "run").step
    assert f"warning: optimizer.warmup_steps=99: the run has only {steps}" in result.stdout
    assert "trainer.batch_size=128, in the recipe 16: the learning rate stays 0.011" in result.stdout
    result = succeed(*recipe, *small, "trainer.max_steps=40", "optimizer.warmup_steps=0")
    assert re.search(f"warning: the learning rate rises from .*: it follows 40 steps, no longer {steps}", result.stdout)
