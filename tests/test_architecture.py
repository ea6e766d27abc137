"""The order of the packages: imports run one way, from the programs at the root down through engine/."""

import ast
import graphlib
import re
from pathlib import Path

from conftest import ROOT

PROGRAMS = {path.stem for path in ROOT.glob("*.py")}
# In the order of engine/__init__.py: each may use those before it.
ORDER = ast.get_docstring(ast.parse((ROOT / "engine" / "__init__.py").read_text()))
PACKAGES = ", ".join(re.findall(r"^    ((?:\w+, )*\w+)  ", ORDER, re.MULTILINE)).split(", ")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """The dotted names of what a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PATHS = [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")]
IMPORTS = {name_of(path): imports(path) for path in PATHS if path.name != "__init__.py"}


def test_imports_have_no_cycle():
    tuple(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError


def test_imports_follow_the_order_of_packages():
    wrong = []
    for name, imported in IMPORTS.items():
        if not name.startswith("engine."):
            continue
        package = name.split(".")[1]
        for other in imported:
            if other.split(".")[0] in PROGRAMS:
                wrong.append(f"{name} imports {other}")
            if other.startswith("engine.") and PACKAGES.index(other.split(".")[1]) > PACKAGES.index(package):
                wrong.append(f"{name} imports {other}, which comes later")
    assert wrong == []


def test_the_trainer_imports_neither_model_nor_hydra():
    reached, ahead = set(), {"trainer"}
    while ahead:
        reached |= ahead
        ahead = set().union(*(IMPORTS.get(name, set()) for name in ahead)) - reached
    assert "engine.snapshots.manager" in reached
    assert not {name for name in reached if name.split(".")[0] in ("model", "hydra", "main")}
