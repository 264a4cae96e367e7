"""`specrollout bench drafters`: models that draft, side by side: how often they are met, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import Problem

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS
from vllm_specrollout.errors import ConfigError

from ..runner.engines import PROMPT_LEN, STOCK, Engines, asking
from ..runner.fields import Row
from ..runner.models import DEPTH, find_model, shipped_drafters
from ..runner.report import Found, Table, paired
from ..runner.results import MET
from ..runner.rows import Pair, Run, make_row
from ..runner.scenario import EngineScenario, Session, command, flag

GREEDY, SHARED, COMB, UNION = "greedy", "shared noise", "comb", "union"
_AS = {GREEDY: ((1.0, 0.0), False), SHARED: (None, False), COMB: (None, True), UNION: (None, True)}
"""Arm -> weights of log probabilities and noise (None: learned), and whether it has alternatives."""
_HOST = ("ngram",)
"""Drafters beside the model in the union; a history would know every round but the first."""


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
    depths: tuple[int, ...] = flag(
        (DEPTH,), "Levels of the policy's own models; with several, its head in each.", "--depth", within=(1, 64)
    )
    max_tokens: int = flag(256, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    budget: str = flag("auto", "auto, fixed, or another budget's name.", choices=BUDGETS)
    rounds: int = flag(3, "Timed rounds; the medians are reported; 0: no speed.", within=(0, 1000))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafters and self.model is not None:
            raise ConfigError(
                f"`--drafters` names no model that drafts for `{self.model}`",
                'give one, as in \'{"head": {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 10}}\'',
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
        params = asking(owners, self.seed, self.max_tokens, is_ours=is_ours)
        return [one | {"temperature": temperature} for one in params]

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=True)
        drafters = self.drafters or shipped_drafters(folder, self.size, self.cache, self.depths)
        timed = len(_AS) * len(self.batches) * (self.rounds + 1) if self.rounds else 0
        report = session.display.steps(1 + len(drafters) * (2 + len(self.temperatures) + timed))
        shape = {"seqs": max(self.batches, default=32), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        met: list[Row] = []
        rows: list[Row] = []
        chosen = problems(self.prompts, self.seed)
        with self.make_engines(folder, report, **shape) as engines:
            engines.start(STOCK)
            prompts = [ids for ids in engines.encode(chosen) for _ in range(self.samples)]
            for name, given in drafters.items():
                engines.start(name, self.spec_rollout(given, COMB))
                met += [self._match(engines, name, chosen, prompts, one) for one in self.temperatures]
                if self.rounds:
                    engines.start(f"{name}, {UNION}", self.spec_rollout(given, UNION))
                    depth = int(given.get("num_speculative_tokens", 0))
                    for (batch, arm), own in self._pairs(engines, name, chosen, prompts).items():
                        rows.append(make_row(f"{name}, {arm}", min(batch, len(prompts)), depth, own))
        return Found(model=title, rows=rows, extra={"met": met})

    def _match(
        self, engines: Engines, name: str, chosen: Sequence[Problem], prompts: list[list[int]], temperature: float
    ) -> Row:
        """How often this drafter is met."""
        with engines.doing(f"{name}: match rates at temperature {temperature:g}"):
            engines.tell(name, "matches", start=True)
            engines.run(name, prompts, self.params(chosen, len(prompts), temperature, is_ours=True))
            return _met(name, temperature, engines.tell(name, "matches", start=False))

    def _pairs(
        self, engines: Engines, name: str, chosen: Sequence[Problem], prompts: list[list[int]]
    ) -> dict[tuple[int, str], list[Pair]]:
        """Every arm against stock, at every batch."""

        def run(batch: int, arm: str | None, number: int) -> Run:
            engine = STOCK if arm is None else f"{name}, {UNION}" if arm == UNION else name
            if arm is not None:
                weights, is_comb = _AS[arm]
                engines.tell(engine, "draft_as", weights=weights, is_comb=is_comb)
            return engines.run(engine, prompts[:batch], self.params(chosen, batch, 1.0, is_ours=arm is not None))

        return engines.rounds(dict.fromkeys(self.batches, list(_AS)), range(-1, self.rounds), run, is_apart=True)

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}: {self.prompts} problems x {self.samples} answers"

    def told(self, found: Found) -> Iterable[Table | str]:
        return [Table(found.extra["met"], MET), *(paired(found.rows) if found.rows else ())]


def _met(name: str, temperature: float, sums: dict[str, Any]) -> Row:
    """How often one drafter's next token is the target's, over all positions of plain decoding."""
    positions = max(int(sums["positions"]), 1)
    shares = {way: sums["first"].get(way, 0) / positions for way in ("greedy", "shared", "learned")}
    two = {f"{way}_two": sums["best_two"].get(way, 0) / positions for way in shares}
    return Row(
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
