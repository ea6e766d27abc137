"""Ways to start a run: Hydra's own options, Accelerate, a notebook, another system."""

import json
import re

import pytest
import yaml
from conftest import ROOT, TINY, free_port, latest, metrics, patched_main, run_python, start, succeed


def test_a_recipe_in_another_directory_and_a_directory_given_to_hydra_are_used(tmp_path):
    recipes = tmp_path / "recipes" / "experiment"
    recipes.mkdir(parents=True)
    recipe = {"trainer": {"seed": 7}, "run_name": "mine"}
    (recipes / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    settings = [s for s in TINY if not s.startswith("experiment")]
    succeed(
        *[f"--config-dir={recipes.parent}", *settings, "experiment=mine", "++trainer.use_amp=false"],
        "trainer.log_every_steps=${trainer.eval_every_steps}",
        f"hydra.run.dir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    snapshot = latest(tmp_path / "run")
    assert snapshot.config["run_name"] == "mine"
    assert snapshot.seed == 7 and snapshot.choices["amp_dtype"] == "float32"
    assert snapshot.config["trainer"]["log_every_steps"] == 3
    assert {p.name for p in tmp_path.iterdir()} == {"recipes", "run"}


def test_a_run_in_a_renamed_directory_resumes_and_its_changes_are_logged(tmp_path):
    run = tmp_path / "it's mine"
    quoted = str(run).replace("'", r"\'")
    succeed(*TINY, f"run_dir='{quoted}'")
    snapshot = latest(run)
    del snapshot.config["report"]  # as in a snapshot of a version that had another setting instead
    snapshot.config["sketch"] = True
    run.rename(tmp_path / "moved")
    (tmp_path / "moved" / "gpt_snapshot.pt").write_bytes(snapshot.to_bytes())
    result = succeed(*TINY, "trainer.max_steps=8", f"run_dir={tmp_path / 'moved'}")
    changes = [x.split()[4] for x in result.stdout.splitlines() if x.startswith("changed since")]
    assert set(changes) == {"run_dir", "trainer.max_steps"}, result.stdout


def test_what_accelerate_is_asked_for_is_used_unless_typed_and_the_rest_is_named(tmp_path):
    asked = {"USE_FSDP": "true", "MIXED_PRECISION": "fp16", "DYNAMO_BACKEND": "NO", "GRADIENT_ACCUMULATION_STEPS": "4"}
    env = {f"ACCELERATE_{name}": value for name, value in asked.items()}
    result = succeed(*TINY, "trainer.amp_dtype=float32", f"run_dir={tmp_path / 'run'}", nproc=2, env=env)
    trainer = latest(tmp_path / "run").config["trainer"]
    assert (trainer["strategy"], trainer["amp_dtype"], trainer["compile"]) == ("fsdp", "float32", "auto")
    assert result.stdout.count("trainer.strategy=fsdp trainer.amp_dtype=float16, as launched, unless typed") == 1
    assert result.stdout.count("warning: ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 is not used") == 1
    assert result.stdout.count(" is not used") == 1
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False"}  # without a GPU it starts one process
    result = succeed(*TINY, f"run_dir={tmp_path / 'one'}", env=env)
    assert result.stdout.count("accelerate  one process on the CPU; for two: torchrun --standalone") == 1


def test_a_python_session_can_train_repeatedly_and_prints_the_log(tmp_path):
    code = f"""
from main import configure, train
first = train(configure(*{TINY}, "run_dir=a"))
assert train(configure(*{TINY}, "run_dir=a")) == first
assert train(configure(*{TINY}, "run_dir=b", "trainer.seed=2")) != first
assert configure().run_name.startswith("shakespeare_")
"""
    result = run_python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("step 6/6 | held-out" in line for line in lines) == 2
    assert sum("this run is finished" in line for line in lines) == 1
    assert sum("which fits this machine" in line for line in lines) == 1
    succeed(*TINY, "run_dir=c", cwd=tmp_path)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "c")


def test_accelerates_notebook_launcher_and_a_process_group_of_ones_own_train_alike(tmp_path):
    code = f"""
from accelerate import notebook_launcher
from main import configure, train
config = configure(*{TINY}, "run_dir=launched")
notebook_launcher(train, (config,), num_processes=2, use_port="{free_port()}")
"""
    launched = run_python(code, cwd=tmp_path, HF_HOME=str(tmp_path))
    page = (ROOT / "docs" / "from-mingpt-ddp.md").read_text()
    program = re.search(r"^```python\n(import os\n.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    program = program.replace("29500", str(free_port())).replace('"experiment=overfit"', f"*{TINY}, 'run_dir=own'")
    (tmp_path / "mine.py").write_text(program)
    own = start(script=str(tmp_path / "mine.py"), cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    for name, result in (("launched", launched), ("own", own)):
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("step 6/6 | held-out") == 1
        assert latest(tmp_path / name).processes == 2
    assert metrics(tmp_path / "launched") == metrics(tmp_path / "own")


def test_a_process_group_without_a_backend_for_the_cpu_gets_gloo_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text("""
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # in the place of NCCL
dist.init_process_group("cuda:fake")
from engine.errors import UserError
from engine.parallel import distributed
from engine.run.requests import Requests
try:
    distributed.init("cpu")
except UserError as error:
    print(error)
assert distributed.all_gather(dist.get_rank()) == [0, 1]
assert distributed.run_on_rank_0(lambda: [1.5]) == [1.5]
requests = Requests()
for _ in range(3):
    requests.check()
requests.wait()
assert dist.get_backend_config() == "cuda:fake"
""")
    result = succeed(script=str(tmp_path / "mine.py"), nproc=2, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert result.stdout.count("trainer.device=cpu: the process group that this program created is for cuda;") == 2


@pytest.mark.slow
def test_a_fork_of_a_session_that_has_trained_is_refused_and_does_not_hang(tmp_path):
    code = f"""
from multiprocessing import get_context
from main import configure, train
config = configure(*{TINY}, "run_dir=run")
train(config)
copy = get_context("fork").Process(target=train, args=(config,))
copy.start()
copy.join(30)
assert copy.exitcode == 1, copy
"""
    result = run_python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "this process was forked after torch had started its threads" in result.stderr


def test_training_works_without_posix_locks_and_signals(tmp_path):
    """As on Windows, as far as it can be had here."""
    patch = """
import signal
import hydra, torch.distributed.elastic.multiprocessing.errors, torch.utils.tensorboard  # which have their own ways
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPIPE"):
    delattr(signal, name)
sys.modules |= {"fcntl": None, "resource": None}
"""
    script = patched_main(tmp_path, patch)
    result = succeed(*TINY, f"run_dir={tmp_path / 'run'}", script=script)
    assert "step 6/6" in result.stdout
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line).get("memory", 0) for line in records} == {0}
