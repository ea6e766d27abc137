"""Every command of the README runs."""

import re
import shlex
import subprocess

import pytest
from conftest import ROOT, TINY, start

BLOCKS = re.findall(
    r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
SHORT = [s for s in TINY if not s.startswith(("experiment", "model", "trainer.batch_size"))]


def test_there_are_commands():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_runs(line, tmp_path):
    words = shlex.split(line)
    if words[0] == "make":
        result = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return
    if words[0] == "torchrun":
        nproc = next(w.split("=")[1] for w in words if w.startswith("--nproc_per_node="))
        nproc, arguments = (
            (2 if nproc == "gpu" else int(nproc)),
            words[words.index("main.py") + 1 :],
        )
    else:
        assert words[0] == "python", line
        nproc, arguments = 0, words[2:]
    run = tmp_path / "run"
    if "sample.py" in words:
        assert start(*TINY, "data.truncate=1", f"run_dir={run}").returncode == 0
        kept = [a for a in arguments if not a.startswith(("run_dir=", "snapshot="))]
        result = start(*kept, f"run_dir={run}", "max_new_tokens=5", script="sample.py")
    else:
        (tmp_path / "book.txt").write_text("A text of one's own, long enough for a window. " * 200)
        short = [
            "trainer.max_steps=2",
            "trainer.device=cpu",
            "trainer.compile=false",
            f"run_dir={run}",
        ]
        if not any(a.startswith("data") for a in arguments):
            short += ["data=pydoc", "data.truncate=0.02"]
        result = start(*arguments, *short, nproc=nproc, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
