"""The check itself: stock's answers, ours without drafts, ours with every kind of draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import Report, compare, run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fuzz import FuzzDrafter

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
    **kwargs: Any,
) -> None:
    """Level B and level C of docs/concepts/exactness.md; totals go to TOTAL.

    Args:
        path: model folder.
        rounds: how often all requests run with fresh fuzzed drafts.
        num_drafters: how many draft for the same requests; their trees are united.
        stock: engine arguments of stock where they differ from ours.
        inspect: looks at our engine after the last round.
        kwargs: engine arguments of both.
    """
    theirs = {**kwargs, **(stock or {})}
    theirs.pop("spec_rollout", None)
    with engine(path, dtype, is_ours=False, **theirs) as plain_stock:
        truth = run(plain_stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    drafted: list[Any] = []
    with engine(path, dtype, is_ours=True, **kwargs) as ours:
        plain = run(ours.llm, requests, enabled=False)
        for number in range(rounds):
            quality = QUALITIES[number % len(QUALITIES)]
            ours.runner.speculation.drafters = [
                FuzzDrafter(answers, VOCAB, seed=number + 1000 * other, quality=quality)
                for other in range(num_drafters)
            ]
            before = ours.runner.stats.drafted
            drafted.append(run(ours.llm, requests))
            assert ours.runner.stats.drafted > before
            level_b = compare(requests, plain, drafted[-1], dtype, stock=None)
            assert not level_b.failures, level_b.failures[:10]
        if inspect is not None:
            inspect(ours)
    with engine(path, dtype, is_ours=False, max_logprobs=-1, **theirs) as judge:
        for got in drafted:
            level_c = compare(requests, truth, got, dtype, judge.llm)
            TOTAL.add(level_c)
            assert not level_c.failures, level_c.failures[:10]
