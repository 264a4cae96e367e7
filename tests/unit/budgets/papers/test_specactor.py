import numpy as np
import pytest

from tests.unit.budgets.papers.builders import Line, chains_of, requests, step
from vllm_specrollout.budgets.papers.plans import Rate, tokens_per_step
from vllm_specrollout.budgets.papers.specactor import REPLAN, SpecActorBudget
from vllm_specrollout.config.budgets import SpecActorOptions
from vllm_specrollout.types import Answer, FinishReason

_NONE = np.zeros(0, np.int32)


def _specactor(p: float = 0.7, **options: float) -> SpecActorBudget:
    budget = SpecActorBudget(24, 16, SpecActorOptions(**options), cost=Line())  # type: ignore[arg-type]
    budget.acceptance = Rate(10_000.0, 10_000.0 * p)
    return budget


@pytest.mark.parametrize("p", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("draft_ms", [0.0, 1.0])
def test_the_window_is_the_best_of_all(p: float, batch: int, draft_ms: float) -> None:
    budget = _specactor(p, draft_ms=draft_ms)
    speeds = [tokens_per_step(p, w) / (w * draft_ms + 10.0 + 0.2 * batch * (w + 1)) for w in range(1, 17)]
    assert budget.best_window(batch) == 1 + int(np.argmax(speeds))


def test_a_plan_holds_for_so_many_tokens() -> None:
    budget = _specactor()
    first = int(budget.limits(requests(8)).max_nodes[0])
    budget.acceptance = Rate(10_000.0, 0.0)
    budget.observe(step([0] * (REPLAN - 1), [0] * (REPLAN - 1)))
    assert budget.limits(requests(8)).max_nodes[0] == first > 1
    budget.observe(step([0], [0]))
    assert budget.limits(requests(8)).max_nodes[0] == budget.window == 1


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("p", [0.5, 0.6, 0.8, 0.95])
def test_the_worst_requests_never_draft_more_than_the_others(batch: int, p: float) -> None:
    """With windows planned for a batch of one, the worst of 64 requests would draft 4 to 6 tokens, the others 1."""
    budget = _specactor(p)
    budget.window = budget.best_window(batch)
    assert all(budget.own_window(share * p, batch) <= budget.window for share in (0.2, 0.5, 0.8, 1.0))


def test_alone_in_its_batch_a_request_gets_the_papers_own_window() -> None:
    budget = _specactor(0.9)
    budget.window = budget.best_window(1)
    speeds = [tokens_per_step(0.5, w) / (10.0 + 0.2 * (w + 1)) for w in range(1, 17)]
    assert budget.own_window(0.5, 1) == 1 + int(np.argmax(speeds))


def test_a_request_far_below_the_average_gets_a_window_of_its_own() -> None:
    budget = _specactor(0.7)
    for _ in range(40):
        budget.observe(step([8, 8], [8, 0]))
    budget.replan(requests(2))
    assert set(budget.own) == {"r1"} and budget.own["r1"] < budget.window
    limits = budget.limits(requests(2))
    assert limits.max_nodes.tolist() == [budget.window, budget.own["r1"]] and limits.reason == "own windows"


def test_of_equal_requests_few_get_a_window_of_their_own() -> None:
    """By chance about half of them are below the average."""
    budget, rng, count = _specactor(0.7), np.random.default_rng(0), 64
    for _ in range(20):
        accepted = np.minimum(rng.geometric(0.3, count) - 1, 4)
        budget.observe(step([4] * count, accepted.tolist()))
    below = [name for name, rate in budget.requests.items() if rate.mean < budget.acceptance.mean]
    budget.replan(requests(count))
    assert len(below) > 20 and len(budget.own) <= 5


def test_acceptance_counts_the_tokens_the_target_reached() -> None:
    budget = _specactor()
    for _ in range(2000):
        budget.observe(step([8], [3]))
    assert budget.acceptance.mean == pytest.approx(0.75, abs=0.01)
    assert budget.requests["r0"].mean == pytest.approx(0.75, abs=0.01)


def test_what_a_request_left_ends_with_it() -> None:
    budget = _specactor()
    for _ in range(20):
        budget.observe(step([8, 8], [8, 0]))
    budget.replan(requests(2))
    assert "r1" in budget.own
    budget.finish(Answer("r1", "", _NONE, _NONE, FinishReason.FINISHED))
    assert "r1" not in budget.own and set(budget.requests) == {"r0"}


def test_drafts_are_chains_within_the_engines_limits() -> None:
    budget, batch = SpecActorBudget(24, 5, cost=Line(1000.0, 0.001)), requests(1)
    limits = budget.limits(batch)
    assert limits.is_chain.all() and limits.max_nodes.tolist() == [5]
    assert budget.choose(chains_of(batch, 3), limits, batch, 0.0).trees.num_nodes == 3


def test_it_says_what_it_expects() -> None:
    budget, batch = _specactor(0.7), requests(2)
    plan = budget.choose(chains_of(batch, 3), budget.limits(batch), batch, 0.0)
    assert (plan.reason, plan.trees.num_nodes) == ("window", 6)
    assert plan.expected_tokens == pytest.approx(2 * (0.7 + 0.7**2 + 0.7**3))
    assert (plan.expected_ms, plan.plain_ms) == (pytest.approx(11.6), pytest.approx(10.4))
