"""The socket of our patches: a declared object per rebound name, applied once, undone in tests, listed by `report()`.

Nothing here imports vLLM. A target that is not imported yet is patched right after it has been; what nobody imports is
never touched.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any

from vllm_specrollout.errors import logger
from vllm_specrollout.patches import supported

PROCESSES = ("frontend", "engine_core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One name of vLLM's that we rebind."""

    target: str
    """`module:Qualified.name`."""
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Takes the original callable, returns the one to put in its place."""
    why: str
    upstream: str
    """Link to the code that is rebound."""
    versions: tuple[str, ...]
    """The vLLM versions that it is for; on others it is left out."""
    remove_when: str
    process: str
    guards_unsupported: bool = False
    """Applied on unsupported vLLM versions too, to turn a request for speculation into an error."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


class PatchConflict(RuntimeError):
    """Two patches want the same name: a mistake in this project."""


@dataclass(frozen=True, slots=True)
class _Applied:
    patch: Patch
    original: Any  # as it stood in the owner's __dict__, or _INHERITED


_INHERITED = object()
_applied: dict[str, _Applied] = {}
_waiting: dict[str, list[Patch]] = {}


def load(process: str) -> tuple[Patch, ...]:
    """The patches declared for one process, for any version of vLLM."""
    if process not in PROCESSES:
        raise ValueError(f"no process is called {process!r}; there are: {', '.join(PROCESSES)}")
    return importlib.import_module(f"{__name__}.{process}").PATCHES


def load_all(version: str | None) -> tuple[Patch, ...]:
    """The patches of all processes that are for this version."""
    return tuple(patch for process in PROCESSES for patch in load(process) if version in patch.versions)


def apply_all(process: str, *, guards_only: bool = False) -> None:
    """Apply a process's patches for the installed vLLM, each now or as soon as its module is imported.

    Calling it again changes nothing. `guards_only` is for versions that are not supported.
    """
    version = supported.installed_vllm()
    for patch in load(process):
        if patch.guards_unsupported if guards_only else version in patch.versions:
            apply(patch)


def apply(patch: Patch) -> None:
    """Apply one patch now, or when its target's module is imported."""
    owner = _applied.get(patch.target)
    if owner is not None:
        if owner.patch is not patch:
            raise PatchConflict(f"{patch.target} is already patched: {owner.patch.why}")
        return
    module = sys.modules.get(patch.module)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _rebind(patch)
        return
    waiting = _waiting.setdefault(patch.module, [])
    for other in waiting:
        if other.target == patch.target and other is not patch:
            raise PatchConflict(f"{patch.target} is already patched: {other.why}")
    if patch not in waiting:
        waiting.append(patch)
    if _arrival not in sys.meta_path:
        sys.meta_path.insert(0, _arrival)


def undo_all() -> None:
    """Put every original back; for tests."""
    for target, entry in reversed(list(_applied.items())):
        owner, name = _owner(target)
        if entry.original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, entry.original)
    _applied.clear()
    _waiting.clear()
    if _arrival in sys.meta_path:
        sys.meta_path.remove(_arrival)


def state(patch: Patch) -> str:
    """`applied`, `waiting` (its module is not imported yet) or `off`."""
    if patch.target in _applied:
        return "applied"
    return "waiting" if patch in _waiting.get(patch.module, []) else "off"


def report(version: str | None = None) -> list[dict[str, str]]:
    """The ledger: every patch for a version (None: the installed one), with what was done about it in this process."""
    return [
        {
            "target": patch.target,
            "process": patch.process,
            "state": state(patch),
            "why": patch.why,
            "upstream": patch.upstream,
            "versions": ", ".join(patch.versions),
            "remove_when": patch.remove_when,
        }
        for patch in load_all(version or supported.installed_vllm())
    ]


def _owner(target: str) -> tuple[Any, str]:
    module, _, qualified = target.partition(":")
    *path, name = qualified.split(".")
    return functools.reduce(getattr, path, sys.modules[module]), name


def _rebind(patch: Patch) -> None:
    owner, name = _owner(patch.target)
    # the raw attribute, so that static and class methods stay what they are
    original = vars(owner).get(name, _INHERITED)
    current = getattr(owner, name) if original is _INHERITED else original
    if isinstance(current, (staticmethod, classmethod)):
        replacement: Any = type(current)(patch.wrap(current.__func__))
    else:
        replacement = patch.wrap(current)
    setattr(owner, name, replacement)
    _applied[patch.target] = _Applied(patch, original)
    logger.debug("patched %s", patch.target)


class _Arrival(MetaPathFinder):
    """Patches a module right after it was imported; finds nothing itself and imports nothing."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _waiting:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in finders if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            self._watch(fullname, spec.loader)
        return spec

    def _watch(self, fullname: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            for patch in _waiting.pop(fullname, []):
                _rebind(patch)
            if not _waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


_arrival = _Arrival()
