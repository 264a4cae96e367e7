"""How many statements each folder may have, and which class names occur twice: a table that only falls.

    python -m tests.unit.ceilings              what there is, beside the table
    python -m tests.unit.ceilings --update     lower the table to what there is; `--raise` lifts it too, for a review

A statement is a node of Python's syntax tree, without imports and docstrings: no formatter changes their number.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".json")
SLACK = 0.02
"""Share of a ceiling that a folder may stay below it; or so few statements:"""
FEW = 5
APART = ("bench", "packages")
"""Beside the package: benchmarks, and what has a folder of its own beside the product."""
EXTRAS = ("cluster", "training", "budgets/papers", "verl.py", "trl.py")
"""Of the package: what an engine drafts without. All else is core."""


def statements(path: Path) -> int:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.stmt) and not _is_import(node) and not _is_docstring(node) for node in tree)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sources() -> list[Path]:
    tops = ("vllm_specrollout", "kernels", "patches", *APART)
    return sorted(path for top in tops for path in ROOT.glob(f"{top}/**/*.py"))


def place(path: Path) -> tuple[str, str]:
    """(core, extras, bench or packages, the folder in it) that a file is counted under."""
    top, *inner = path.relative_to(ROOT).parts
    if top in APART:
        return top, inner[0]
    if top != "vllm_specrollout":
        return "core", top
    within = "/".join(inner)
    extra = next((name for name in EXTRAS if within == name or within.startswith(f"{name}/")), None)
    folder = inner[0] if len(inner) > 1 else "."
    return ("extras", extra) if extra else ("core", folder)


def counted(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {part: Counter() for part in ("core", "extras", *APART)}
    for path in paths:
        part, folder = place(path)
        found[part][folder] += statements(path)
    return {part: {name: n for name, n in sorted(folders.items()) if n} for part, folders in found.items()}


def repeated(paths: Iterable[Path]) -> dict[str, int]:
    """Name -> how many classes have it, where that is more than one."""
    names = Counter(
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return {name: count for name, count in sorted(names.items()) if count > 1}


def measured() -> dict[str, Any]:
    paths = sources()
    return {"statements": counted(paths), "class names": repeated(paths)}


def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def flat(one: Mapping[str, Any]) -> dict[str, int]:
    """Every line of a table: `core/worker` or `class NAME` -> its number."""
    folders = {f"{part}/{name}": n for part, inner in one["statements"].items() for name, n in inner.items()}
    return {**folders, **{f"class {name}": n for name, n in one["class names"].items()}}


def above(there: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    return [f"{name}: {n}, above {ceilings.get(name, 0)}" for name, n in there.items() if n > ceilings.get(name, 0)]


def below(there: Mapping[str, int], ceilings: Mapping[str, int]) -> list[str]:
    """Ceilings that have become too high; a class name's has no slack."""
    slack = {name: 0 if name.startswith("class ") else max(FEW, SLACK * most) for name, most in ceilings.items()}
    return [
        f"{name}: {there.get(name, 0)}, far below {most}"
        for name, most in ceilings.items()
        if there.get(name, 0) < most - slack[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the table anew")
    parser.add_argument("--raise", dest="lifts", action="store_true", help="also where that lifts it")
    given = parser.parse_args()
    new = measured()
    there, ceilings = flat(new), flat(table()) if TABLE.exists() else {}
    over = above(there, ceilings)
    print("\n".join([*over, *below(there, ceilings)]) or "all within the table")
    for part, folders in new["statements"].items():
        print(f"{part}: {sum(folders.values())} statements")
    if given.update and (given.lifts or not over):
        TABLE.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
        return 0
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
