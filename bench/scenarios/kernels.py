"""`specrollout bench kernels`: our kernels against their specifications, and timed beside FlashAttention 3."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ..kernels.shapes import ATTENTION_CHECKS, CHECKED, COMMIT_CHECKS, MODELS, VERIFY_CHECKS, Attention, Cell, Verdict
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.report import Columns, Found, Table
from ..runner.scenario import Scenario, Session, command, flag

KERNELS = ("attention", "verify", "commit")
_MOST_INTERPRETED = 7
"""Nodes of a check on a CPU, where kernels are interpreted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel at one shape."""

    name: str
    # None: nothing to check beside the checks at smaller shapes
    passed: bool | None
    # against what
    checked: str = ""
    # way -> median_us, low_us, high_us and samples of one call
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    # least bytes that must move, at the bandwidth of a copy
    roof_us: float | None = None
    # calls that were timed together
    layers: int | None = None
    copy_bytes_per_s: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Kernels(Scenario):
    """Check the kernels against their specifications, or time them at full shapes beside FlashAttention 3."""

    bench: ClassVar[str] = "kernels"

    kernels: tuple[str, ...] = flag(KERNELS, "Which of them.", choices=KERNELS)
    is_timed: bool = flag(False, "Check at small shapes, or time at those of a model.", "--time/--check")
    model: str = flag("7B", "Qwen2.5's shape of this size, to time at.", choices=tuple(MODELS))
    cells: tuple[Cell, ...] = flag(
        tuple(Cell(batch, context) for context in (1 << 10, 16 << 10) for batch in (1, 8, 32)),
        "BATCHxCONTEXT to time at.",
        parse=Cell.parse_all,
    )
    nodes: tuple[int, ...] = flag((7, 15), "Nodes of a tree to time.", within=(1, 63))
    device: str = flag("cuda", "`cpu` interprets the kernels: no time means anything there.", choices=("cuda", "cpu"))

    def measure(self, session: Session) -> Found:
        if self.device == "cpu":
            # before Triton is imported
            os.environ["TRITON_INTERPRET"] = INTERPRETED["TRITON_INTERPRET"]
        jobs = list(self._timed() if self.is_timed else self._checks())
        report, rows = session.display.steps(len(jobs)), []
        for name, job in jobs:
            report(name, 0)
            try:
                rows.append(KernelRow(name=name, **job()))
            except Exception as error:
                rows.append(KernelRow(name=name, passed=False, checked=f"{type(error).__name__}: {error}"[:500]))
                if not self._is_usable():
                    rows[-1].notes.append("the device is of no more use to this process: what follows is left out")
                    break
            report("", 1)
        return Found(rows=rows, extra={"device": _described(self.device)})

    def _checks(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        from ..kernels import attention, verdict

        is_small = self.device == "cpu"
        most = _MOST_INTERPRETED if is_small else 63
        if "attention" in self.kernels:
            for model in ("0.5B",) if is_small else tuple(CHECKED):
                for context, batch, nodes, kind in ATTENTION_CHECKS:
                    if nodes <= most:
                        case = Attention(CHECKED[model], context, batch, nodes, kind)
                        name = f"tree_attention {model}, {kind} of {nodes}, context {context}"
                        yield name, partial(attention.checked, case, self.device)
        for kernel, check, cases in (
            ("verify", verdict.checked_verify, VERIFY_CHECKS),
            ("commit", verdict.checked_commit, COMMIT_CHECKS),
        ):
            for batch, nodes in cases if kernel in self.kernels else ():
                if nodes <= most:
                    yield f"{kernel}, {batch} x {nodes} nodes", partial(check, batch, nodes, self.device)

    def _timed(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        from ..kernels import attention, verdict
        from ..kernels.timing import GraphTimer, HostTimer

        timer, model = (GraphTimer() if self.device == "cuda" else HostTimer()), MODELS[self.model]
        layers = None if self.device == "cuda" else 1
        for cell in self.cells if "attention" in self.kernels else ():
            for n in self.nodes:
                case = Attention(model, cell.context, cell.batch, n, "tree")
                name = f"attention {self.model}, {cell}, {n} nodes"
                yield name, partial(attention.measure, timer, case, self.device, layers=layers)
        most = max(self.nodes)
        for batch in sorted({cell.batch for cell in self.cells}):
            for kernel, measure in (("verify", verdict.measure_verify), ("commit", verdict.measure_commit)):
                if kernel in self.kernels:
                    name = f"{kernel} {self.model}, {batch} x {most} nodes"
                    yield name, partial(measure, timer, Verdict(model, batch, most), self.device)

    def _is_usable(self) -> bool:
        if self.device == "cuda":
            import torch

            try:
                torch.cuda.synchronize()
            except Exception:
                return False
        return True

    def title(self, found: Found) -> str:
        return f"kernels on {found.extra['device']['name']}; microseconds of one call, as median"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, {"row": "name", "right": "passed", **(_TIMES if self.is_timed else {})})
        for row in found.rows:
            yield from (f"{row.name}: {text}" for text in ([row.checked] if row.passed is False else []) + row.notes)


def _us(way: str) -> Callable[[KernelRow], str | None]:
    """Median microseconds, and half the distance of the quartiles."""

    def show(row: KernelRow) -> str | None:
        time = row.times.get(way)
        return None if time is None else f"{time['median_us']:.1f} ±{(time['high_us'] - time['low_us']) / 2:.1f}"

    return show


def over_flash(row: KernelRow) -> float | None:
    """How many times FlashAttention 3's time ours takes, as vLLM calls that in its graphs."""
    if not {"ours", "fa3 graph"} <= row.times.keys():
        return None
    return row.times["ours"]["median_us"] / row.times["fa3 graph"]["median_us"]


_TIMES: Columns = {
    **{"ours": _us("ours"), "FA3": _us("fa3 graph"), "FA3 auto": _us("fa3 auto")},
    "FA3 context": _us("fa3 context"),
    "roof": "roof_us",
    "x FA3": over_flash,
}


def _described(device: str) -> dict[str, Any]:
    import torch

    if device == "cpu":
        return {"name": "a CPU, interpreted"}
    one = torch.cuda.get_device_properties(0)
    return {
        "name": one.name,
        "cuda": torch.version.cuda,
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": one.multi_processor_count,
        "l2_bytes": one.L2_cache_size,
        "memory_gib": round(one.total_memory / 2**30, 1),
    }


bench_kernels = command(Kernels)
