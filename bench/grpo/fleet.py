"""The engines of an RL loop and what they are asked: all alive at once, one at work; new weights go to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.bench.policy.tasks import Problem

from ..runner.engines import WARM_UP_TOKENS, Engines, Report, sampling
from ..runner.fields import Row
from ..runner.rows import Run, first_difference

_FIRST_BYTE = 5
"""Id of the tokenizer's first byte; the 256 bytes follow the special tokens, and the tasks are written without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roller:
    """One engine of the loop."""

    name: str
    # `spec_rollout=` of our engine, None for vLLM's own
    spec_rollout: dict[str, Any] | None = None
    # `speculative_config=` of vLLM's own speculation
    speculative_config: dict[str, Any] | None = None
    # whether the policy's head drafts as well; its place is known when the models are
    has_head: bool = False

    @property
    def is_ours(self) -> bool:
        return self.spec_rollout is not None

    def start(self, engines: Engines) -> None:
        """Start its engine; every arm's gets the same arguments but for its drafts."""
        more = {} if self.speculative_config is None else {"speculative_config": self.speculative_config}
        engines.start(self.name, self.spec_rollout, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to ask for; the same for every engine."""

    request_id: str
    problem: Problem
    sample: int
    seed: int
    prompt_ids: tuple[int, ...]

    def params(self, max_tokens: int, *, is_ours: bool) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`. Only our engine is told which problem it is."""
        return sampling(self.seed, max_tokens, {"problem_id": self.problem.problem_id} if is_ours else None)


class Fleet(Engines):
    """The engines of some arms, all alive at once, one at work; a context manager."""

    def __init__(
        self, arguments: dict[str, Any], report: Report, *, arms: Sequence[Roller], plan: Any, **common: Any
    ) -> None:
        super().__init__(arguments, report, **common)
        self.arms, self._plan = tuple(arms), plan

    def begin(self) -> None:
        """Start them, and let them set their kernels up on prompts that are like no task."""
        batch, tokens = self._plan.batch, min(WARM_UP_TOKENS, self._plan.max_tokens)
        prompts = [[_FIRST_BYTE + (17 * i + j * j) % 256 for j in range(32)] for i in range(batch)]
        for arm in self.arms:
            arm.start(self)
            options = {"problem_id": "warm-up"} if arm.is_ours else None
            params = [sampling(i, tokens, options) for i in range(batch)]
            self[arm.name].ask("generate", prompts=prompts, params=params)

    def roll_out(self, arm: Roller, requests: Sequence[Request]) -> Run:
        """Run all requests in one engine."""
        prompts = [list(request.prompt_ids) for request in requests]
        params = [request.params(self._plan.max_tokens, is_ours=arm.is_ours) for request in requests]
        return self.run(arm.name, prompts, params, ids=[request.request_id for request in requests])

    def report_rewards(self, arm: Roller, earned: Mapping[str, float]) -> dict[str, int] | None:
        """By request; what became of them."""
        found: dict[str, int] | None = self[arm.name].ask("trainer", function="report_rewards", rewards=earned)
        return found

    def begin_epoch(self) -> None:
        """Tell our engines that every problem will be asked again."""
        for arm in self.arms:
            if arm.is_ours:
                self[arm.name].ask("trainer", function="begin_epoch")

    def push(self, folder: Path) -> None:
        """Load new weights into every engine, and empty its prefix cache."""
        for arm in self.arms:
            self[arm.name].ask("reload", folder=str(folder))


def engine_run(arm: Roller, run: Run, rewards: Sequence[float], stock: Run) -> Row:
    """The figures of one rollout, compared with stock's of the same step token by token."""
    difference, totals = first_difference(stock, run), run.totals
    return Row(
        engine=arm.name,
        wall_s=run.wall_s,
        steps=len(run.step_s),
        num_tokens=run.num_tokens,
        reward=sum(rewards) / len(rewards),
        num_differing=difference.num_requests if difference is not None else 0,
        identical=(difference is None) if arm.is_ours else None,
        difference=difference.as_text() if arm.is_ours and difference is not None else None,
        drafted=totals and totals.drafted,
        accepted=totals and totals.accepted,
    )
