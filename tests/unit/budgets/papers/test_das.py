import numpy as np
import pytest

from tests.unit.budgets.papers.builders import Line, chains_of, requests, step, view
from vllm_specrollout.budgets.papers.das import LONG, MEDIUM, SHORT, DasBudget
from vllm_specrollout.budgets.papers.plans import Rate
from vllm_specrollout.types import Answer, DraftMode, FinishReason, RequestBatch

_NONE = np.zeros(0, np.int32)


def _das(lengths: dict[str, list[int]] | None = None, *, row: float = 0.2):
    budget = DasBudget(24, 16, cost=Line(10.0, row))
    for problem_id, known in (lengths or {}).items():
        for length in known:
            _end(budget, problem_id, length)
    return budget


def _end(budget: DasBudget, problem_id: str, length: int, status: FinishReason = FinishReason.FINISHED) -> None:
    budget.finish(Answer("r", problem_id, _NONE, np.zeros(length, np.int32), status))


def _batch(*problems: str, generated: int = 0, **kwargs: object) -> RequestBatch:
    return RequestBatch.of([view(f"r{i}", problem_id=p, generated=generated, **kwargs) for i, p in enumerate(problems)])


def test_answers_at_the_same_cap_are_long_all_of_them() -> None:
    """The normal case in RL: most answers reach the limit. By rank among equals, none of them would be Long."""
    budget = _das({"capped": [96] * 56, "short": [12] * 8})
    assert budget.classes(_batch(*["capped"] * 6)).tolist() == [LONG] * 6
    assert budget.classes(_batch("capped", "short")).tolist() == [LONG, SHORT]
    assert budget.classes(_batch("capped", "short", generated=80)).tolist() == [LONG, LONG]
    assert budget.limits(_batch(*["capped"] * 6)).wants_any


def test_answers_cut_at_their_limit_are_long_up_to_the_end() -> None:
    budget = _das({"p": [200] * 24 + [1000] * 8})
    for generated in (0, 500, 900):
        batch = _batch("p", generated=generated, max_new_tokens=1000 - generated)
        assert budget.classes(batch).tolist() == [LONG]


def test_classes_are_relative_to_the_answer_that_needs_most() -> None:
    budget = _das({"a": [1000], "b": [600], "c": [300]})
    assert budget.classes(_batch("a", "b", "c")).tolist() == [LONG, MEDIUM, SHORT]
    # without the longest, the next one is what the step waits for
    assert budget.classes(_batch("b", "c")).tolist() == [LONG, MEDIUM]


def test_a_short_answer_that_goes_on_and_on_becomes_long() -> None:
    budget = _das({"a": [1000], "c": [100]})
    for generated, kind in ((2, SHORT), (200, LONG)):
        views = [view("r0", problem_id="a"), view("r1", problem_id="c", generated=generated)]
        assert budget.classes(RequestBatch.of(views)).tolist() == [LONG, kind]


def test_an_aborted_answers_length_is_not_learned() -> None:
    budget = _das({"a": [1000]})
    _end(budget, "b", 10, FinishReason.ABORTED)
    assert budget.classes(_batch("a", "b")).tolist() == [LONG, LONG]


def test_long_answers_draft_most_medium_ones_half_and_short_ones_nothing() -> None:
    budget = _das({"a": [1000], "b": [600], "c": [300]})
    limits = budget.limits(_batch("a", "b", "c"))
    size = budget.best_size(3, 1, 1)
    assert size > 1 and limits.max_nodes.tolist() == [size, size // 2, 0]
    assert limits.is_chain.all()


@pytest.mark.parametrize("num_requests", [1, 16, 32, 64])
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.9])
def test_all_that_draft_are_counted(num_requests: int, share: float, p: float) -> None:
    """With only one counted, 64 Long requests would draft so much that plain decoding is 1.8 times as fast."""
    budget = _das()
    budget.acceptance = Rate(1000.0, 1000.0 * p)
    num_long = max(1, round(share * num_requests))
    num_medium = (num_requests - num_long) // 2

    def ms_per_token(k: int) -> float:
        rows = num_requests + num_long * k + num_medium * (k // 2)
        return (10.0 + 0.2 * rows) / sum(p**i for i in range(k + 1))

    assert budget.best_size(num_requests, num_long, num_medium) == np.argmin([ms_per_token(k) for k in range(17)])


def test_who_may_not_draft_is_not_counted() -> None:
    budget = _das()
    batch = RequestBatch.of([view("r0"), *(view(f"o{i}", shape=DraftMode.OFF) for i in range(63))])
    assert budget.limits(batch).max_nodes[0] == budget.best_size(64, 1, 0) > budget.best_size(64, 64, 0)


def test_acceptance_is_that_of_all_requests() -> None:
    budget = _das()
    for _ in range(200):
        budget.observe(step([8] * 64, [8] * 32 + [0] * 32))
    # half of the requests try 8 tokens and all are right, half try one and it is wrong
    assert budget.acceptance.mean == pytest.approx(8 / 9, rel=1e-3)


def test_a_step_in_which_nothing_is_drafted_says_off_and_why() -> None:
    budget = _das({"a": [1000], "c": [100]})
    batch = RequestBatch.of([view("r0", problem_id="a", shape=DraftMode.OFF), view("r1", problem_id="c")])
    plan = budget.choose(chains_of(batch, 8), budget.limits(batch), batch, 0.0)
    assert (plan.is_on, plan.reason, plan.trees.num_nodes) == (False, "short answers", 0)


def test_where_no_draft_is_worth_it_one_token_is_tried_now_and_then() -> None:
    budget, batch = _das(row=5.0), requests(16)
    budget.acceptance = Rate(1000.0, 10.0)
    reasons = [budget.limits(batch).reason for _ in range(64)]
    assert [i for i, reason in enumerate(reasons) if reason == "probe"] == [31, 63]
    assert set(reasons) == {"probe", "not worth its cost"}
    budget._not_worth_it = 31
    assert budget.limits(batch).max_nodes.tolist() == [1] * 16
    assert MEDIUM not in budget.classes(batch)
