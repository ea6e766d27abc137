"""The program as its users start it: the command line, the recipes, and every bad input."""

import os
import re
import subprocess

import pytest
import torch
import yaml
from conftest import ROOT, RUN_FILES, TINY, command, metrics, start, wait_until
from hydra import compose, initialize_config_dir

from char_dataset import DataConfig
from config import SCHEMA, Config, validate
from engine.config.overrides import with_recipe
from engine.errors import UserError
from engine.parallel.distributed import World
from engine.snapshots.storage import load
from main import configure
from parts import load_text, warn_of_memory

RECIPES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return validate(compose("config", overrides=list(overrides)))


def refuse(*arguments: str, says: str, nproc: int = 0, **kwargs) -> None:
    """The program must end with an error status and one line, which says `says`, from every rank
    that prints.
    """
    result = start(*arguments, nproc=nproc, **kwargs)
    assert result.returncode != 0, result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors and all(says in line for line in errors), result.stderr
    if not nproc:  # torchrun adds a summary of its own
        assert result.stderr.splitlines() == errors and len(errors) == 1, result.stderr
    # No traceback of ours; torchrun has its own.
    assert not re.search(rf'File "{ROOT}/\w+\.py', result.stderr), result.stderr


# --- recipes ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_says_how_to_run_it(recipe):
    config = composed(f"experiment={recipe}")
    name = "input" if recipe.startswith("auto") else recipe  # that of the text
    assert config.run_name == name and config.run_dir == f"runs/{name}"
    lines = (ROOT / "conf" / "experiment" / f"{recipe}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_" and f"main.py experiment={recipe}" in lines[1]
    assert lines[2].startswith("# ") and len(lines[2]) > 40  # what it is and reaches


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_two_steps(recipe, tmp_path):
    result = start(
        f"experiment={recipe}",
        "data=pydoc",
        "trainer.max_steps=2",
        "trainer.batch_size=2",
        "model.n_layer=1",  # or writing the snapshots of some takes half a minute
        "trainer.device=cpu",
        "trainer.compile=false",
        "report=false",
        "samples=false",
        f"data.truncate={0.02 if recipe == 'mingpt_ddp' else 0.012}",
        f"run_dir={tmp_path}",
    )
    assert result.returncode == 0, result.stderr
    assert metrics(tmp_path)[-1]["step"] == 2


def values(config, names: str) -> list:
    return [getattr(config, name) for name in names.split()]


SIZES = "arch n_layer n_head n_embd bias tie_weights"
DROPOUT = "embd_pdrop resid_pdrop attn_pdrop"


def test_the_ancestors_recipe_has_its_hyperparameters():
    c = composed("experiment=mingpt_ddp")
    assert values(c.model, SIZES) == ["gpt2", 8, 8, 512, True, False]
    assert values(c.model, DROPOUT) == [0.1] * 3
    assert values(c.data, "block_size train_split truncate") == [128, 0.9, 0.02]
    assert values(c.trainer, "max_epochs max_steps save_every") == [10, None, 3]
    assert values(c.trainer, "batch_size grad_norm_clip use_amp") == [216, 1.0, True]
    assert values(c.optimizer, "name learning_rate weight_decay") == ["adamw", 3e-4, 0.1]
    assert values(c.optimizer, "schedule warmup_steps") == ["constant", 0]


@pytest.mark.parametrize(
    "recipe, sizes, steps, batch, block, dropout",
    [
        ("nanogpt_cpu", [4, 4, 128], 2000, 12, 64, 0.0),
        ("nanogpt_baby", [6, 6, 384], 5000, 64, 256, 0.2),
    ],
)
def test_nanogpts_recipes_have_its_hyperparameters(recipe, sizes, steps, batch, block, dropout):
    c = composed(f"experiment={recipe}")
    assert values(c.model, SIZES) == ["gpt2", *sizes, False, True]
    assert values(c.model, DROPOUT) == [dropout] * 3 and c.data.block_size == block
    trainer = values(c.trainer, "max_steps max_epochs batch_size grad_norm_clip")
    assert trainer == [steps, None, batch, 1.0]
    optimizer = values(c.optimizer, "name learning_rate weight_decay beta1 beta2")
    assert optimizer == ["adamw", 1e-3, 0.1, 0.9, 0.99]
    schedule = values(c.optimizer, "schedule warmup_steps min_lr_ratio decay_embeddings")
    assert schedule == ["cosine", 100, 0.1, True]


def test_overfit_learns_its_text_by_heart(tmp_path):
    short = ["trainer.max_steps=100", "trainer.threads=1"]  # half of the recipe's steps will do
    result = start("experiment=overfit", "data=pydoc", *short, f"run_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert metrics(tmp_path, "train")[-1]["loss"] < 0.15


# --- Hydra ---


def test_help_prints_every_field_with_its_meaning_and_cfg_the_configuration(tmp_path):
    result = start("--help", cwd=tmp_path)
    assert result.returncode == 0
    for key in SCHEMA.keys:
        line = next(x for x in result.stdout.splitlines() if x.startswith(f"  {key}="))
        assert re.search(r"  .*  [A-Za-z]\w+(\[\w+\])?( \| \w+)?  +\S.{8}", line), line
    result = start("--cfg", "job", cwd=tmp_path)
    config = yaml.safe_load(result.stdout)
    assert {"data", "model", "optimizer", "trainer", "run_name", "run_dir"} <= set(config)
    assert os.listdir(tmp_path) == []


def test_without_a_recipe_the_configuration_printed_has_none(tmp_path):
    result = start("experiment=null", "--cfg", "job", cwd=tmp_path)
    shown = yaml.safe_load(result.stdout)
    assert result.returncode == 0 and shown["run_name"] == "run" and shown["trainer"]["seed"]


def test_an_optimizer_that_is_named_comes_with_its_own_settings():
    def learning_rate(*overrides: str) -> float:
        composed = configure("experiment=shakespeare_cpu", *overrides)
        return validate(composed).optimizer.learning_rate

    assert learning_rate() == 8e-3 and learning_rate("optimizer=adamw") == 3e-4
    assert learning_rate("optimizer=adamw", "optimizer.learning_rate=1e-3") == 1e-3


def test_without_arguments_the_recipe_for_this_machine_is_chosen_and_said(tmp_path):
    result = start("data=pydoc", "trainer.max_steps=1", f"run_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert re.match("recipe      shakespeare_(cpu|float32|gpu), which fits this machine", first)
    assert "--help lists the others" in first


@pytest.mark.parametrize("has_bfloat16, recipe", [(True, "cpu"), (False, "float32")])
def test_the_recipe_for_a_cpu_depends_on_its_bfloat16(has_bfloat16, recipe, monkeypatch):
    monkeypatch.setattr("engine.config.overrides.computes_in_bfloat16", lambda _: has_bfloat16)
    chosen = with_recipe(["trainer.device=cpu", "data=pydoc"])
    assert chosen == [f"experiment=shakespeare_{recipe}", "trainer.device=cpu", "data=pydoc"]
    chosen = with_recipe(["trainer.device=cpu", "data=text", "data.path=x"])
    assert chosen[0] == "experiment=auto"


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
def test_what_ends_a_run_is_what_was_typed(typed, added):
    chosen = with_recipe(["trainer.device=cpu", *typed.split()])
    assert chosen[1:] == [*added.split(), "trainer.device=cpu", *typed.split()]


def test_a_run_directory_holds_what_the_contract_says(tmp_path):
    run = tmp_path / "deep" / "run"
    result = start(*TINY, f"run_dir={run}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {p.name for p in run.iterdir()} - {"tensorboard"} == RUN_FILES
    assert os.listdir(tmp_path) == ["deep"]  # nothing beside it, no outputs/, no .hydra
    config = yaml.safe_load((run / "config.yaml").read_text())
    snapshot = load(str(run / "gpt_snapshot.pt"))
    assert config == snapshot.config and config["model"]["vocab_size"] == len(snapshot.vocabulary)
    assert "held-out loss" in (run / "main.log").read_text()


def test_the_directory_of_hydra_is_the_directory_of_the_run(tmp_path):
    result = start(*TINY, f"hydra.run.dir={tmp_path / 'here'}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here" / "gpt_snapshot.pt").exists()
    assert os.listdir(tmp_path) == ["here"]


def test_a_finished_run_keeps_the_configuration_it_was_made_with(tmp_path):
    assert start(*TINY, f"run_dir={tmp_path}").returncode == 0
    before = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "environment.jsonl").unlink()  # a report needs it, the run does not
    result = start(*TINY, f"run_dir={tmp_path}", "optimizer.learning_rate=0.5")
    assert result.returncode == 0 and "optimizer.learning_rate was 0.0003, is 0.5" in result.stdout
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_the_default_text_falls_back_without_a_network_and_a_run_keeps_its_text(
    tmp_path, shakespeare
):
    settings = [s for s in TINY if s != "data=pydoc"]
    site = tmp_path / "site"  # a Python without a network
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*a, **k): raise OSError('Network is unreachable')\n"
        "real = socket.getaddrinfo\n"
        "socket.getaddrinfo = lambda host, *a, **k: real(host, *a, **k) if host in ('localhost', "
        "'127.0.0.1') else refuse()\n"
    )
    env = {"PYTHONPATH": str(site)}
    run = tmp_path / "run"
    result = start(*settings, f"run_dir={run}", cwd=tmp_path, env=env)  # has no data/input.txt
    assert result.returncode == 0, result.stderr
    assert "warning: https://raw" in result.stdout and "on pydoc:topics, which" in result.stdout
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "input.txt").write_bytes(shakespeare.read_bytes())
    result = start(*settings, f"run_dir={run}", "trainer.max_steps=8", cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert "resuming" in result.stdout and "text        pydoc:topics" in result.stdout
    assert "warning: this run was started on pydoc:topics" in result.stdout
    (tmp_path / "data" / "input.txt").unlink()
    other = f"run_dir={tmp_path / 'other'}"  # a text that is named is never replaced by another
    url = "raw.githubusercontent.com"
    refuse(*settings, f"data.url=https://{url}/x", other, says=url, cwd=tmp_path, env=env)
    says = "for another text: data=text data.path=my.txt"
    refuse(*settings, "data.path=my.txt", other, says=says, cwd=tmp_path, env=env)


# --- bad input ---


@pytest.mark.parametrize(
    "override, says",
    [
        ("model.n_layr=3", "model.n_layr: unknown key; did you mean model.n_layer?"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("optimizer.lr=1", "optimizer.lr: unknown key; did you mean optimizer.learning_rate?"),
        (
            "model.droput=0",
            "did you mean model.resid_pdrop, model.embd_pdrop and model.attn_pdrop?",
        ),
        ("data.file=x", "data.file: unknown key; did you mean data.path?"),
        ("trainer.quux=1", "trainer.quux: unknown key; python main.py --help lists all"),
        ("optimizer.learning_rate=0,003", "=0,003: a comma separates the values of a sweep (-m)"),
        ("trainer.batch_size=many", "trainer.batch_size: Value 'many' of type 'str' could not be"),
        ("report=perhaps", "report: Value 'perhaps' is not a valid bool"),
        ("model.model_type=gpt-mini", "model.n_layer=null model.n_head=null model.n_embd=null"),
        ("data.path=book.txt", "for another text: data=text data.path=book.txt"),
        ("trainer.trackers=wandb", "trainer.trackers: Invalid value assigned: str is not a List"),
        ("model=modren", "model=modren: no such file; choose from gpt2, modern"),
        ("data=book.txt", "a text of your own: data=text data.path=FILE"),
        ("trainer.seed", "trainer.seed: settings are KEY=VALUE, without spaces"),
        ("--data.block-size=64", "settings have no dashes; did you mean data.block_size=?"),
        ("--lr=3", "--lr=3: settings have no dashes; did you mean optimizer.learning_rate=?"),
        ("data=text data.path=ä.txt", "Hydra needs it in quotes: 'data.path=\"ä.txt\"'"),
        ("model=null", "model=null: must name a file in conf/model"),
        ("=3", "=3: settings are KEY=VALUE, without spaces"),
        ("~trainer.max_steps", "trainer.max_steps: TrainerConfig (DictConfig) does not support"),
        ("run_name=", "run_name: must not be empty"),
        ("run_name=..", "run_name=..: must be a name without a slash"),
        ("run_name=a/b", "run_name=a/b: must be a name without a slash; run_dir= may be any"),
        ("init_from=", "init_from: must not be empty"),
        ("trainer.log_every_steps=null", "trainer.log_every_steps: must not be null"),
        ("trainer.batch_size=2000000", "=2000000: must be at least 1 and at most 1048576"),
        ("trainer.strategy=zero", "trainer.strategy=zero: must be one of ddp, fsdp"),
        ("optimizer.schedule=[wsd]", "optimizer.schedule: Cannot convert 'list' to string"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate=inf: must be above 0 and at most"),
        ("data=text", "data.path: missing"),
        ("model.n_embd=10", "model.n_embd=10: must be divisible by model.n_head=4"),
        ("model.n_embd=12", "the head size, 3, is odd"),
        ("data.train_split=1.5", "data.train_split=1.5: must be above 0 and below 1"),
        ("trainer.device=cuda", "trainer.device=cuda: no such device"),
        ("+model.n_layr=3", "model.n_layr: unknown key; did you mean model.n_layer?"),
        ("+trainer.foo={}", "trainer.foo: unknown key"),
        ("data=text ++data.path=nowhere.txt", "error: nowhere.txt: no such file"),
        ("data.path=", "data.path=: must be the path or URL of a text"),
        ("trainer.snapshot_path=foo://x", "trainer.snapshot_path=foo://x: Protocol not known: foo"),
        ("trainer.seed=${foo}", "trainer.seed: Interpolation key 'foo' not found"),
        ("data.block_size=${data.block_size}", "data.block_size: Recursive interpolation"),
        ("run_dir=/proc/nowhere", "run_dir=/proc/nowhere"),
        ("trainer.snapshot_path=a/", "trainer.snapshot_path=a/: must name a file"),
        ("trainer.snapshot_path=./job.yaml", "./job.yaml: must name a file of"),
        ("hydra.run.dir=/proc/nowhere", "/proc/nowhere: No such file or directory"),
        ("model.vocab_size=10", "model.vocab_size: follows from the text; leave it null"),
        ("model.block_size=7", "model.block_size=7: must equal data.block_size"),
    ],
)
def test_a_bad_setting_gets_one_line(override, says, tmp_path):
    if override.endswith(("cuda", "gpu")) and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    settings = ["experiment=overfit", *(["data=pydoc"] if not override.startswith("data") else [])]
    refuse(*settings, f"run_dir={tmp_path / 'run'}", *override.split(), says=says, cwd=tmp_path)
    left = set(os.listdir(tmp_path / "run")) if (tmp_path / "run").exists() else set()
    assert left <= {".lock", ".gpt_snapshot.pt.lock", "main.log"}


@pytest.mark.parametrize(
    "content, overrides, says",
    [
        (b"", [], "the text is empty"),
        (b"too short", [], "bad.txt, has 9 characters"),
        (b"just long enough " * 5, [], "data.block_size=64: the held-out part has 9 characters"),
        (b"caf\xe9 " * 100, [], "not UTF-8: byte 0xe9 at offset 3"),
        (b"some text " * 100, ["data.sha256=" + "0" * 64], "SHA-256 is"),
    ],
)
def test_a_bad_text_gets_one_line(content, overrides, says, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    text = ["data=text", f"data.path={path}", "data.truncate=1", *overrides]
    refuse("experiment=overfit", *text, f"run_dir={tmp_path / 'run'}", says=says)
    assert not (tmp_path / "run").exists()  # nothing was trained


@pytest.mark.parametrize(
    "override, says",
    [
        ("trainer.batch_size=1", "=1: must be at least the number of processes, 2"),
        ("data.block_size=2000", "data.block_size=2000: the held-out part has"),
        pytest.param("model.n_layr=3", "did you mean model.n_layer?", marks=pytest.mark.slow),
    ],
)
def test_two_processes_refuse_together_and_leave(override, says, tmp_path):
    refuse(*TINY, f"run_dir={tmp_path / 'run'}", override, says=says, nproc=2, timeout=60)


def test_a_snapshot_that_is_not_one_is_not_overwritten(tmp_path):
    path = tmp_path / "gpt_snapshot.pt"
    path.write_bytes(b"my thesis")
    refuse(*TINY, f"run_dir={tmp_path}", says="no undamaged snapshot left: ")
    assert path.read_bytes() == b"my thesis"


def test_a_changed_run_is_refused_with_the_differences_and_not_overwritten(tmp_path):
    assert start(*TINY, f"run_dir={tmp_path}").returncode == 0
    kept = [p for p in tmp_path.iterdir() if p.is_file() and p.name != "main.log"]
    before = {path: path.read_bytes() for path in kept}
    for change, says in (
        ("model.n_layer=3", "model.n_layer was 2, is 3"),
        ("data.truncate=0.03", "data.truncate was 0.02, is 0.03"),
    ):
        refuse(*TINY, f"run_dir={tmp_path}", change, says=says)
    assert before == {path: path.read_bytes() for path in kept}


def test_two_runs_do_not_share_their_snapshots(tmp_path):
    shared = f"trainer.snapshot_path={tmp_path / 'shared.pt'}"
    sweep = [*TINY, "optimizer.learning_rate=1e-3,1e-2", f"run_dir={tmp_path / 'run'}"]
    result = start("-m", *sweep, shared)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: trainer.snapshot_path" in result.stderr.splitlines()[-1]
    assert result.stdout.count("all jobs of the sweep would share it") == 2
    apart = "trainer.snapshot_path='memory://${run_dir}/s.pt'"
    result = start("-m", *sweep, apart)
    assert result.returncode == 0 and result.stdout.count("step 6/6 | held-out") == 2
    settings = [*TINY, shared, "trainer.max_steps=100000", "trainer.max_epochs=null"]
    first = subprocess.Popen(
        command(*settings, f"run_dir={tmp_path / 'a'}"), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_until((tmp_path / "a" / "metrics.jsonl").exists, first)
        refuse(*settings, f"run_dir={tmp_path / 'b'}", says="shared.pt: another run is using it")
    finally:
        first.kill()
        first.wait(timeout=30)


def test_a_reader_that_leaves_does_not_end_the_run_nor_fill_the_terminal(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        command(*TINY, f"run_dir={tmp_path}"),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
    assert "held-out loss" in (tmp_path / "main.log").read_text()
    assert (tmp_path / "gpt_snapshot.pt").exists()


def test_a_run_that_cannot_resume_keeps_the_history_of_the_one_before(tmp_path):
    assert start(*TINY, f"run_dir={tmp_path}").returncode == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = start(*TINY, f"run_dir={tmp_path}", "trainer.snapshot_path=other.pt")
    assert f"warning: there is no snapshot at {tmp_path / 'other.pt'}: training" in again.stdout
    assert (tmp_path / "metrics.old1.jsonl").read_bytes() == before
    assert load(str(tmp_path / "gpt_snapshot.pt")).step == load(str(tmp_path / "other.pt")).step


def test_the_first_weights_follow_the_seed(tmp_path):
    """What a step with hardly any learning rate leaves of them."""
    still = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1"]
    weights = []
    for n, seed in enumerate((1, 2, 1)):
        run_dir = tmp_path / str(n)
        run = start(*TINY, *still, f"trainer.seed={seed}", f"run_dir={run_dir}")
        assert run.returncode == 0, run.stderr
        weights.append(load(str(run_dir / "gpt_snapshot.pt")).model_state["tok_emb.weight"])
    assert torch.equal(weights[0], weights[2]) and not torch.allclose(weights[0], weights[1])


def test_processes_that_read_different_texts_do_not_train_together(text_file, monkeypatch):
    config = Config()
    config.data = DataConfig(path=str(text_file), block_size=8)
    other = {"data": {"sha256": "of another text"}}
    monkeypatch.setattr(
        "config.gather", lambda own, _: [own, own | {"data": own["data"] | other["data"]}]
    )
    with pytest.raises(UserError, match=r"data\.sha256: the ranks differ, \w+ and of another text"):
        load_text(config, None, World(0, 1, 0, 1, torch.device("cpu")))


def test_a_run_that_needs_more_memory_than_is_free_is_warned_of(tmp_path):
    result = start(*TINY, f"run_dir={tmp_path}", "trainer.max_steps=1")
    assert "of memory" not in result.stdout
    huge = [
        "data.block_size=1024",
        "data.truncate=1",
        "trainer.batch_size=65536",
        "model.n_embd=64",
    ]
    config = validate(configure(*TINY, *huge))
    config.model.vocab_size = 100
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("parts.log.warning", lambda text, *values: lines.append(text % values))
        warn_of_memory(config, World(0, 1, 0, 1, torch.device("cpu")))
    assert re.match(r"training needs about \d+\.\d GB of memory", lines[0]) and "=32768" in lines[0]
