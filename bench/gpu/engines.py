"""Runs an engine plan: stock vLLM and ours side by side, then each rival beside stock."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

from ..common.engine_process import EngineProcess, EngineSpec
from ..common.rows import Pair, Row, make_row
from ..common.runs import Run
from . import models
from .identity import compare
from .plan import DRAFTS, Cell, Plan, key_of, params, prompts, recording, rival

LOGIT_STD = 1.0
"""Standard deviation of a row of logits: the largest are near 5, where bf16 resolves 0.03."""
_INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell of one arm."""

    model: str
    context: int
    row: Row
    # ours: tokens compared with stock's, and proven ties among them; rivals are not lossless and not compared
    compared: int | None = None
    ties: int | None = None
    # ours: milliseconds and counts of the worker, per step
    split: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self.row)
        if self.compared is None:
            # what was not compared is neither identical nor different, and only our worker counts drafts
            row |= dict.fromkeys(("identical", "tokens_per_step", "nodes_per_step"))
        return {**asdict(self), "row": row}


class Engines:
    """The engines of one plan; a context manager. `notes` says what was left out, and why."""

    def __init__(self, plan: Plan, scratch: Path, report: Report, *, is_verbose: bool) -> None:
        self.plan, self.notes, self.results = plan, list[str](), list[Result]()
        self._scratch, self._report, self._is_verbose = scratch, report, is_verbose
        self._vocab = models.CONFIGS[plan.model].vocab_size
        self._folder = models.write(plan.model, scratch / plan.model)
        self._draft = models.write("0.5B" if plan.model == "7B" else "tiny", scratch / "draft", self._vocab)
        self._oracle = scratch / f"oracle-{plan.model}.json"
        self._stack = ExitStack()
        self._checksum: int | None = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Everything, in order; `results` grows as cells are done."""
        stock = self._stack.enter_context(self._start("stock"))
        answers: dict[str, list[int]] = {}
        for cell in self.plan.cells:
            self._report(f"{self.plan.model}: recording {cell.batch} x {cell.context}")
            self._prime([stock], cell)
            run = self._generate(stock, cell, None)[0]
            for tau in self.plan.taus:
                for i, answer in enumerate(run.token_ids):
                    key = key_of(cell, tau, i)
                    answers[key] = recording(answer, tau, key, self._vocab)
        self._oracle.write_text(json.dumps(answers), encoding="utf-8")
        with self._start("ours", spec_rollout=self.plan.spec_rollout(str(self._oracle))) as ours:
            for cell in self.plan.cells:
                self._prime([stock, ours], cell)
                for tau in self.plan.taus:
                    self._ours(stock, ours, cell, tau)
        for name in self.plan.rivals:
            self._rival(stock, name)

    def _start(self, name: str, spec_rollout: dict[str, Any] | None = None, **arguments: Any) -> EngineProcess:
        """A started engine with the same random weights as all others.

        Raises:
            EngineFailed: it did not start.
            SpecRolloutError: its weights are not those of the first engine.
        """
        self._report(f"{self.plan.model}: starting {name}")
        engine = EngineProcess(
            EngineSpec(
                name=name,
                arguments={**self.plan.arguments(str(self._folder)), **arguments},
                has_plugin=spec_rollout is not None,
                spec_rollout=spec_rollout,
                is_verbose=self._is_verbose,
                environment=_INSECURE,
            )
        )
        try:
            checksum = engine.ask("randomise", logit_std=LOGIT_STD)
            if self._checksum not in (None, checksum):
                raise SpecRolloutError(
                    f"the {name} engine's weights differ from stock's: checksum {checksum}, not {self._checksum}",
                    "nothing can be compared; report this with the versions in use",
                )
        except BaseException:
            engine.close()
            raise
        self._checksum = checksum
        return engine

    def _prime(self, engines: list[EngineProcess], cell: Cell) -> None:
        for engine in engines:
            engine.ask("prime", prompts=prompts(cell, self._vocab))

    def _generate(self, engine: EngineProcess, cell: Cell, tau: float | None) -> tuple[Run, dict[str, Any] | None]:
        """(the run, the worker's totals); the context comes from the prefix cache, so it is one step of one token."""
        reply = engine.ask(
            "generate",
            prompts=prompts(cell, self._vocab),
            params=params(self.plan, cell, tau),
            stats=tau is not None,
            is_warm=True,
        )
        return Run.from_child(reply), reply.get("stats")

    def _ours(self, stock: EngineProcess, ours: EngineProcess, cell: Cell, tau: float) -> None:
        """Warm-up and rounds, the order alternating; every run is compared, the warm-up's too."""
        pairs, compared, ties, totals = [], 0, 0, None
        for number in range(-1, self.plan.repeats):
            self._report(f"{self.plan.model}: {cell.batch} x {cell.context}, {tau:g} tokens a step, round {number + 1}")
            runs: dict[str, Run] = {}
            for name in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
                if name == "stock":
                    runs[name] = self._generate(stock, cell, None)[0]
                else:
                    runs[name], totals = self._generate(ours, cell, tau)
            verdict = compare(
                stock, prompts(cell, self._vocab), params(self.plan, cell, None), runs["stock"], runs["ours"]
            )
            compared, ties = compared + verdict.compared, ties + verdict.ties
            pairs.append(Pair(stock=runs["stock"], ours=verdict.ours, is_timed=number >= 0))
        row = make_row(f"ours, {tau:g} a step", cell.batch, DRAFTS[tau], pairs)
        result = Result(
            model=self.plan.model,
            context=cell.context,
            row=row,
            compared=compared,
            ties=ties,
            split=split(totals or {}) if row.identical else None,
        )
        self.results.append(result)

    def _rival(self, stock: EngineProcess, name: str) -> None:
        """One method of vLLM's own, at the middle acceptance; left out with a reason if it does not start."""
        if name == "suffix" and importlib.util.find_spec("arctic_inference") is None:
            self.notes.append(f"{self.plan.model}: suffix was left out: arctic_inference is not installed")
            return
        tau = self.plan.taus[len(self.plan.taus) // 2]
        try:
            engine = self._start(name, speculative_config=rival(name, tau, str(self._draft)))
        except SpecRolloutError as error:
            self.notes.append(f"{self.plan.model}: {name} was left out: {root_cause(error)}")
            return
        with engine:
            for cell in self.plan.cells:
                self._prime([stock, engine], cell)
                pairs = []
                for number in range(-1, self.plan.repeats):
                    self._report(f"{self.plan.model}: {cell.batch} x {cell.context}, {name}, round {number + 1}")
                    base, found = (self._generate(one, cell, None)[0] for one in (stock, engine))
                    # its tokens are others by design: only its times are wanted, so it is not called different
                    found = Run(token_ids=base.token_ids, finish_s=found.finish_s, step_s=found.step_s)
                    pairs.append(Pair(stock=base, ours=found, is_timed=number >= 0))
                row = make_row(f"vLLM {name}, synthetic {tau:g}", cell.batch, DRAFTS[tau], pairs)
                self.results.append(Result(model=self.plan.model, context=cell.context, row=row))


def root_cause(error: SpecRolloutError) -> str:
    """The last exception named in an engine's log, or else the first line: vLLM's own says to look above."""
    lines = [line.strip() for line in error.cause.splitlines()]
    named = [line for line in lines[1:] if re.search(r"(Error|Exception): \S", line) and "See root cause" not in line]
    return (named or lines)[-1 if named else 0][-300:]


def split(totals: dict[str, Any]) -> dict[str, float]:
    """The worker's totals per step: whatever it reports in milliseconds, and its counts."""
    steps = totals.get("steps") or 0
    if not steps:
        return {}
    names = [name for name, value in totals.items() if isinstance(value, (int, float)) and name != "steps"]
    return {"steps": steps, **{name: totals[name] / steps for name in names}}
