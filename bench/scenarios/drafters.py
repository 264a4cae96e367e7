"""`specrollout bench drafters`: models that draft, side by side: how often they are met, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS
from vllm_specrollout.drafters import levels
from vllm_specrollout.errors import ConfigError

from ..policy.reward import problems
from ..policy.tasks import Problem
from ..runner.engines import PROMPT_LEN, STOCK, Engines, run_round, sampling
from ..runner.models import find_model, shipped_drafters
from ..runner.report import Found, print_rows, print_table
from ..runner.rows import Pair, Row, make_row
from ..runner.runs import Run
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.tables import MET

GREEDY, SHARED, COMB, UNION = "greedy", "shared noise", "comb", "union"
_AS = {GREEDY: (levels.GREEDY, False), SHARED: (None, False), COMB: (None, True), UNION: (None, True)}
"""Arm -> the sharpness (None: learned), and whether it has alternatives."""
_HOST = ("ngram",)
"""What the union drafts with beside the model; a history would know every round but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """How often one drafter's next token is the target's, over all positions of plain decoding."""

    drafter: str
    temperature: float
    positions: int
    # what rejection sampling would accept: 1 - total variation distance
    overlap: float
    # share of positions: the first choice, and one of the first two
    greedy: float
    greedy_two: float
    shared: float
    shared_two: float
    learned: float
    learned_two: float
    # what was learned in the end
    sharpness: float
    # milliseconds of a pass, per request
    draft_ms: float


