"""The check itself: stock's answers, ours without drafts, ours with every kind of draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import vllm.envs as envs
from vllm import LLM

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import Report, compare, run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fuzz import FuzzDrafter
from tests.e2e.identity.ties import JUDGE

VOCAB = 400
TOTAL = Report()
QUALITIES = (0.8, 0.95, 0.2)


def check_identity(
    path: str,
    dtype: str,
    requests: Sequence[Case],
    rounds: int = 1,
    num_drafters: int = 1,
    stock: dict[str, Any] | None = None,
    inspect: Callable[[Engine], None] | None = None,
    must_accept: bool = True,
    **kwargs: Any,
) -> None:
    """Level B and level C of docs/concepts/exactness.md, with drafts that were accepted; totals go to TOTAL.

    Args:
        path: model folder.
        rounds: how often all requests run with fresh fuzzed drafts.
        num_drafters: how many fuzzed ones draft for the same requests, their trees united; 0: the engine's own do.
        stock: engine arguments of stock where they differ from ours.
        inspect: looks at our engine after the last round.
        must_accept: False: drafts may all be wrong.
        kwargs: engine arguments of both.
    """
    theirs = {**kwargs, **(stock or {})}
    theirs.pop("spec_rollout", None)
    with engine(path, dtype, is_ours=False, **theirs) as plain_stock:
        truth = run(plain_stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    # on CPU the V2 runner attends to drafts by another way than to plain steps: there level B knows ties, too
    rows_are_alike = not envs.VLLM_USE_V2_MODEL_RUNNER
    drafted: list[Any] = []
    with engine(path, dtype, is_ours=True, **kwargs) as ours:
        plain = run(ours.llm, requests, enabled=False)
        for number in range(rounds):
            quality = QUALITIES[number % len(QUALITIES)]
            if num_drafters:
                ours.runner.spec_rollout.replace_drafters(
                    FuzzDrafter(answers, VOCAB, seed=number + 1000 * other, quality=quality)
                    for other in range(num_drafters)
                )
            before = _counts(ours)
            drafted.append(run(ours.llm, requests))
            after = _counts(ours)
            assert after["drafted"] > before["drafted"]
            assert after["accepted"] > before["accepted"] or not must_accept
            if rows_are_alike:
                level_b = compare(requests, plain, drafted[-1], dtype)
                assert not level_b.failures, level_b.failures[:10]
        if inspect is not None:
            inspect(ours)
    for got in drafted:
        if not rows_are_alike:
            level_b = judged(path, dtype, requests, plain, got, **theirs)
            assert not level_b.failures, level_b.failures[:10]
        level_c = judged(path, dtype, requests, truth, got, **theirs)
        TOTAL.add(level_c)
        assert not level_c.failures, level_c.failures[:10]


def _counts(ours: Engine) -> dict[str, Any]:
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    return stats


def judged(
    path: str,
    dtype: str,
    requests: Sequence[Case],
    wanted: Sequence[Any],
    got: Sequence[Any],
    ask: Callable[[LLM, Case], Any] = lambda llm, case: run(llm, [case])[0],
    **stock: Any,
) -> Report:
    """Compare answers; if any differ, a further stock engine proves ties. `ask` has it answer one request."""
    report = compare(requests, wanted, got, dtype)
    if not report.failures:
        return report
    with engine(path, dtype, is_ours=False, **{**stock, **JUDGE}) as judge:
        return compare(requests, wanted, got, dtype, lambda case: ask(judge.llm, case))
