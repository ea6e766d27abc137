"""The mutations of `mutations.py` still apply; running them takes minutes and is not done here."""

import pytest
from conftest import ROOT
from mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_matches_once_and_its_test_exists(mutation):
    found = (ROOT / mutation.file).read_text().count(mutation.old)
    assert found == 1, f"tests/mutations.txt has a line of {mutation.file} that was edited: update its `-` line"
    file, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
