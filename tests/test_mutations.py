"""The mutations of `mutations.py` still apply; running them takes minutes and is not done here."""

import pytest
from conftest import ROOT
from mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_matches_and_its_test_exists(mutation):
    is_found = mutation.old in (ROOT / mutation.file).read_text()
    assert is_found, f"tests/mutations.txt quotes a line of {mutation.file} that was edited: update its `-` line"
    file, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
