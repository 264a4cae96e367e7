"""`specrollout bench rollout`: one RL rollout of the real policy, with and without drafts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS, MAX_NODES, SpecRolloutConfig
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay.records import Trace
from vllm_specrollout.report.rollouts import rollouts_of, steps_of
from vllm_specrollout.report.walk import walk

from ..policy.reward import problems, reward
from ..policy.tasks import Problem
from ..runner.engines import OURS, PROMPT_LEN, STOCK, WARM_UP_TOKENS, Engines, asking
from ..runner.fields import Columns, Row
from ..runner.models import find_model
from ..runner.plots import plot_rollout
from ..runner.report import Found, Table, paired
from ..runner.rows import Pair, Run, extend_sizes, ideal_rollout_speedup, make_row, row_times
from ..runner.scenario import RoundsScenario, Session, command, flag
from ..runner.stretches import Stretch, stretches_of

# the oracle needs recorded answers; and rounds repeat each other, so a history would know them all but the first
_DRAFTER = "ngram"
_DEFAULT = SpecRolloutConfig()
_MOST_LINES, _MOST_REASONS = 12, 3
"""Lines of a slow request's story, and reasons named in one of them."""
_NUM_FIXED_UNITS = 4
"""Progress units besides the rounds: two engine starts, the warm-up, the step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One request of a rollout, and what was decided for it."""

    problem_id: str
    # of the problem's answers, from 1
    answer: int
    num_tokens: int
    # seconds since the run's start
    finish_s: float
    # in order; times since the rollout's start. Empty: the recording has not seen it
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True)
class Rollout(RoundsScenario):
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
    max_draft_tokens: int = flag(_DEFAULT.max_draft_tokens, "Most draft tokens per step.", within=(1, MAX_NODES))
    budget: str = flag(_DEFAULT.budget, "auto, fixed, or another budget's name.", choices=BUDGETS)
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

    def spec_rollout(self, record: Path) -> dict[str, Any]:
        """Our engine's configuration."""
        return {
            **({"record": str(record)} if self.is_explained else {}),
            "drafters": [_DRAFTER],
            "max_draft_tokens": self.max_draft_tokens,
            "budget": self.budget,
            # rounds repeat each other here too: every length would be known
            "queue_order": "arrival",
        }

    def params(self, chosen: Sequence[Problem], *, is_ours: bool) -> list[dict[str, Any]]:
        """`SamplingParams` of each request: all samples of the first problem, then of the second, ..."""
        # the numbering of `bench.policy stats`, so that both sample the same answers
        owners = [problem for problem in chosen for _ in range(self.samples)]
        return asking(owners, self.seed * 1_000_003, self.max_tokens, is_ours=is_ours)

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(_NUM_FIXED_UNITS + self.rounds)
        shape = {"seqs": self.batch, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        chosen, record = problems(self.prompts, self.seed), session.scratch / "rollout.jsonl.zst"
        with self.make_engines(folder, report, **shape) as engines:
            engines.start(STOCK)
            engines.start(OURS, self.spec_rollout(record))
            prompts = [ids for ids in engines.encode(chosen) for _ in range(self.samples)]
            warm_up = self._warm_up(engines, chosen, prompts)
            pairs = self._rounds(engines, chosen, prompts)
            times = self._step_times(engines, prompts, pairs)
            samples = self._samples(engines, chosen, pairs[-1].stock)
        row = self._row([warm_up, *pairs], times)
        by_speedup = sorted(range(self.rounds), key=lambda i: pairs[i].stock.wall_s / pairs[i].ours.wall_s)
        median = by_speedup[(self.rounds - 1) // 2]
        pair, explained = pairs[median], list[Explained]()
        # of a wrong answer nothing is told
        if self.is_explained and row.identical:
            of_round = median - self.rounds
            explained = slowest(pair.ours, read_trace(record), of_round, chosen, self.samples, self.explain_requests)
        # the first answer to each problem, then the second, ...
        ordered = [sample for j in range(self.samples) for sample in samples[j :: self.samples]]
        extra: dict[str, Any] = {
            "mean_reward": statistics.mean(sample["reward"] for sample in ordered),
            "stock_ms_by_rows": {str(rows): ms for rows, ms in times.items()} if row.identical else None,
            "samples": ordered[: self.show_samples],
        }
        if self.is_explained:
            extra["explained"] = [asdict(one) for one in explained]
        lengths = sorted(sample["num_tokens"] for sample in samples)
        # the timed round of median speed-up and its stretches; tokens of stock's last answers, ascending
        return Found(model=title, rows=[row], extra=extra, more=(pair, explained, lengths))

    def _warm_up(self, engines: Engines, chosen: Sequence[Problem], prompts: list[list[int]]) -> Pair:
        """A few tokens of a full batch: kernels set themselves up, and stock is compared with itself."""
        short = replace(self, max_tokens=min(WARM_UP_TOKENS, self.max_tokens))
        params = {ours: short.params(chosen, is_ours=ours)[: self.batch] for ours in (False, True)}
        with engines.doing("warm-up"):
            stock = engines.record(prompts[: self.batch], params[False])
            return Pair(stock=stock, ours=engines.run(OURS, prompts[: self.batch], params[True]), is_timed=False)

    def _rounds(self, engines: Engines, chosen: Sequence[Problem], prompts: list[list[int]]) -> list[Pair]:
        """Runs of each, a pair for each round."""

        def run(_: str, arm: str | None, number: int) -> Run:
            return engines.run(arm or STOCK, prompts, self.params(chosen, is_ours=arm == OURS))

        return engines.rounds({"all": [OURS]}, range(self.rounds), run)["all", OURS]

    def _step_times(self, engines: Engines, prompts: list[list[int]], pairs: Sequence[Pair]) -> dict[int, float]:
        """What stock needs for a step of so many rows, as far as our steps go."""
        totals, batch = pairs[-1].ours.totals, min(self.batch, self.num_requests)
        assert totals is not None
        with engines.doing("stock's step times"):
            block = engines[STOCK].ask("block_size")
            # one whole KV cache block of context, different for every request
            prefixes = [list(islice(cycle([i % 256 + 4, *prompts[i]]), block)) for i in range(batch)]
            extend_ms = engines.extend_ms(prefixes, extend_sizes(batch, totals), seed=0)
        return row_times([pair.stock for pair in pairs], batch, extend_ms)

    def _samples(self, engines: Engines, chosen: Sequence[Problem], stock: Run) -> list[dict[str, Any]]:
        texts = engines[STOCK].ask("decode", token_ids=[list(ids) for ids in stock.token_ids])
        owners = [problem for problem in chosen for _ in range(self.samples)]
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

    def _row(self, pairs: list[Pair], times: dict[int, float]) -> Row:
        """The row, with the ideal of a shrinking batch in the place of the constant batch's."""
        row = make_row(_DRAFTER, self.batch, self.max_draft_tokens, pairs)
        stock, totals = pairs[-1].stock, pairs[-1].ours.totals
        if row.speedup is None or totals is None:
            return row
        ideal = ideal_rollout_speedup(stock, totals, self.batch, times)
        return row if ideal is None else row.but(ideal=ideal, efficiency=row.speedup / ideal)

    def title(self, found: Found) -> str:
        sizes = f"{self.prompts} problems x {self.samples} answers, {self.dtype}, {self.batch} at once"
        return f"{found.model}: {sizes}, temperature 1"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield from paired(found.rows)
        _, explained, lengths = found.more
        cut = sum(length >= self.max_tokens for length in lengths)
        whose = "both" if found.is_identical else "stock"
        yield (
            f"mean reward {found.extra['mean_reward']:.3f} ({whose}); answers of {lengths[0]} to {lengths[-1]} tokens,"
            f" median {lengths[len(lengths) // 2]}, {cut} cut off"
        )
        for one in found.extra["samples"]:
            yield f"\n[reward {one['reward']:g}, {one['num_tokens']} tokens] {one['prompt']}"
            # an untrained policy says anything, control characters too
            yield "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in one["answer"])
        yield from explained_text(explained)

    def draw(self, found: Found, path: Path) -> None:
        plot_rollout(found.more[0], self.batch, self.title(found), path)


def slowest(
    run: Run, trace: Trace, of_round: int, problems: Sequence[Problem], samples: int, count: int
) -> list[Explained]:
    """The requests that ended last, the very last one first.

    Args:
        run: of our engine; all samples of the first problem, then of the second, ...
        trace: what our engine recorded.
        of_round: which of its rollouts that run was.
    """
    table = walk(trace)
    steps = steps_of(trace, table)
    rollout = rollouts_of(trace, table, steps)[of_round]
    # requests of that run by what they answered, as often as they did
    requests: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for arrival in trace.arrivals:
        rows = table.step[slice(*table.start[arrival.request : arrival.request + 2])]
        if arrival.request in trace.ends and rows.size and rollout.first <= rows[0] < rollout.behind:
            answer = tuple(trace.ends[arrival.request].token_ids)
            requests.setdefault((arrival.problem_id, answer), []).append(arrival.request)
    found = []
    for i in sorted(range(len(run.finish_s)), key=lambda i: -run.finish_s[i])[:count]:
        problem_id = problems[i // samples].problem_id
        own = requests.get((problem_id, tuple(run.token_ids[i])))
        stretches = stretches_of(own.pop(), table, steps, _MOST_LINES) if own else []
        begin = rollout.begin
        found.append(
            Explained(
                problem_id=problem_id,
                answer=i % samples + 1,
                num_tokens=len(run.token_ids[i]),
                finish_s=run.finish_s[i],
                stretches=tuple(
                    replace(one, begin_ms=one.begin_ms - begin, end_ms=one.end_ms - begin) for one in stretches
                ),
            )
        )
    return found


def explained_text(explained: Sequence[Explained]) -> Iterator[Table | str]:
    """A table per request, a line per stretch."""
    for number, one in enumerate(explained, 1):
        steps = sum(stretch.steps for stretch in one.stretches)
        begin = f" (begun at {one.stretches[0].begin_ms / 1e3:.2f} s)" if one.stretches else ""
        yield (
            f"\nslowest {number}: {one.problem_id}, answer {one.answer}: {one.num_tokens} tokens in {steps} steps,"
            f" done at {one.finish_s:.2f} s{begin}"
        )
        if one.stretches:
            yield Table(one.stretches, _COLUMNS)
        else:
            yield "the recording has not seen it: `specrollout doctor --model` says what may be drafted"


def reasons_text(reasons: Mapping[str, int]) -> str:
    """`pays`, or `pays 61 %, nothing proposed 39 %`: most frequent first, at most three by name."""
    if len(reasons) == 1:
        return next(iter(reasons))
    steps = sum(reasons.values())
    named = Counter(reasons).most_common(_MOST_REASONS)
    other = steps - sum(count for _, count in named)
    named += [("other", other)] if other else []
    return ", ".join(f"{reason} {100 * count / steps:.0f} %" for reason, count in named)


_COLUMNS: Columns = {
    "tokens": lambda one: f"{one.first}-{one.end}",
    "from s": lambda one: f"{one.begin_ms / 1e3:.2f}",
    "running": lambda one: f"{one.running / one.steps:.0f}",
    "why": lambda one: reasons_text(one.reasons),
    "steps": "steps",
    "nodes/ step": lambda one: f"{one.nodes / one.steps:.1f}",
    "accepted/ step": lambda one: f"{one.accepted / one.steps:.1f}",
    "ms/ step": lambda one: f"{(one.end_ms - one.begin_ms) / one.steps:.1f}",
}


bench_rollout = command(Rollout)
