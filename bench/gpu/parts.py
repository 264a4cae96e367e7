"""The rows of each step, in parts that share a process. Pure.

A row's limit is generous, for what is compiled is compiled in the row that first needs it; what it may well take is a
guess. A dry walk has rows of every kind, small enough for a CPU and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.shapes import ATTENTION_CHECKS, COMMIT_CHECKS, MODELS, VERIFY_CHECKS
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from .memory_rows import ARMS as MEMORY_ARMS
from .plan import ARMS, DRAFTS, Cell, Scene, accuracy_for, engine_of
from .tasks import FIRST_HOUR, Part, Task

SMALL, LARGE, TINY = "0.5B", "7B", "tiny"
CELLS = (Cell(1, 1 << 10), Cell(32, 1 << 10))
"""Of the step `speed`."""
KERNEL_CELLS = tuple(Cell(batch, context) for context in (1 << 10, 16 << 10) for batch in (1, 8, 32))
_IDENTITY_CELLS: tuple[Cell, ...] = (Cell(1, 1 << 10), Cell(8, 1 << 10))
_IDENTITY_NODES, _IDENTITY_ACCURACY = 15, (0.6, 0.2)
_KERNEL_NODES: tuple[int, ...] = (0, 7, 15)
_DRY_CELLS: tuple[Cell, ...] = (Cell(1, 64), Cell(2, 64))
# seconds: (limit, what it may well take)
_CHECK_S, _DOCTOR_S, _KERNEL_S, _ROW_S = (150, 10), (250, 30), (150, 8), (240, 15)
_IMPORTS_S, _START_S = (180, 15), {LARGE: (360, 110), SMALL: (300, 60), TINY: (300, 30)}


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
    small: str = SMALL
    large: str = LARGE
    budget: str = "fixed"
    seed: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"


def parts(options: Options) -> list[Part]:
    """In the order of the steps."""
    return [part for step in options.steps for part in _MAKERS[step](options)]


_PATIENCE = 6  # a process without engines is soon there again


def _task(name: str, params: dict[str, Any], seconds: tuple[float, float]) -> Task:
    return Task(name=name, params=params, limit_s=seconds[0], expected_s=seconds[1])


def _plain_part(step: str, runner: str, setup: dict[str, Any], tasks: list[Task], is_dry: bool) -> Part:
    """A part without engines."""
    return Part(
        step=step,
        name=step,
        runner=f"{__package__}.{runner}:Rows",
        setup=setup,
        environment={"TRITON_INTERPRET": INTERPRETED["TRITON_INTERPRET"]} if is_dry else {},
        tasks=tuple(tasks),
        limit_s=_IMPORTS_S[0],
        expected_s=_IMPORTS_S[1],
        patience=_PATIENCE,
    )


def _checks(options: Options) -> Iterator[Part]:
    tasks = [
        _task("what is installed", {"kind": "installed"}, _CHECK_S),
        _task("specrollout doctor", {"kind": "doctor"}, _DOCTOR_S),
    ]
    models = MODELS[-1:] if options.is_dry else MODELS
    most = 7 if options.is_dry else 63
    for model in models:
        for context, batch, nodes, shape in ATTENTION_CHECKS:
            if nodes <= most:
                params = {"model": model.name, "context": context, "batch": batch, "nodes": nodes, "shape": shape}
                name = f"tree_attention {model.name}, {shape} of {nodes}, context {context}"
                tasks.append(_task(name, {"kind": "tree_attention", **params}, _CHECK_S))
    for kind, cases in (("tree_verify", VERIFY_CHECKS), ("kv_commit", COMMIT_CHECKS)):
        for batch, nodes in cases:
            if nodes <= most:
                params = {"kind": kind, "batch": batch, "nodes": nodes}
                tasks.append(_task(f"{kind}, {batch} x {nodes} nodes", params, _CHECK_S))
    yield _plain_part("checks", "check_rows", {"device": options.device}, tasks, options.is_dry)


def _kernels(options: Options) -> Iterator[Part]:
    model, nodes = options.large, _KERNEL_NODES
    cells = options.cells or KERNEL_CELLS
    if options.is_dry:
        model, nodes, cells = SMALL, _KERNEL_NODES[:2], _DRY_CELLS[:1]
    tasks = []
    for cell in cells:
        for n in nodes:
            params = {"kind": "attention", "model": model, "batch": cell.batch, "context": cell.context, "nodes": n}
            tasks.append(_task(f"attention {model}, {cell}, {n} nodes", params, _KERNEL_S))
    for batch in sorted({cell.batch for cell in cells}):
        for kind in ("verify", "commit"):
            params = {"kind": kind, "model": model, "batch": batch, "nodes": max(nodes)}
            tasks.append(_task(f"{kind} {model}, {batch} x {max(nodes)} nodes", params, _KERNEL_S))
    setup = {"device": options.device, "layers": 1 if options.is_dry else None}
    yield _plain_part("kernels", "kernel_rows", setup, tasks, options.is_dry)


def _memory(options: Options) -> Iterator[Part]:
    model = options.large
    tasks = [
        _task(f"{model}, {arm}", {"kind": "memory", "model": model, "arm": arm}, _START_S[model]) for arm in MEMORY_ARMS
    ]
    setup = {"model": model, "work": str(options.work)}
    yield _plain_part("memory", "memory_rows", setup, tasks, options.is_dry)


def _scene_part(step: str, name: str, scene: Scene, rows: list[tuple[str, dict[str, Any]]], work: Path) -> Part:
    """A part with engines; every row's figures depend on what the scene says, too."""
    shared = scene.as_setup()
    # of all cells, only how many requests there may be shapes a row of one cell
    shared |= {"cells": max(batch for batch, _ in scene.cells), "nodes": max(scene.nodes)}
    engines = sorted({engine_of(row) for _, row in rows})
    listed = [("engines", {"kind": "engines", "engines": engines}), *rows]
    limit_s, expected_s = _START_S[scene.model]
    return Part(
        step=step,
        name=name,
        runner=f"{__package__}.engine_rows:Rows",
        setup={**scene.as_setup(), "work": str(work)},
        tasks=tuple(_task(title, {"scene": shared, **row}, _ROW_S) for title, row in listed),
        limit_s=limit_s,
        expected_s=expected_s,
    )


