"""How often requests are pushed out of a KV cache that is too small for them, by stock vLLM and by ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fuzz import FuzzDrafter

VOCAB = 400


def requests(count: int, shortest: int, longest: int, seed: int) -> list[Case]:
    """Short prompts with answers of many lengths, greedy ones among them."""
    rng = np.random.default_rng(seed)
    cases = []
    for i in range(count):
        prompt = rng.integers(5, VOCAB, int(rng.integers(8, 41))).tolist()
        params: dict[str, Any] = {"max_tokens": int(rng.integers(shortest, longest + 1)), "ignore_eos": True}
        params |= {"temperature": 0.0} if i % 4 == 0 else {"seed": i}
        cases.append(Case("pressure", str(i), prompt, params))
    return cases


@contextlib.contextmanager
def preemptions() -> Iterator[list[str]]:
    """The requests that are preempted meanwhile, as often as they are."""
    noted: list[str] = []
    original = Scheduler._preempt_request

    def noting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append(request.request_id)
        return original(self, request, *args, **kwargs)

    Scheduler._preempt_request = noting  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Scheduler._preempt_request = original  # type: ignore[method-assign]


def check_that_drafts_preempt_nobody(
    path: str, cases: Sequence[Case], least: int, spec_rollout: dict[str, Any], **kwargs: Any
) -> None:
    """All requests twice: the second time the lengths of all answers are known, and earlier answers draft.

    Preemptions are summed over both times and both kinds of drafters: which request is in whose way is chance.

    Args:
        least: preemptions of stock's below which the comparison would mean nothing.
        spec_rollout: of our engine.
        kwargs: engine arguments of both.
    """
    with engine(path, "float32", is_ours=False, **kwargs) as stock, preemptions() as by_stock:
        truth = _tokens(stock, cases)
        assert _tokens(stock, cases) == truth
    assert len(by_stock) >= least
    answers = {case.problem_id: tokens for case, tokens in zip(cases, truth, strict=True)}
    with engine(path, "float32", is_ours=True, spec_rollout=spec_rollout, **kwargs) as ours:
        own = list(ours.runner.spec_rollout.drafters)
        with preemptions() as by_ours:
            for drafters in (own, [FuzzDrafter(answers, VOCAB, seed=3)]):
                ours.runner.spec_rollout.replace_drafters(drafters)
                before = _accepted(ours)
                assert _tokens(ours, cases) == truth
                assert _tokens(ours, cases) == truth
                assert _accepted(ours) > before
        assert len(by_ours) <= 1.05 * 2 * len(by_stock)


def _tokens(one: Engine, cases: Sequence[Case]) -> list[list[int]]:
    return [list(found.outputs[0].token_ids) for found in run(one.llm, cases)]


def _accepted(ours: Engine) -> int:
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    return int(stats["accepted"])
