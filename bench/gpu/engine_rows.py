"""Rows of engines: what they are, whether ours yields stock's tokens, how fast, and how long the device idles."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_specrollout.cli.plan import CAPTURE_SIZES, estimate_mib, plan_graphs, read_shape

from ..runner.engine_process import EngineProcess, EngineSpec
from ..runner.engines import run_round
from ..runner.rows import Pair, make_row
from ..runner.runs import Run, partings
from . import identity, plan
from .child import Rows
from .engines import Engines
from .plan import RIVALS, STOCK, Cell, engine_of

_PARTED_SHARE = 0.1
"""Most of a batch's requests that may part from stock's, unproven, in a row that is about speed."""
_MAX_NUM_SEQS, _MAX_TOKENS = 256, 512
"""Most requests, and most tokens of a captured step: vLLM's own defaults."""
_LOGGED = re.compile(r"Graph capturing finished in \S+ secs, took (-?[\d.]+) GiB")
_LESSONS = 3
"""Runs after which our answers are taken to be what they are; a tie may turn each one's into others."""


class EngineRows(Rows):
    """Of one part, with engines that they share.

    Args:
        setup: `scene`, and `work`: the folder to work in.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(setup, rows)
        self.scene = setup["scene"]
        taus = {row["arm"]: row["tau"] for row in rows if row.get("arm") in RIVALS and "tau" in row}
        names = dict.fromkeys([STOCK, *(name for row in rows for name in row.get("engines", [engine_of(row)]))])
        self._engines = Engines(self.scene, list(names), setup["work"], taus)

    def __exit__(self, *_: object) -> None:
        self._engines.close()

    def engines(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return self._engines.facts()

    def stock(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The same requests twice: what stock itself does not repeat, nobody can be compared with."""
        runs = [self._engines.generate(STOCK, _cell(row))[0] for _ in range(2)]
        verdict = identity.compare(*runs)
        return {
            "is_right": not verdict.partings and verdict.compared == _cell(row).batch * self.scene.tokens,
            "checked": "stock's second run against its first, token by token",
            "tokens": list(runs[0].token_ids[0]),
            "steps": len(runs[1].step_s),
            "step_ms": _step_ms(runs[1]),
            **verdict.as_dict(),
        }

    def identity(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Stock, then ours with drafts; every difference is put to stock, in one batch."""
        cell, arm, engine = _cell(row), row["arm"], engine_of(row)
        stock, _ = self._engines.generate(STOCK, cell, arm)
        if row["accuracy"] is not None:
            self._engines.teach(engine, stock, row["accuracy"])
        ours, totals = self._engines.generate(engine, cell, arm, row["nodes"])
        if not totals.get("drafted"):
            raise RuntimeError(f"nothing was drafted, so nothing was checked: {totals}")
        verdict = identity.compare(stock, ours)
        if verdict.partings:
            asked = self._engines.prime(STOCK, cell, arm), plan.params(self.scene, cell, arm)
            verdict = identity.prove(self._engines.engine(STOCK), *asked, stock, verdict)
        proof = "no tie allowed" if row["is_strict"] else "every difference must be a tie that stock itself proves"
        branches, notes = totals.get("branches_committed", 0), []
        if arm == "tree" and not branches:
            notes.append("no branch but the first was accepted: the commit moved nothing")
        if self.scene.is_batch_invariant and self.scene.is_dry:
            notes.append("VLLM_BATCH_INVARIANT was left out: its kernels need a GPU")
        return {
            "is_right": not (verdict.partings if row["is_strict"] else verdict.unproven),
            "checked": f"every token against stock's; {proof}",
            "steps": len(ours.step_s),
            "stock_steps": len(stock.step_s),
            "drafted": totals["drafted"],
            "accepted": totals["accepted"],
            "branches_committed": branches,
            "notes": notes,
            "split": split(totals),
            **verdict.as_dict(),
        }

    def _settled(self, row: Mapping[str, Any]) -> tuple[Run, int]:
        """Let the oracle draft our own answers, so that it stays right behind a tie: (what it knows, runs it took)."""
        cell, engine, lessons = _cell(row), engine_of(row), 0
        taught = self._engines.generate(STOCK, cell)[0]
        while True:
            self._engines.teach(engine, taught, row["accuracy"])
            run, lessons = self._engines.generate(engine, cell, nodes=row["nodes"])[0], lessons + 1
            if lessons == _LESSONS or run.token_ids == taught.token_ids:
                return taught, lessons
            taught = run

    def speed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Warm-up, then rounds, the order alternating. Each run is compared with stock's of its round."""
        cell, engine = _cell(row), engine_of(row)
        taught, lessons = self._settled(row)
        pairs, parted, stale, splits = [], set[int](), set[int](), []

        def run(name: str | None) -> Run:
            found, totals = self._engines.generate(name or STOCK, cell, nodes=row["nodes"] if name else None)
            # of the warm-up too: the last one is told
            splits.extend([split(totals)] if totals else [])
            return found

        for number in range(-1, row["rounds"]):
            pair = run_round(number, [engine], run)[engine]
            parted |= {one.request for one in partings(pair.stock, pair.ours)}
            stale |= {one.request for one in partings(taught, pair.ours)}
            pairs.append(pair)
        agreement = _agreement(cell, parted, len(pairs))
        if agreement["is_right"]:
            pairs = [replace(pair, ours=_as_if(pair.stock, pair.ours)) for pair in pairs]
        made = make_row(f"{row['arm']}, {row['tau']:g} a step", cell.batch, row["nodes"], pairs)
        timed = [pair for pair in pairs if pair.is_timed] if made.identical else []
        return {
            **agreement,
            # requests whose answers the oracle no longer knew
            "stale": len(stale),
            "lessons": lessons,
            "row": asdict(made),
            "step_ms": _step_ms(*(pair.ours for pair in timed)),
            "stock_step_ms": _step_ms(*(pair.stock for pair in timed)),
            "split": splits[-1] if made.identical else None,
        }

    def rival(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One of vLLM's own methods beside stock; it is not lossless, so its tokens are not compared."""
        cell, pairs = _cell(row), []
        for number in range(-1, row["rounds"]):
            base, found = (self._engines.generate(name, cell)[0] for name in (STOCK, row["arm"]))
            pairs.append(Pair(stock=base, ours=_as_if(base, found), is_timed=number >= 0))
        made = asdict(make_row(f"vLLM {row['arm']}, synthetic {row['tau']:g}", cell.batch, row["nodes"], pairs))
        # what was not compared is neither identical nor different, and only our worker counts drafts
        made |= dict.fromkeys(("identical", "tokens_per_step", "nodes_per_step"))
        return {"checked": "not compared: other tokens than stock's by design", "row": made}

    def profile(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A step's wall clock from a plain run, and how much of it the device works from a profiled one."""
        cell, arm = _cell(row), row["arm"]
        engine, nodes = (STOCK, None) if arm == STOCK else (engine_of(row), row["nodes"])
        if arm != STOCK:
            self._settled(row)
        stock, _ = self._engines.generate(STOCK, cell)
        run, totals = self._engines.generate(engine, cell, nodes=nodes)
        found = self._engines.engine(engine).ask(
            "profile", prompts=self._engines.prime(engine, cell), params=plan.params(self.scene, cell, nodes=nodes)
        )
        agreement = _agreement(cell, {one.request for one in partings(stock, run)}, 1)
        step_ms = _step_ms(run) if agreement["is_right"] else None
        busy_ms = found["busy_ms"] / max(1, found["steps"])
        return {
            **agreement,
            "step_ms": step_ms,
            "busy_ms": busy_ms,
            "idle_ms": None if step_ms is None else step_ms - busy_ms,
            "steps": len(run.step_s),
            "wait_ms": split(totals).get("wait_ms"),
            "kernels": found["kernels"],
        }


def _as_if(stock: Run, ours: Run) -> Run:
    """`ours` with stock's tokens, for the figures of a run whose differences are told apart from them."""
    return replace(ours, token_ids=stock.token_ids)


def _cell(row: Mapping[str, Any]) -> Cell:
    return Cell(*row["cell"])


def _agreement(cell: Cell, parted: set[int], runs: int) -> dict[str, Any]:
    """What a row about speed says of its outputs; `parted`: the requests that differ from stock's in any run."""
    allowed = int(cell.batch * _PARTED_SHARE)
    told = f"{cell.batch - len(parted)} of {cell.batch} requests equal to their ends, at most {allowed} may part"
    return {
        "is_right": len(parted) <= allowed,
        "checked": f"every token of {runs} runs against stock's beside it: {told}; not asked whether by ties",
        "parted": len(parted),
    }


def _step_ms(*runs: Run) -> float | None:
    """Median over runs of the mean of all steps but the first, which also admits the requests."""
    means = [statistics.fmean(times) for run in runs if (times := run.step_ms())]
    return statistics.median_high(means) if means else None


def split(totals: Mapping[str, Any]) -> dict[str, float]:
    """The worker's totals per step: whatever it reports in milliseconds, and its counts."""
    steps = totals.get("steps")
    if not steps:
        return {}
    numbers = {name: value for name, value in totals.items() if isinstance(value, (int, float))}
    return {name: value if name == "steps" else value / steps for name, value in numbers.items()}


class MemoryRows(Rows):
    """Of device memory, each with an engine of its own that differs in nothing but its CUDA graphs.

    Args:
        setup: `model`, and `work`: the folder to work in.
    """

    def memory(self, row: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        name, sizes = row["arm"], plan.MEMORY_ARMS[row["arm"]]
        folder = plan.write_model(self.setup["model"], Path(self.setup["work"]) / "models" / self.setup["model"])
        arguments = {
            "model": str(folder),
            **plan.DUMMY,
            "max_num_seqs": _MAX_NUM_SEQS,
            "max_model_len": 4096,
            # as large in all, so that graphs are what differs
            "kv_cache_memory_bytes": 2 << 30,
        }
        ours = {"has_plugin": sizes is not None, "spec_rollout": plan.memory_spec_rollout(sizes)}
        before = torch.cuda.mem_get_info()[0]
        spec = EngineSpec(name=name, arguments=arguments, environment={"VLLM_LOGGING_LEVEL": "INFO"}, **ours)
        engine = EngineProcess(spec)
        try:
            used = (before - torch.cuda.mem_get_info()[0]) / 2**20
            logged = [float(gib) * 1024 for gib in _LOGGED.findall(engine.log())]
        finally:
            engine.kill()
        estimated = None
        if sizes:
            graphs = plan_graphs(sizes, (*CAPTURE_SIZES, *range(272, 513, 16)), _MAX_NUM_SEQS, _MAX_TOKENS, limit=64)
            estimated = estimate_mib(graphs, read_shape(folder))
        return {
            "device_mib": used,
            # by vLLM's log, which covers vLLM's own graphs only
            "logged_mib": logged[-1] if logged else None,
            "estimated_mib": estimated,
        }
