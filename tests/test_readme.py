"""Every command of the README runs."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
from conftest import ROOT, TINY, latest, model_snapshot, run_python, start, succeed
from packaging.requirements import Requirement

import export
import main
from config import as_config

BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands read: finished runs, snapshots, an exported model, texts."""
    folder = tmp_path_factory.mktemp("readme")
    run = folder / "runs" / "deep"
    succeed(*TINY, "data.truncate=1", "data.block_size=64", f"run_dir={run}")
    shutil.copytree(run, folder / "runs" / "rates.sweep" / "job")
    for name in ("a.pt", "b.pt"):
        (folder / name).symlink_to(run / "gpt_snapshot.pt")
    export.export(model_snapshot("ab"), "gpt_snapshot.pt", str(folder / "my_gpt"))
    (folder / "books").mkdir()
    for book in ("book.txt", "books/one.txt", "books/two.txt"):
        (folder / book).write_text("A text of one's own, long enough for a window. " * 200)
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_runs(line, folder, tmp_path):
    program, *words = shlex.split(line)
    if program == "make":
        result = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return
    if program == "tensorboard":
        assert importlib.util.find_spec("tensorboard")
        return
    if "wandb" in line:
        pytest.importorskip("wandb")
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    script, arguments, how = words[at], words[at + 1 :], {"cwd": folder}
    if program == "torchrun":
        how["nproc"] = 2
    elif program == "accelerate":
        how["launcher"] = ("accelerate.commands.launch", *words[1:at])
    else:
        assert program == "python"
    if script == "main.py":
        short = ["trainer.max_steps=2", "trainer.device=cpu", "trainer.compile=false", "report=false", "samples=false"]
        short.append(f"run_dir={tmp_path / 'run'}")
        if "init_from" not in line:
            short += ["model.n_embd=32", "model.ngram_rows=0"]
        if not any(a.startswith("data") for a in arguments):
            short += ["data=pydoc", "data.truncate=0.02"]
        # With these settings it trains as `python main.py` does.
        if re.fullmatch(r"python main.py( '?(?!data|experiment)[\w.]+=[][\w]+'?)+", line):
            as_config(main.configure(*arguments, *short))
            return
    elif script == "export.py":
        short, how["cwd"] = [f"run_dir={folder / 'runs' / 'deep'}"], tmp_path
    else:
        short = ["max_new_tokens=5"] if script == "sample.py" and "score=" not in line else []
    result = succeed(*arguments, *short, script=script, **how)
    several = any("*" in argument for argument in arguments)
    assert ("encoding    books/one.txt, books/two.txt into " in result.stdout) == several


def test_the_program_in_the_tutorials_style_runs_and_its_snapshot_is_sampled(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "from-mingpt-ddp.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "mine.py").write_text(program.replace("max_steps=200", "max_steps=3"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("ROMEO: a text of one's own, and long. " * 100)
    script, env = str(tmp_path / "mine.py"), {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for nproc in (2, 0):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        result = succeed(script=script, nproc=nproc, cwd=tmp_path, env=env)
        printed = re.findall("^held-out loss [0-9.]+$|^ROMEO:", result.stdout, re.MULTILINE)
        assert len(printed) == 2 and printed[1] == "ROMEO:"  # once, on rank 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    of_a_snapshot = re.search(r"^```python\n(from sample .*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(of_a_snapshot, names)
    assert names["model"].config.vocab_size == len(names["snapshot"].vocabulary)
    succeed("max_new_tokens=5", script="sample.py", cwd=tmp_path)  # the newest run's
    assert result.returncode == 0, result.stderr
    (tmp_path / "mine.py").write_text(program.replace("gpt-nano", "gpt-micro"))
    result = start(script=script, cwd=tmp_path, env=env)
    assert result.returncode == 1 and "model.n_layer was 3, is 4" in result.stderr


def test_the_pinned_versions_are_within_the_ranges_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w-]+).*==(\S+)", (ROOT / "requirements.txt").read_text().lower(), re.M))
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("configure(") == 2
    code = code.replace('"experiment=shakespeare_quick"', f"*{TINY}")
    (tmp_path / "main.py").symlink_to(ROOT / "main.py")  # it has been fetched already
    result = run_python(code, cwd=tmp_path, timeout=240)
    assert result.stdout.count("held-out loss") >= 2 and (tmp_path / "play.html").exists()
    first, edited = (latest(tmp_path / "runs" / name) for name in ("notebook", "edited"))
    assert first.step == edited.step and first.loss != edited.loss
