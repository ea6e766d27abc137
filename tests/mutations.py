"""Mutation testing: breaks the code in one place at a time; a test must fail.

    python tests/mutations.py             all of them, a quarter of an hour long
    python tests/mutations.py trainer.py  those of one file

In a copy: each mutation of mutations.txt replaces the first occurrence of a text; then the named test, which passed
before, must fail. Exits with status 1 if a mutation survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    file: str
    what: str
    test: str  # FILE::NAME, below tests/
    old: str
    new: str


def read(record: str) -> Mutation:
    """A mutation of mutations.txt, in four lines: FILE: WHAT, the test, - OLD, + NEW; \\n is a line end."""
    title, test, *texts = record.split("\n")
    file, _, what = title.partition(": ")
    old, new = (text[2:].replace("\\n", "\n") for text in texts)
    return Mutation(file, what, test, old, new)


MUTATIONS = [read(record) for record in Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n")]


def fails(copy: Path, test: str) -> bool | None:
    """Whether a test fails in `copy`; None if this machine skips it; SystemExit if it cannot be run."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, f"tests/{test}"],
        cwd=copy,
        env={**os.environ, "XDG_CACHE_HOME": str(copy / ".cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode not in (0, 1):  # 1: of the tests that were run, one failed
        raise SystemExit(f"{test}: cannot be run:\n{ended.stdout}{ended.stderr}")
    if " passed" not in ended.stdout and ended.returncode == 0:
        return None
    return ended.returncode == 1


def main() -> None:
    chosen = [m for m in MUTATIONS if m.file in sys.argv[1:] or not sys.argv[1:]]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        hidden = shutil.ignore_patterns(".*", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=hidden)
        for test in dict.fromkeys(mutation.test for mutation in chosen):
            outcome = fails(copy, test)
            if outcome:
                raise SystemExit(f"{test} fails with nothing changed")
            if outcome is None:
                print(f"not tried: {test} is skipped on this machine", flush=True)
                chosen = [mutation for mutation in chosen if mutation.test != test]
        for mutation in chosen:
            path = copy / mutation.file
            whole = path.read_text()
            path.write_text(whole.replace(mutation.old, mutation.new, 1))
            caught = fails(copy, mutation.test)
            path.write_text(whole)
            name = mutation.test.partition("::")[2]
            print(f"{'caught' if caught else 'LIVES '}  {mutation.file}: {mutation.what} ({name})", flush=True)
            if not caught:
                alive.append(mutation)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
