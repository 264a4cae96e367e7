"""No module of ours needs itself: neither when it is imported, nor later, nor in the eyes of a type checker."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_specrollout"
SOCKETS = {"bench": "bench", "kernels": "kernels", "packages": "bench"}
"""Folder -> where it is in the package."""


def modules() -> dict[str, Path]:
    """Dotted name -> file of all that is installed, bench, packages and kernels included."""
    found = {}
    for folder, name in [
        (ROOT / PACKAGE, PACKAGE),
        *((ROOT / one, f"{PACKAGE}.{inner}") for one, inner in SOCKETS.items()),
    ]:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if not (name == PACKAGE and parts[0] in SOCKETS):
                found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


def imported(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What the file imports of ours, wherever in it that stands. A folder's own file may import what lies in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            # as many dots, so many names less: of a folder's own file, one less again
            inside = module.split(".")[: len(module.split(".")) - node.level + (path.name == "__init__.py")]
            base = ".".join([*(inside if node.level else []), *([node.module] if node.module else [])])
            names = [inner if (inner := f"{base}.{one.name}") in known else base for one in node.names]
        yield from (name for name in names if name in known and not f"{module}.".startswith(f"{name}."))


def test_no_module_imports_itself_by_way_of_others():
    known = modules()
    assert len(known) > 100
    graphlib.TopologicalSorter({module: set(imported(module, path, known)) for module, path in known.items()}).prepare()
