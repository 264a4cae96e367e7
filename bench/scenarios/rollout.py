"""`specrollout bench rollout`: one RL rollout of the real policy, with and without drafts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS, MAX_NODES, SpecRolloutConfig

from ..policy.reward import problems, reward
from ..policy.tasks import Problem
from ..runner.engines import OURS, PROMPT_LEN, STOCK, WARM_UP_TOKENS, Engines, run_round, sampling
from ..runner.ideal import extend_sizes, ideal_rollout_speedup, row_times
from ..runner.models import find_model
from ..runner.plots import plot_rollout
from ..runner.report import Found, print_rows
from ..runner.rows import Pair, Row, make_row
from ..runner.runs import Run
from ..runner.scenario import EngineScenario, Session, command, flag
from .explain import Explained, print_explained, slowest

# the oracle needs recorded answers; and rounds repeat each other, so a history would know them all but the first
DRAFTERS = ("ngram",)
_DEFAULT = SpecRolloutConfig()
_NUM_FIXED_UNITS = 4
"""Progress units besides the rounds: two engine starts, the warm-up, the step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rollout found besides its row."""

    # of the last round, in the order of requests: stock's answers, which are ours unless the row says otherwise
    samples: list[dict[str, Any]]
    # the timed round of median speed-up, for the picture
    pair: Pair
    # of that same round; empty unless asked for, or where there is no speed to tell
    explained: Sequence[Explained]


@dataclass(frozen=True, kw_only=True)
class Rollout(EngineScenario):
    """Roll the real policy out with drafts and without, and compare the tokens, the time and the rewards."""

    bench: ClassVar[str] = "rollout"

    model: Path | None = flag(
        None, "The policy's folder; default: the one that comes with the project.", is_setting=False
    )
    size: str | None = flag(
        None, "Give the policy the cost of a larger model first: 30M, 150M or 400M.", is_setting=False
    )
    prompts: int = flag(16, "Problems, half of each family, from the held-out set.", within=(1, 10_000))
    samples: int = flag(4, "Answers to each problem.", within=(1, 1000))
    batch: int = flag(8, "Requests at once (max_num_seqs).", within=(1, 256))
    max_tokens: int = flag(1024, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    drafters: tuple[str, ...] = flag(DRAFTERS, "Drafters, best first.", choices=DRAFTERS)
    max_draft_tokens: int = flag(_DEFAULT.max_draft_tokens, "Most draft tokens per step.", within=(1, MAX_NODES))
    budget: str = flag(_DEFAULT.budget, "auto, fixed, or another budget's name.", choices=BUDGETS)
    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 1000))
    seed: int = flag(0, "Of the problems and of sampling.", within=(0, 1 << 30))
    plot: Path | None = flag(None, "Draw the running requests over time into this file.", is_setting=False)
    is_explained: bool = flag(False, "Tell what was decided for the slowest requests, when and why.", "--explain")
    explain_requests: int = flag(3, "How many requests --explain tells of.", within=(1, 1000))
    show_samples: int = flag(3, "Answers to print.", is_setting=False)

    @property
    def num_requests(self) -> int:
        return self.prompts * self.samples

    def check(self) -> None:
        super().check()
        cli_flags.in_range(self.show_samples, "--show-samples", 0, self.num_requests)

    def spec_rollout(self) -> dict[str, Any]:
        """Our engine's configuration."""
        return {
            "drafters": list(self.drafters),
            "max_draft_tokens": self.max_draft_tokens,
            "budget": self.budget,
            # rounds repeat each other here too: every length would be known
            "queue_order": "arrival",
        }

    def params(self, chosen: Sequence[Problem], *, is_ours: bool) -> list[dict[str, Any]]:
        """`SamplingParams` of each request: all samples of the first problem, then of the second, ..."""
        # the numbering of `bench.policy stats`, so that both sample the same answers
        first = self.seed * 1_000_003
        owners = [problem for problem in chosen for _ in range(self.samples)]
        return [
            sampling(first + i, self.max_tokens, {"problem_id": problem.problem_id} if is_ours else None)
            for i, problem in enumerate(owners)
        ]

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(_NUM_FIXED_UNITS + self.rounds)
        shape = {"seqs": self.batch, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        with self.make_engines(folder, report, **shape) as running:
            row, outcome, times = _Bench(self, running).run()
        # the first answer to each problem, then the second, ...
        ordered = [sample for j in range(self.samples) for sample in outcome.samples[j :: self.samples]]
        mean_reward = statistics.mean(sample["reward"] for sample in ordered)
        samples = ordered[: self.show_samples]
        extra: dict[str, Any] = {"mean_reward": mean_reward, "stock_ms_by_rows": times, "samples": samples}
        if self.is_explained:
            extra["explained"] = [asdict(one) for one in outcome.explained]
        return Found(model=title, rows=[row], extra=extra, more=outcome)

    def _title(self, found: Found) -> str:
        return f"{found.model}: {self.prompts} problems x {self.samples} answers, {self.dtype}"

    def show(self, found: Found, out: Console) -> None:
        outcome: Outcome = found.more
        out.print(f"{self._title(found)}, {self.batch} at once, temperature 1", markup=False)
        print_rows(found.rows, out)
        lengths = sorted(sample["num_tokens"] for sample in outcome.samples)
        cut = sum(length >= self.max_tokens for length in lengths)
        whose = "both" if found.is_identical else "stock"
        out.print(
            f"mean reward {found.extra['mean_reward']:.3f} ({whose}); answers of {lengths[0]} to {lengths[-1]} tokens,"
            f" median {lengths[len(lengths) // 2]}, {cut} cut off",
            markup=False,
        )
        for one in found.extra["samples"]:
            out.print(f"\n[reward {one['reward']:g}, {one['num_tokens']} tokens] {one['prompt']}", markup=False)
            # an untrained policy says anything, control characters too
            answer = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in one["answer"])
            out.print(answer, markup=False, highlight=False)
        print_explained(outcome.explained, out)

    def draw(self, found: Found, path: Path) -> None:
        plot_rollout(found.more.pair, self.batch, self._title(found), path)