def _stock(options: Options) -> Iterator[Part]:
    cell = _DRY_CELLS[0] if options.is_dry else _IDENTITY_CELLS[0]
    tokens = 8 if options.is_dry else 64
    scene = _scene(options, (cell,), (DRAFTS[4.0],), tokens, 1.0, is_interpreted=options.is_dry)
    row = {"kind": "stock", "cell": [cell.batch, cell.context]}
    yield _scene_part("stock", "stock", scene, [(f"{tokens} tokens, twice", row)], options.work)


def _scene(
    options: Options, cells: tuple[Cell, ...], nodes: tuple[int, ...], tokens: int, logit_std: float, **more: Any
) -> Scene:
    large = more.pop("is_large", False)
    return Scene(
        model=TINY if options.is_dry else options.large if large else options.small,
        cells=tuple((cell.batch, cell.context) for cell in cells),
        nodes=nodes,
        tokens=tokens,
        logit_std=logit_std,
        seed=options.seed,
        is_dry=options.is_dry,
        **more,
    )


def _identity(step: str, is_eager: bool) -> Callable[[Options], Iterator[Part]]:
    def made(options: Options) -> Iterator[Part]:
        cells, nodes, tokens = _IDENTITY_CELLS, _IDENTITY_NODES, 64
        if options.is_dry:
            cells, nodes, tokens = _DRY_CELLS[1:], 5, 12
        # a dry walk meets both runners: what runs on a GPU, interpreted, and what runs on a CPU
        shared: dict[str, Any] = {"is_eager": is_eager, "is_interpreted": options.is_dry and is_eager}
        scene = _scene(options, cells, (nodes,), tokens, 1.0, drafters=("oracle", "ngram"), **shared)
        rows = [_identity_row("ngram", cells[-1], nodes, None)]
        rows += [_identity_row("tree", cell, nodes, _IDENTITY_ACCURACY) for cell in reversed(cells)]
        yield _scene_part(step, "trees", scene, rows, options.work)
        scene = _scene(options, cells, (nodes,), tokens, 1.0, is_batch_invariant=True, is_eager=is_eager)
        rows = [_identity_row("chain", cell, nodes, _IDENTITY_ACCURACY[:1]) for cell in reversed(cells)]
        yield _scene_part(step, "chains, batch-invariant", scene, rows, options.work)

    return made


def _identity_row(arm: str, cell: Cell, nodes: int, accuracy: tuple[float, ...] | None) -> tuple[str, dict[str, Any]]:
    row: dict[str, Any] = {"kind": "identity", "arm": arm, "cell": [cell.batch, cell.context], "nodes": nodes}
    return f"{arm}, {cell}", {**row, "accuracy": accuracy and list(accuracy), "is_strict": arm == "chain"}


def _speed(options: Options) -> Iterator[Part]:
    cells, taus, tokens, rounds = options.cells or CELLS, options.taus, 256, 3
    if options.is_dry:
        cells, taus, tokens, rounds = options.cells or _DRY_CELLS[1:], taus[:1], 24, 1
    nodes = tuple(DRAFTS[tau] for tau in taus)
    scene = _scene(options, cells, nodes, tokens, 0.05, is_large=True, budget=options.budget)
    rows, profiles, others = [], [], []
    for cell in cells:
        shared: dict[str, Any] = {"cell": [cell.batch, cell.context]}
        profiles.append((f"device, stock, {cell}", {"kind": "profile", "arm": "stock", **shared}))
        for tau in taus:
            for arm in options.arms:
                accuracy = list(accuracy_for(tau, DRAFTS[tau], arm))
                row = {**shared, "arm": arm, "tau": tau, "nodes": DRAFTS[tau], "accuracy": accuracy}
                name = f"{arm}, {tau:g} a step, {cell}"
                rows.append((name, {**row, "kind": "speed", "rounds": rounds}))
                profiles.append((f"device, {name}", {**row, "kind": "profile"}))
        tau = taus[len(taus) // 2]
        for rival in options.rivals:
            row = {**shared, "kind": "rival", "arm": rival, "tau": tau, "nodes": DRAFTS[tau], "rounds": rounds}
            others.append((f"vLLM {rival}, {tau:g} a step, {cell}", row))
    yield _scene_part("speed", "speed", scene, rows + profiles + others, options.work)


_MAKERS: dict[str, Callable[[Options], Iterator[Part]]] = {
    "checks": _checks,
    "stock": _stock,
    "eager": _identity("eager", is_eager=True),
    "graphs": _identity("graphs", is_eager=False),
    "kernels": _kernels,
    "speed": _speed,
    "memory": _memory,
}
