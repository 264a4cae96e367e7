"""Runs the plan: starts the engines, records the oracle's answers, runs the pairs, measures stock's step times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..common.engine_process import EngineProcess, EngineSpec, wait_until_quiet
from ..common.ideal import step_times
from ..common.rows import Pair, Row, make_row
from ..common.runs import Run
from ..policy.reward import problems
from ..policy.tokenizer import prompt_text
from .plan import PROMPT_LEN, STOCK, Plan, Step, problem_id, request_params

Report = Callable[[str, int], None]
"""Told what happens now, and how many units of `num_units` are done since."""
_EXTEND_REPEATS = 5


def num_units(plan: Plan) -> int:
    """Progress units: one per engine start, per recording, per pair, per step-time measurement."""
    engines = 1 + len({arm.engine for arm in plan.arms()})
    return engines + len(plan.batches) * (1 + (0 if plan.is_off_path else plan.repeats)) + len(list(plan.steps()))


class Bench:
    """The engines of one benchmark, all alive at once; a context manager."""

    def __init__(
        self, plan: Plan, model: Path, scratch: Path, report: Report, *, kv_gib: int, is_verbose: bool
    ) -> None:
        self.plan = plan
        self._model = model
        self._oracle = scratch / "oracle.json"
        self._report = report
        self._kv_gib = kv_gib
        self._is_verbose = is_verbose
        self._stack = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._prompts: list[list[int]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> list[Row]:
        """Everything, in the plan's order."""
        self._start(STOCK)
        self._record()
        for engine in dict.fromkeys(arm.engine for arm in self.plan.arms()):
            self._start(engine)
        pairs: dict[tuple[int, str, int], list[Pair]] = {}
        extend: dict[int, dict[int, list[float]]] = {batch: {} for batch in self.plan.batches}
        for step in self.plan.steps():
            pairs.setdefault((step.batch, step.arm.name, step.arm.draft), []).append(self._pair(step))
            if step.is_last_of_batch and step.is_timed and not self.plan.is_off_path:
                self._extend(step.batch, extend[step.batch])
        return [self._row(*key, pairs[key], extend[key[0]]) for key in pairs]

    def _start(self, name: str) -> None:
        self._report(f"starting the {name} engine", 0)
        spec = EngineSpec(
            name=name,
            arguments=self.plan.engine_arguments(self._model),
            kv_gib=self._kv_gib,
            has_plugin=name != STOCK,
            spec_rollout=self.plan.spec_rollout(name, self._oracle),
            is_verbose=self._is_verbose,
        )
        self._engines[name] = self._stack.enter_context(EngineProcess(spec))
        self._report("", 1)

    def _record(self) -> None:
        """Stock's answers at every batch, for the oracle; also stock's warm-up."""
        stock = self._engines[STOCK]
        texts = [prompt_text(problem.prompt) for problem in problems(max(self.plan.batches), seed=0)]
        self._prompts = [ids[:PROMPT_LEN] for ids in stock.ask("encode", texts=texts)]
        recorded: dict[str, list[int]] = {}
        for batch in self.plan.batches:
            self._report(f"recording batch {batch}", 0)
            run = stock.generate(self._prompts[:batch], request_params(self.plan, batch, None))
            recorded |= {problem_id(batch, i): list(ids) for i, ids in enumerate(run.token_ids)}
            self._report("", 1)
        self._oracle.write_text(json.dumps(recorded), encoding="utf-8")

    def _pair(self, step: Step) -> Pair:
        arm = step.arm
        what = f"{arm.name} {arm.draft}" if arm.draft else arm.name
        when = f"round {step.round + 1} of {self.plan.repeats}" if step.is_timed else "warm-up"
        self._report(f"{when}: batch {step.batch}, {what}", 0)
        order = (STOCK, arm.engine) if step.is_stock_first else (arm.engine, STOCK)
        runs = {name: self._run(name, step) for name in order}
        self._report("", 1)
        return Pair(stock=runs[STOCK], ours=runs[arm.engine], is_timed=step.is_timed)

    def _run(self, name: str, step: Step) -> Run:
        engine = self._engines[name]
        draft = None if engine.spec.spec_rollout is None else step.arm.draft
        wait_until_quiet(list(self._engines.values()), engine)
        return engine.generate(self._prompts[: step.batch], request_params(self.plan, step.batch, draft))

    def _extend(self, batch: int, times: dict[int, list[float]]) -> None:
        """One round of stock's step times at this batch, over prefixes about as long as the context half way."""
        self._report(f"stock's step times at batch {batch}", 0)
        stock = self._engines[STOCK]
        wait_until_quiet(list(self._engines.values()), stock)
        block = stock.ask("block_size")
        half_way = max(map(len, self._prompts[:batch])) + self.plan.tokens // 2
        length = min(max(1, round(half_way / block)) * block, self.plan.max_model_len() // block * block - block)
        prefixes = [_repeat(prompt, i, max(block, length)) for i, prompt in enumerate(self._prompts[:batch])]
        wanted = [1, *(1 + draft for draft in self.plan.drafts)]
        found = stock.ask("extend", prefixes=prefixes, num_tokens=wanted, repeats=_EXTEND_REPEATS, seed=batch)
        for n, milliseconds in found.items():
            times.setdefault(n, []).extend(milliseconds)
        self._report("", 1)

    def _row(self, batch: int, name: str, draft: int, pairs: Sequence[Pair], extend: dict[int, list[float]]) -> Row:
        decode_ms = [ms for pair in pairs if pair.is_timed for ms in pair.stock.step_ms()]
        times = step_times(decode_ms, extend or {1: [0.0]})
        return make_row(name, batch, draft, pairs, times)


def _repeat(prompt: list[int], request: int, length: int) -> list[int]:
    """A prefix of `length` tokens, different for every request, so that no two share cached blocks."""
    unit = [*prompt[request % len(prompt) :], *prompt[: request % len(prompt)]]
    return (unit * (length // len(unit) + 1))[:length]
