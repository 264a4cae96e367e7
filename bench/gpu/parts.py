"""What is measured in which order: the rows of each step, in parts that share a process. Pure.

A row's limit is generous, for what is compiled is compiled in the row that first needs it; what it may well take is a
guess. A dry walk has rows of every kind, small enough for a CPU and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..kernels.shapes import ATTENTION_CHECKS, COMMIT_CHECKS, VERIFY_CHECKS
from ..kernels.shapes import MODELS as REAL_MODELS
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from .plan import ARMS, DRAFTS, MEMORY_ARMS, STOCK, Cell, Scene, accuracy_for, engine_of
from .record import Part, Task

STEPS = {
    "checks": "what is installed, `specrollout doctor`, the kernels against their specifications",
    "stock": "stock vLLM alone: which runner, attention, graphs and scheduling it chose",
    "eager": "ours without CUDA graphs: whether its tokens are stock's",
    "graphs": "ours with CUDA graphs: whether its tokens are stock's",
    "kernels": "our kernels beside FlashAttention 3, timed in CUDA graphs",
    "speed": "our engine beside stock's: tokens, times, and how long the device idles",
    "memory": "device memory of CUDA graphs; only if asked for",
}
"""In the order in which they run, for they build on each other."""
FIRST_HOUR = tuple(STEPS)[:6]
_SPEED_CELLS = (Cell(1, 1 << 10), Cell(32, 1 << 10))
_KERNEL_CELLS = tuple(Cell(batch, context) for context in (1 << 10, 16 << 10) for batch in (1, 8, 32))
_IDENTITY_CELLS = (Cell(1, 1 << 10), Cell(8, 1 << 10))
_DRY_CELLS = (Cell(1, 64), Cell(2, 64))
_IDENTITY_NODES, _IDENTITY_ACCURACY = 15, (0.6, 0.2)
_KERNEL_NODES = (0, 7, 15)
# seconds: (limit, what it may well take)
_CHECK_S, _DOCTOR_S, _KERNEL_S, _ROW_S = (150, 10), (250, 30), (150, 8), (240, 15)
_IMPORTS_S, _START_S = (180, 15), {"7B": (360, 110), "0.5B": (300, 60), "tiny": (300, 30)}
_PATIENCE = 6  # a process without engines is soon there again
_Row = tuple[str, dict[str, Any], tuple[int, int]]
"""(name, parameters, seconds as above)"""
_Rows = list[_Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    work: Path
    steps: tuple[str, ...] = FIRST_HOUR
    is_dry: bool = False
    # of the steps `kernels` and `speed`; None: each one's own
    cells: tuple[Cell, ...] | None = None
    taus: tuple[float, ...] = (4.0, 6.5)
    arms: tuple[str, ...] = ARMS
    rivals: tuple[str, ...] = ()
    # of the identity steps, and of `kernels` and `speed`
    small: str = "0.5B"
    large: str = "7B"
    budget: str = "fixed"
    seed: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    def scene(self, *cells: Cell, is_large: bool = False, **more: Any) -> Scene:
        model = "tiny" if self.is_dry else self.large if is_large else self.small
        return Scene(model=model, cells=cells, seed=self.seed, is_dry=self.is_dry, **more)


def parts(options: Options) -> list[Part]:
    """In the order of the steps."""
    return [part for step in options.steps for part in _MAKERS[step](options)]


def _part(step: str, runner: str, setup: dict[str, Any], rows: _Rows, start_s: tuple[int, int], **more: Any) -> Part:
    tasks = tuple(Task(name=name, params=params, limit_s=s[0], expected_s=s[1]) for name, params, s in rows)
    made = {"name": step, "runner": f"{__package__}.{runner}", "setup": setup, "tasks": tasks}
    return Part(step=step, limit_s=start_s[0], expected_s=start_s[1], **{**made, **more})


def _plain_part(step: str, runner: str, setup: dict[str, Any], rows: _Rows, is_dry: bool) -> Part:
    """A part without engines that all its rows share."""
    environment = {"TRITON_INTERPRET": INTERPRETED["TRITON_INTERPRET"]} if is_dry else {}
    return _part(step, runner, setup, rows, _IMPORTS_S, environment=environment, patience=_PATIENCE)


def _engine_part(step: str, scene: Scene, rows: _Rows, options: Options, **more: Any) -> Part:
    """A part with engines; every row's figures depend on what the scene says, too."""
    # of all cells, only how many requests there may be shapes a row of one cell
    shared = {**asdict(scene), "cells": max(cell.batch for cell in scene.cells), "nodes": max(scene.nodes)}
    engines = {"kind": "engines", "engines": sorted({engine_of(row) for _, row, _ in rows})}
    listed = [(name, {"scene": shared, **row}, s) for name, row, s in [("engines", engines, _ROW_S), *rows]]
    setup = {"scene": scene, "work": options.work}
    return _part(step, "engine_rows:EngineRows", setup, listed, _START_S[scene.model], **more)