class _Bench:
    def __init__(self, scenario: Rollout, engines: Engines) -> None:
        self._scenario, self._engines = scenario, engines
        self._chosen = problems(scenario.prompts, scenario.seed)
        self._prompts: list[list[int]] = []

    def run(self) -> tuple[Row, Outcome, dict[str, float] | None]:
        """(the row, what else was found, stock's step times by rows)."""
        scenario = self._scenario
        self._engines.start(STOCK)
        self._engines.start(OURS, scenario.spec_rollout())
        self._prompts = [ids for ids in self._engines.encode(self._chosen) for _ in range(scenario.samples)]
        warm_up = self._warm_up()
        rounds = [self._round(number) for number in range(scenario.rounds)]
        times = self._step_times([pair for pair, _ in rounds])
        row = _make_row(scenario, [warm_up, *(pair for pair, _ in rounds)], times)
        by_speedup = sorted(rounds, key=lambda one: one[0].stock.wall_s / one[0].ours.wall_s)
        pair, told = by_speedup[(len(rounds) - 1) // 2]
        # of a wrong answer nothing is told
        num_told = scenario.explain_requests if scenario.is_explained and row.identical else 0
        explained = slowest(pair.ours, told, self._chosen, scenario.samples, num_told)
        outcome = Outcome(samples=self._samples(rounds[-1][0].stock), pair=pair, explained=explained)
        return row, outcome, {str(rows): ms for rows, ms in times.items()} if row.identical else None

    def _warm_up(self) -> Pair:
        """A few tokens of a full batch: kernels set themselves up, and stock is compared with itself."""
        self._engines.report("warm-up", 0)
        short = dataclasses.replace(self._scenario, max_tokens=min(WARM_UP_TOKENS, self._scenario.max_tokens))
        prompts = self._prompts[: short.batch]
        params = {ours: short.params(self._chosen, is_ours=ours)[: short.batch] for ours in (False, True)}
        stock = self._engines.record(prompts, params[False])
        pair = Pair(stock=stock, ours=self._engines.run(OURS, prompts, params[True]), is_timed=False)
        self._engines.report("", 1)
        return pair

    def _round(self, number: int) -> tuple[Pair, list[Mapping[str, Any]]]:
        """One run of each; and what our engine's worker wrote down in it."""
        scenario, told = self._scenario, []
        self._engines.report(f"round {number + 1} of {scenario.rounds}", 0)

        def run(arm: str | None) -> Run:
            is_told = arm == OURS and scenario.is_explained
            if is_told:
                # a whole batch may end in the last step, and any of them be among the slowest
                keep = scenario.explain_requests + scenario.batch
                self._engines[OURS].ask("rpc", method="spec_rollout_explain", keep=keep)
            found = self._engines.run(arm or STOCK, self._prompts, scenario.params(self._chosen, is_ours=arm == OURS))
            if is_told:
                told.extend(self._engines[OURS].ask("rpc", method="spec_rollout_explained"))
            return found

        pair = run_round(number, [OURS], run)[OURS]
        self._engines.report("", 1)
        return pair, told

    def _step_times(self, pairs: list[Pair]) -> dict[int, float]:
        """What stock needs for a step of so many rows, as far as our steps go."""
        self._engines.report("stock's step times", 0)
        totals = pairs[-1].ours.totals
        assert totals is not None
        batch = min(self._scenario.batch, self._scenario.num_requests)
        block = self._engines[STOCK].ask("block_size")
        # one whole KV cache block of context, different for every request
        prefixes = [list(islice(cycle([i % 256 + 4, *self._prompts[i]]), block)) for i in range(batch)]
        extend_ms = self._engines.extend_ms(prefixes, extend_sizes(batch, totals), seed=0)
        self._engines.report("", 1)
        return row_times([pair.stock for pair in pairs], batch, extend_ms)

    def _samples(self, stock: Run) -> list[dict[str, Any]]:
        texts = self._engines[STOCK].ask("decode", token_ids=[list(ids) for ids in stock.token_ids])
        owners = [problem for problem in self._chosen for _ in range(self._scenario.samples)]
        return [
            {
                "problem_id": problem.problem_id,
                "prompt": problem.prompt,
                "answer": text,
                "reward": reward(problem, text),
                "num_tokens": len(ids),
            }
            for problem, text, ids in zip(owners, texts, stock.token_ids, strict=True)
        ]


def _make_row(scenario: Rollout, pairs: list[Pair], times: dict[int, float]) -> Row:
    """The row, with the ideal of a shrinking batch in the place of the constant batch's."""
    row = make_row(" + ".join(scenario.drafters), scenario.batch, scenario.max_draft_tokens, pairs)
    stock, totals, ideal = pairs[-1].stock, pairs[-1].ours.totals, None
    if row.speedup is not None and totals is not None:
        ideal = ideal_rollout_speedup(stock, totals, scenario.batch, times)
    return row if ideal is None else dataclasses.replace(row, ideal=ideal, efficiency=row.speedup / ideal)


bench_rollout = command(Rollout)
