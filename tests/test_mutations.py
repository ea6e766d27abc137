"""The mutations of `mutations.py` still apply; running them takes minutes and is not done here."""

from conftest import ROOT
from mutations import MUTATIONS


def test_every_mutation_matches_and_its_test_exists():
    stale = [m for m in MUTATIONS if m.old not in (ROOT / m.file).read_text()]
    assert not stale, "tests/mutations.txt quotes lines that were edited: update its `-` lines"
    for test in {m.test for m in MUTATIONS}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
