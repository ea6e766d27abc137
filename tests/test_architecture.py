"""What docs/architecture.md says of imports, wherever in a module they are."""

import ast
import graphlib
from pathlib import Path

from conftest import ROOT

DOOR = {path.stem for path in ROOT.glob("*.py")}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """The dotted names of the modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


PATHS = [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")]
IMPORTS = {name_of(path): imports(path) for path in PATHS if path.name != "__init__.py"}


def test_imports_go_round_in_no_circle_and_none_is_of_main():
    tuple(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert [name for name, imported in IMPORTS.items() if "main" in imported] == []
