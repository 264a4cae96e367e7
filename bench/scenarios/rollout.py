"""`specrollout bench rollout`: one RL rollout of the real policy, with and without drafts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.bench.policy.reward import problems, reward
from vllm_specrollout.bench.policy.tasks import Problem

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS, MAX_NODES, SpecRolloutConfig

from ..runner.engines import OURS, PROMPT_LEN, STOCK, WARM_UP_TOKENS, Engines, asking
from ..runner.models import find_model
from ..runner.report import Found, Table, paired
from ..runner.rows import Pair, Run, make_row
from ..runner.scenario import RoundsScenario, Session, command, flag

# the oracle needs recorded answers; and rounds repeat each other, so a history would know them all but the first
_DRAFTER = "ngram"
_DEFAULT = SpecRolloutConfig()
_NUM_FIXED_UNITS = 3
"""Progress units besides the rounds: two engine starts, the warm-up."""


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
            "drafters": [_DRAFTER],
            "max_draft_tokens": self.max_draft_tokens,
            "budget": self.budget,
            # rounds repeat each other here too: every length would be known
            "queue_order": "arrival",
        }

    def params(self, chosen: Sequence[Problem], *, is_ours: bool) -> list[dict[str, Any]]:
        """`SamplingParams` of each request: all samples of the first problem, then of the second, ..."""
        owners = [problem for problem in chosen for _ in range(self.samples)]
        return asking(owners, self.seed * 1_000_003, self.max_tokens, is_ours=is_ours)

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(_NUM_FIXED_UNITS + self.rounds)
        shape = {"seqs": self.batch, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        chosen = problems(self.prompts, self.seed)
        with self.make_engines(folder, report, **shape) as engines:
            engines.start(STOCK)
            engines.start(OURS, self.spec_rollout())
            prompts = [ids for ids in engines.encode(chosen) for _ in range(self.samples)]
            warm_up = self._warm_up(engines, chosen, prompts)
            pairs = self._rounds(engines, chosen, prompts)
            samples = self._samples(engines, chosen, pairs[-1].stock)
        row = make_row(_DRAFTER, self.batch, self.max_draft_tokens, [warm_up, *pairs])
        # the first answer to each problem, then the second, ...
        ordered = [sample for j in range(self.samples) for sample in samples[j :: self.samples]]
        extra: dict[str, Any] = {
            "mean_reward": statistics.mean(sample["reward"] for sample in ordered),
            "samples": ordered[: self.show_samples],
        }
        lengths = sorted(sample["num_tokens"] for sample in samples)
        # tokens of stock's last answers, ascending
        return Found(model=title, rows=[row], extra=extra, more=lengths)

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

    def title(self, found: Found) -> str:
        sizes = f"{self.prompts} problems x {self.samples} answers, {self.dtype}, {self.batch} at once"
        return f"{found.model}: {sizes}, temperature 1"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield from paired(found.rows)
        lengths = found.more
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


bench_rollout = command(Rollout)