@dataclass(frozen=True, kw_only=True)
class Drafters(EngineScenario):
    """Compare models that draft for one target: how often they are met, tokens per step, speed-up."""

    bench: ClassVar[str] = "drafters"

    drafters: dict[str, Any] = flag(
        {},
        'Name -> `speculative_config`, as in {"head": {"method": "eagle3", "model": "HEAD", ...}};'
        " default: the policy's own head, and without `--size` its draft model.",
        is_default_shown=False,
    )
    model: Path | None = flag(None, "The target's folder; default: the project's policy.", is_setting=False)
    size: str | None = flag(None, "Give the policy the cost of a larger model: 30M, 150M or 400M.", is_setting=False)
    prompts: int = flag(16, "Problems, half of each family, from the held-out set.", within=(1, 10_000))
    samples: int = flag(4, "Answers to each problem.", within=(1, 1000))
    batches: tuple[int, ...] = flag(
        (1, 8, 32), "Requests at once; none are timed if empty.", "--batch", within=(1, 256)
    )
    temperatures: tuple[float, ...] = flag(
        (1.0, 1.5), "Temperatures that match rates are measured at.", "--temperature", parse=cli_flags.temperatures
    )
    max_tokens: int = flag(256, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    budget: str = flag("auto", "auto, fixed, or another budget's name.", choices=BUDGETS)
    rounds: int = flag(3, "Timed rounds; the medians are reported; 0: no speed.", within=(0, 1000))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafters and self.model is not None:
            raise ConfigError(
                f"`--drafters` names no model that drafts for `{self.model}`",
                'give one, as in \'{"head": {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}}\'',
            )
        for name, given in self.drafters.items():
            if not isinstance(given, dict) or "model" not in given:
                raise ConfigError(
                    f"`--drafters` has {name!r}: {given!r}", "give it a `speculative_config` with a `model`"
                )

    def spec_rollout(self, given: dict[str, Any], arm: str) -> dict[str, Any]:
        """Our configuration with a drafter's `speculative_config`."""
        own = {"drafters": list(_HOST) if arm == UNION else [], "budget": self.budget, "queue_order": "arrival"}
        return {**own, "speculative_config": given}

    def params(
        self, chosen: Sequence[Problem], count: int, temperature: float, *, is_ours: bool
    ) -> list[dict[str, Any]]:
        owners = [problem for problem in chosen for _ in range(self.samples)][:count]
        return [
            sampling(self.seed + i, self.max_tokens, {"problem_id": problem.problem_id} if is_ours else None)
            | {"temperature": temperature}
            for i, problem in enumerate(owners)
        ]

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=True)
        drafters = self.drafters or shipped_drafters(folder, self.size, self.cache)
        timed = len(_AS) * len(self.batches) * (self.rounds + 1) if self.rounds else 0
        report = session.display.steps(1 + len(drafters) * (2 + len(self.temperatures) + timed))
        shape = {"seqs": max(self.batches, default=32), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        met: list[Met] = []
        rows: list[Row] = []
        with self.make_engines(folder, report, **shape) as running:
            running.start(STOCK)
            bench = _Bench(self, running, drafters)
            for name in drafters:
                met += bench.match(name)
                rows += bench.time(name) if self.rounds else []
        return Found(model=title, rows=rows, extra={"met": [asdict(one) for one in met]})

    def show(self, found: Found, out: Console) -> None:
        out.print(f"{found.model}, {self.dtype}: {self.prompts} problems x {self.samples} answers", markup=False)
        print_table(found.extra["met"], MET, out)
        if found.rows:
            print_rows(found.rows, out)


class _Bench:
    def __init__(self, scenario: Drafters, engines: Engines, drafters: dict[str, dict[str, Any]]) -> None:
        self._scenario, self._engines, self._drafters = scenario, engines, drafters
        self._chosen = problems(scenario.prompts, scenario.seed)
        encoded = engines.encode(self._chosen)
        self._prompts = [ids for ids in encoded for _ in range(scenario.samples)]

    def match(self, name: str) -> list[Met]:
        """Start the drafter's own engine, and measure how often it is met."""
        found = []
        self._engines.start(name, self._scenario.spec_rollout(self._drafters[name], COMB))
        for temperature in self._scenario.temperatures:
            self._engines.report(f"{name}: match rates at temperature {temperature:g}", 0)
            params = self._scenario.params(self._chosen, len(self._prompts), temperature, is_ours=True)
            self._engines.ask(name, "rpc", method="spec_rollout_matches", start=True)
            self._engines.run(name, self._prompts, params)
            sums = self._engines.ask(name, "rpc", method="spec_rollout_matches", start=False)
            found.append(_met(name, temperature, sums))
            self._engines.report("", 1)
        return found

    def time(self, name: str) -> list[Row]:
        """Every arm against stock, at every batch."""
        scenario = self._scenario
        self._engines.start(f"{name}, {UNION}", scenario.spec_rollout(self._drafters[name], UNION))
        rows = []
        for batch in scenario.batches:
            pairs: dict[str, list[Pair]] = {arm: [] for arm in _AS}
            for number_ in range(-1, scenario.rounds):
                for arm in _AS:
                    pairs[arm].append(self._pair(name, arm, batch, number_))
            rows += [make_row(f"{name}, {arm}", batch, self._depth(name), own) for arm, own in pairs.items()]
        return rows

    def _pair(self, name: str, arm: str, batch: int, number_: int) -> Pair:
        self._engines.report(f"{name}, {arm}, batch {batch}", 0)
        prompts = self._prompts[:batch]

        def run(one: str | None) -> Run:
            params = self._scenario.params(self._chosen, len(prompts), 1.0, is_ours=one is not None)
            if one is None:
                return self._engines.run(STOCK, prompts, params)
            engine = f"{name}, {UNION}" if one == UNION else name
            sharp, is_comb = _AS[one]
            self._engines.ask(engine, "rpc", method="spec_rollout_draft_as", sharpness=sharp, is_comb=is_comb)
            return self._engines.run(engine, prompts, params)

        pair = run_round(number_, [arm], run)[arm]
        self._engines.report("", 1)
        return pair

    def _depth(self, name: str) -> int:
        return int(self._drafters[name].get("num_speculative_tokens", 0))


def _met(name: str, temperature: float, sums: dict[str, Any]) -> Met:
    positions = max(int(sums["positions"]), 1)
    shares = {way: sums["first"].get(way, 0) / positions for way in ("greedy", "shared", "learned")}
    two = {f"{way}_two": sums["best_two"].get(way, 0) / positions for way in shares}
    return Met(
        drafter=name,
        temperature=temperature,
        positions=int(sums["positions"]),
        overlap=sums["overlap"] / positions,
        sharpness=sums["sharpness"],
        draft_ms=sums["draft_ms"] / positions,
        **shares,
        **two,
    )


bench_drafters = command(Drafters)