def _checks(options: Options) -> Iterator[Part]:
    rows: _Rows = [
        ("what is installed", {"kind": "installed"}, _CHECK_S),
        ("specrollout doctor", {"kind": "doctor"}, _DOCTOR_S),
    ]
    models = ("0.5B",) if options.is_dry else tuple(REAL_MODELS)
    most = 7 if options.is_dry else 63
    for model in models:
        for context, batch, nodes, shape in ATTENTION_CHECKS:
            if nodes <= most:
                params = {"model": model, "context": context, "batch": batch, "nodes": nodes, "shape": shape}
                name = f"tree_attention {model}, {shape} of {nodes}, context {context}"
                rows.append((name, {"kind": "tree_attention", **params}, _CHECK_S))
    for kind, cases in (("tree_verify", VERIFY_CHECKS), ("kv_commit", COMMIT_CHECKS)):
        for batch, nodes in cases:
            if nodes <= most:
                params = {"kind": kind, "batch": batch, "nodes": nodes}
                rows.append((f"{kind}, {batch} x {nodes} nodes", params, _CHECK_S))
    yield _plain_part("checks", "kernel_rows:CheckRows", {"device": options.device}, rows, options.is_dry)


def _stock(options: Options) -> Iterator[Part]:
    cell, tokens = (_DRY_CELLS[0], 8) if options.is_dry else (_IDENTITY_CELLS[0], 64)
    more = {"nodes": (DRAFTS[4.0],), "tokens": tokens, "logit_std": 1.0, "is_interpreted": options.is_dry}
    row = {"kind": "stock", "cell": [cell.batch, cell.context]}
    yield _engine_part("stock", options.scene(cell, **more), [(f"{tokens} tokens, twice", row, _ROW_S)], options)


def _identity(step: str, is_eager: bool, options: Options) -> Iterator[Part]:
    cells, nodes, tokens = _IDENTITY_CELLS, _IDENTITY_NODES, 64
    if options.is_dry:
        cells, nodes, tokens = _DRY_CELLS[1:], 5, 12
    shared: dict[str, Any] = {"nodes": (nodes,), "tokens": tokens, "logit_std": 1.0, "is_eager": is_eager}
    # a dry walk meets both runners: what runs on a GPU, interpreted, and what runs on a CPU
    is_interpreted = options.is_dry and is_eager
    scene = options.scene(*cells, drafters=("oracle", "ngram"), is_interpreted=is_interpreted, **shared)
    if "tree" in options.arms:
        rows = [_identity_row("ngram", cells[-1], nodes, None)]
        rows += [_identity_row("tree", cell, nodes, _IDENTITY_ACCURACY) for cell in reversed(cells)]
        yield _engine_part(step, scene, rows, options, name="trees")
    if "chain" in options.arms:
        scene = options.scene(*cells, is_batch_invariant=True, **shared)
        rows = [_identity_row("chain", cell, nodes, _IDENTITY_ACCURACY[:1]) for cell in reversed(cells)]
        yield _engine_part(step, scene, rows, options, name="chains, batch-invariant")


