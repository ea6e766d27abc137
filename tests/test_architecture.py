"""What docs/architecture.md says of imports, wherever in a module they are."""

import ast
import graphlib

from conftest import ROOT


def imports(path) -> set[str]:
    """The top-level names of the modules and packages that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


IMPORTS = {path.stem: imports(path) for path in ROOT.glob("*.py")}


def test_imports_go_round_in_no_circle_and_none_is_of_main():
    tuple(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert [name for name, imported in IMPORTS.items() if "main" in imported] == []


def test_what_the_trainer_imports_knows_neither_gpt_nor_hydra():
    reached, ahead = set(), {"trainer"}
    while ahead:
        reached |= ahead
        ahead = set().union(*(IMPORTS.get(name, set()) for name in ahead)) - reached
    assert "saver" in reached and not reached & {"model", "hydra"}


def test_hydra_is_known_where_it_is_said():
    said = {"main", "config", "launch", "sweep", "environment"}
    assert {name for name, imported in IMPORTS.items() if "hydra" in imported} == said
