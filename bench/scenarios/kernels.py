"""`specrollout bench kernels`: our kernels against their specifications."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..kernels.shapes import ATTENTION_CHECKS, CHECKED, COMMIT_CHECKS, VERIFY_CHECKS, Attention
from ..runner.fields import Row, columns
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.report import Found, Table
from ..runner.scenario import Scenario, Session, command, flag

KERNELS = ("attention", "verify", "commit")
_MOST_INTERPRETED = 7
"""Nodes of a check on a CPU, where kernels are interpreted."""


@dataclass(frozen=True, kw_only=True)
class Kernels(Scenario):
    """Check the kernels against their specifications, at small shapes of several models."""

    bench: ClassVar[str] = "kernels"

    kernels: tuple[str, ...] = flag(KERNELS, "Which of them.", choices=KERNELS)
    device: str = flag("cuda", "`cpu` interprets the kernels.", choices=("cuda", "cpu"))

    def measure(self, session: Session) -> Found:
        if self.device == "cpu":
            # before Triton is imported
            os.environ["TRITON_INTERPRET"] = INTERPRETED["TRITON_INTERPRET"]
        jobs = list(self._checks())
        report, rows = session.display.steps(len(jobs)), []
        for name, job in jobs:
            report(name, 0)
            try:
                rows.append(Row(name=name, notes=[], **job()))
            except Exception as error:
                told = f"{type(error).__name__}: {error}"[:500]
                rows.append(Row(name=name, passed=False, checked=told, notes=[]))
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

    def _is_usable(self) -> bool:
        if self.device == "cuda":
            import torch

            try:
                torch.cuda.synchronize()
            except Exception:
                return False
        return True

    def title(self, found: Found) -> str:
        return f"kernels on {found.extra['device']['name']}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, columns("name: row", "passed"))
        for row in found.rows:
            yield from (f"{row.name}: {text}" for text in ([row.checked] if row.passed is False else []) + row.notes)


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
