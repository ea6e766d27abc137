"""Every command of the README runs."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
from conftest import ROOT, TINY, model_snapshot, run_python, start
from packaging.requirements import Requirement

import export
import main
from config import validate
from engine.snapshots.storage import load

BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that ended, for the commands that only read one."""
    run = tmp_path_factory.mktemp("readme") / "runs" / "rates.sweep" / "job"
    assert start(*TINY, "data.truncate=1", f"run_dir={run}").returncode == 0
    return run


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_runs(line, tmp_path, request):
    words, launcher = shlex.split(line), ()
    if words[0] == "make":
        result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return
    for package in ("wandb",):
        if package in line:
            pytest.importorskip(package)
    if words[0] == "tensorboard":
        assert importlib.util.find_spec("tensorboard")
        return
    if words[0] == "torchrun":
        nproc = next(w.split("=")[1] for w in words if w.startswith("--nproc_per_node="))
        nproc, arguments = ((2 if nproc == "gpu" else int(nproc)), words[words.index("main.py") + 1 :])
    elif words[0] == "accelerate":
        at = words.index("main.py")
        launcher, nproc, arguments = (("accelerate.commands.launch", *words[2:at]), 0, words[at + 1 :])
    else:
        assert words[0] == "python", line
        nproc, arguments = 0, words[2:]
    run = tmp_path / "run"
    if "report.py" in words:
        run = request.getfixturevalue("finished")
        kept = [f"run_dir={run}" if a.startswith("run_dir=") else a for a in arguments]
        result = start(*kept, script="report.py", cwd=run.parents[2])
    elif "sample.py" in words:
        kept = [a for a in arguments if not a.startswith(("run_dir=", "snapshot="))]
        (tmp_path / "book.txt").write_text("A text of one's own.\n")
        finished = request.getfixturevalue("finished")
        for name in ("a.pt", "b.pt"):
            (tmp_path / name).symlink_to(finished / "gpt_snapshot.pt")
        if "snapshots=" not in line:
            kept.append(f"run_dir={finished}")
        kept = [a.replace("stride=64", "stride=8") for a in kept]
        kept += [] if "score=" in line else ["max_new_tokens=5"]
        result = start(*kept, script="sample.py", cwd=tmp_path)
    elif "export.py" in words:
        run.mkdir()
        (run / "gpt_snapshot.pt").write_bytes(model_snapshot("ab").to_bytes())
        kept = [a for a in arguments if not a.startswith("run_dir=")]
        result = start(*kept, f"run_dir={run}", script="export.py", cwd=tmp_path)
    else:
        export.export(model_snapshot("ab"), "gpt_snapshot.pt", str(tmp_path / "my_gpt"))
        (tmp_path / "books").mkdir()
        for book in ("book.txt", "books/one.txt", "books/two.txt"):
            (tmp_path / book).write_text("A text of one's own, long enough for a window. " * 200)
        short = ["trainer.max_steps=2", "trainer.device=cpu", "trainer.compile=false", f"run_dir={run}"]
        short += ["report=false", "samples=false"]
        if "init_from" not in line:
            short += ["model.n_embd=32", "model.ngram_rows=0"]
        if not any(a.startswith("data") for a in arguments):
            short += ["data=pydoc", "data.truncate=0.02"]
        if re.fullmatch(
            r"python main.py( '?(?!data|experiment)[\w.]+=[][\w]+'?)+", line
        ):  # it trains as `python main.py` does
            validate(main.configure(*arguments, *short))
            return
        result = start(*arguments, *short, nproc=nproc, launcher=launcher, cwd=tmp_path)
        several = any("*" in argument for argument in arguments)
        assert ("encoding    books/one.txt, books/two.txt into " in result.stdout) == several
    assert result.returncode == 0, result.stderr


def test_the_program_in_the_tutorials_style_runs_and_its_snapshot_is_sampled(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "from-mingpt-ddp.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "mine.py").write_text(program.replace("max_steps=200", "max_steps=3"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("ROMEO: a text of one's own, and long. " * 100)
    script, env = str(tmp_path / "mine.py"), {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for nproc in (2, 0):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        result = start(script=script, nproc=nproc, cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stderr
        printed = re.findall("^held-out loss [0-9.]+$|^ROMEO:", result.stdout, re.MULTILINE)
        assert len(printed) == 2 and printed[1] == "ROMEO:"  # once, on rank 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    of_a_snapshot = re.search(r"^```python\n(from sample .*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(of_a_snapshot, names)
    assert names["model"].config.vocab_size == len(names["snapshot"].vocabulary)
    result = start("max_new_tokens=5", script="sample.py", cwd=tmp_path)  # the newest run's
    assert result.returncode == 0, result.stderr
    other = program.replace("gpt-nano", "gpt-micro")
    (tmp_path / "mine.py").write_text(other)
    result = start(script=script, cwd=tmp_path, env=env)
    assert result.returncode == 1 and "model.n_layer was 3, is 4" in result.stderr


def test_the_pinned_versions_are_within_the_ranges_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w-]+).*==(\S+)", (ROOT / "requirements.txt").read_text(), re.M))
    pinned = {name.lower(): version for name, version in pinned.items()}
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("configure(") == 2
    small = ", ".join(map(repr, TINY))
    code = code.replace('"experiment=shakespeare_quick"', small)
    (tmp_path / "main.py").symlink_to(ROOT / "main.py")  # it has been fetched already
    result = run_python(code, cwd=tmp_path, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("held-out loss") >= 2 and (tmp_path / "play.html").exists()
    first, edited = (load(str(tmp_path / f"runs/{n}/gpt_snapshot.pt")) for n in ("notebook", "edited"))
    assert first.step == edited.step and first.loss != edited.loss