def _identity_row(arm: str, cell: Cell, nodes: int, accuracy: tuple[float, ...] | None) -> _Row:
    row: dict[str, Any] = {"kind": "identity", "arm": arm, "cell": [cell.batch, cell.context], "nodes": nodes}
    return f"{arm}, {cell}", {**row, "accuracy": accuracy and list(accuracy), "is_strict": arm == "chain"}, _ROW_S


def _kernels(options: Options) -> Iterator[Part]:
    model, nodes, cells, layers = options.large, _KERNEL_NODES, options.cells or _KERNEL_CELLS, None
    if options.is_dry:
        model, nodes, cells, layers = "0.5B", _KERNEL_NODES[:2], _DRY_CELLS[:1], 1
    rows: _Rows = []
    for cell in cells:
        for n in nodes:
            params = {"kind": "attention", "model": model, "batch": cell.batch, "context": cell.context, "nodes": n}
            rows.append((f"attention {model}, {cell}, {n} nodes", params, _KERNEL_S))
    for batch in sorted({cell.batch for cell in cells}):
        for kind in ("verify", "commit"):
            params = {"kind": kind, "model": model, "batch": batch, "nodes": max(nodes)}
            rows.append((f"{kind} {model}, {batch} x {max(nodes)} nodes", params, _KERNEL_S))
    setup = {"device": options.device, "layers": layers}
    yield _plain_part("kernels", "kernel_rows:KernelRows", setup, rows, options.is_dry)


def _speed(options: Options) -> Iterator[Part]:
    cells, taus, tokens, rounds = options.cells or _SPEED_CELLS, options.taus, 256, 3
    if options.is_dry:
        cells, taus, tokens, rounds = options.cells or _DRY_CELLS[1:], taus[:1], 24, 1
    nodes = tuple(DRAFTS[tau] for tau in taus)
    more = {"nodes": nodes, "tokens": tokens, "logit_std": 0.05, "budget": options.budget}
    rows, profiles, others = [], [], []
    for cell in cells:
        shared: dict[str, Any] = {"cell": [cell.batch, cell.context]}
        profiles.append((f"device, stock, {cell}", {"kind": "profile", "arm": STOCK, **shared}, _ROW_S))
        for tau in taus:
            for arm in options.arms:
                accuracy = list(accuracy_for(tau, DRAFTS[tau], arm))
                row = {**shared, "arm": arm, "tau": tau, "nodes": DRAFTS[tau], "accuracy": accuracy}
                name = f"{arm}, {tau:g} a step, {cell}"
                rows.append((name, {**row, "kind": "speed", "rounds": rounds}, _ROW_S))
                profiles.append((f"device, {name}", {**row, "kind": "profile"}, _ROW_S))
        tau = taus[len(taus) // 2]
        for rival in options.rivals:
            row = {**shared, "kind": "rival", "arm": rival, "tau": tau, "nodes": DRAFTS[tau], "rounds": rounds}
            others.append((f"vLLM {rival}, {tau:g} a step, {cell}", row, _ROW_S))
    scene = options.scene(*cells, is_large=True, **more)
    yield _engine_part("speed", scene, rows + profiles + others, options)


def _memory(options: Options) -> Iterator[Part]:
    model = options.large
    rows = [(f"{model}, {arm}", {"kind": "memory", "model": model, "arm": arm}, _START_S[model]) for arm in MEMORY_ARMS]
    setup = {"model": model, "work": options.work}
    yield _plain_part("memory", "engine_rows:MemoryRows", setup, rows, options.is_dry)


_MAKERS: dict[str, Callable[[Options], Iterator[Part]]] = {
    "checks": _checks,
    "stock": _stock,
    "eager": partial(_identity, "eager", True),
    "graphs": partial(_identity, "graphs", False),
    "kernels": _kernels,
    "speed": _speed,
    "memory": _memory,
}
