"""The engines of an RL loop: all alive at once, one at work; new weights go to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..runner.engines import WARM_UP_TOKENS, Engines, sampling
from ..runner.runs import Run, first_difference
from .arms import Arm, Request
from .rows import EngineRun

if TYPE_CHECKING:
    from ..scenarios.grpo import Grpo

_FIRST_BYTE = 5
"""Id of the tokenizer's first byte; the 256 bytes follow the special tokens, and the tasks are written without them."""


class Fleet:
    """The engines of some arms, all alive at once, one at work; a context manager."""

    def __init__(self, engines: Engines, arms: Sequence[Arm], plan: Grpo) -> None:
        self.arms, self._engines, self._plan = tuple(arms), engines, plan

    def __enter__(self) -> Fleet:
        """Start them, and let them set their kernels up on prompts that are like no task."""
        plan = self._plan
        prompts = [[_FIRST_BYTE + (17 * i + j * j) % 256 for j in range(32)] for i in range(plan.batch)]
        try:
            for arm in self.arms:
                arm.start(self._engines)
                options = {"problem_id": "warm-up"} if arm.is_ours else None
                tokens = min(WARM_UP_TOKENS, plan.max_tokens)
                params = [sampling(i, tokens, options) for i in range(plan.batch)]
                self._engines[arm.name].ask("generate", prompts=prompts, params=params)
        except BaseException:
            self._engines.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._engines.close()

    def roll_out(self, arm: Arm, requests: Sequence[Request]) -> tuple[Run, float]:
        """Run all requests in one engine; also how many cores the other engines' processes kept busy meanwhile."""
        others = [self._engines[other.name] for other in self.arms if other is not arm]
        self._engines.wait_for(arm.name)
        before = sum(other.cpu_s() for other in others)
        prompts = [list(request.prompt_ids) for request in requests]
        params = [request.params(self._plan.max_tokens, is_ours=arm.is_ours) for request in requests]
        run = self._engines.run(arm.name, prompts, params, ids=[request.request_id for request in requests])
        return run, (sum(other.cpu_s() for other in others) - before) / run.wall_s

    def begin_epoch(self) -> None:
        """Tell our engines that every problem will be asked again."""
        for arm in self.arms:
            if arm.is_ours:
                self._engines[arm.name].ask("begin_epoch")

    def report_rewards(self, arm: Arm, requests: Sequence[Request], rewards: Sequence[float]) -> dict[str, int] | None:
        """Tell one of our engines what its answers earned; how many of them it knew, None if it takes no rewards."""
        earned = {request.request_id: value for request, value in zip(requests, rewards, strict=True)}
        return self._engines[arm.name].ask("report_rewards", rewards=earned)

    def push(self, folder: Path) -> None:
        """Load new weights into every engine, and empty its prefix cache."""
        for arm in self.arms:
            self._engines[arm.name].ask("reload", folder=str(folder))


def engine_run(arm: Arm, run: Run, idle_cores: float, rewards: Sequence[float], stock: Run) -> EngineRun:
    """The figures of one rollout, compared with stock's of the same step token by token."""
    difference = first_difference(stock, run)
    return EngineRun(
        engine=arm.name,
        wall_s=run.wall_s,
        steps=len(run.step_s),
        num_tokens=run.num_tokens,
        reward=sum(rewards) / len(rewards),
        num_differing=difference.num_requests if difference is not None else 0,
        identical=(difference is None) if arm.is_ours else None,
        difference=difference.as_text() if arm.is_ours and difference is not None else None,
        idle_cores=idle_cores,
        drafted=run.totals.drafted if run.totals is not None else None,
        accepted=run.totals.accepted if run.totals is not None else None,
    )
