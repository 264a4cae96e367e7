import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.budgets.papers.builders import step
from vllm_specrollout.budgets.papers.das import DasBudget
from vllm_specrollout.budgets.papers.histospec import HistoSpecBudget
from vllm_specrollout.budgets.papers.plans import PaperBudget, Rate, tokens_per_step, tried_tokens
from vllm_specrollout.budgets.papers.specactor import SpecActorBudget


def test_the_first_rejected_token_was_tried_and_those_behind_it_were_not() -> None:
    sizes, accepted = np.asarray([8, 8, 3, 0]), np.asarray([0, 5, 3, 0])
    assert tried_tokens(sizes, accepted).tolist() == [1, 6, 3, 0]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=30))
def test_a_rate_is_the_mean_of_its_cases_newer_steps_weighing_more(steps: list[tuple[int, int]]) -> None:
    rate, cases, total = Rate(), 0.0, 0.0
    for n, hits in steps:
        rate.add(n, hits)
        if n:
            cases, total = 0.98 * cases + n, 0.98 * total + hits
    assert rate.mean == pytest.approx(total / cases if cases else 0.0)


@pytest.mark.parametrize("kind", [HistoSpecBudget, DasBudget, SpecActorBudget])
def test_the_order_of_requests_in_a_step_does_not_matter(kind: type[PaperBudget]) -> None:
    learned = []
    for accepted in ([8] * 32 + [0] * 32, [0] * 32 + [8] * 32):
        budget = kind(24, 16, cost=None)
        for _ in range(10):
            budget.observe(step([8] * 64, accepted))
        learned.append([value for value in vars(budget).values() if isinstance(value, Rate)])
    assert learned[0] == learned[1] and learned[0]


@pytest.mark.parametrize("p", [0.5, 0.7])
def test_equal_rates_seldom_look_lower_by_luck(p: float) -> None:
    rng = np.random.default_rng(0)
    low = [Rate(60, float(rng.binomial(60, p))).is_surely_below(p) for _ in range(4000)]
    # Half of them are below; two standard errors leave one in 44
    assert np.mean(low) < 0.04
    assert np.mean([Rate(60, float(rng.binomial(60, p - 0.25))).is_surely_below(p) for _ in range(400)]) > 0.9


def test_of_what_was_never_tried_nothing_is_sure() -> None:
    assert not Rate().is_surely_below(1.0)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("w", [0, 1, 3, 8])
def test_expected_tokens_are_the_sum_over_the_papers_distribution(p: float, w: int) -> None:
    chances = [p**a * (1.0 - p) for a in range(w)] + [p**w]
    assert math.fsum(chances) == pytest.approx(1.0)
    assert tokens_per_step(p, w) == pytest.approx(sum(chance * (a + 1) for a, chance in enumerate(chances)))
