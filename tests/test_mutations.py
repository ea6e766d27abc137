"""The mutations of `mutations.py` still apply; running them takes minutes and is not done here."""

import pytest
from conftest import ROOT
from mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_matches_once_and_its_test_exists(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    file, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
