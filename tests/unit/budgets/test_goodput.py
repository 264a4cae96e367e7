import numpy as np
import pytest

from bench.replay.synthetic import TracePlan, make_trace
from tests.unit.budgets.builders import batch, chains, record, timing
from tests.unit.replay import gate
from vllm_specrollout.budgets.fixed import OffBudget
from vllm_specrollout.budgets.goodput import COLD, CREDIT, LEAST, SHARE, SPELL, Acceptance, GoodputBudget
from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.replay.simulate import Result, replay
from vllm_specrollout.types import StepPlan, StepRecord, StepTiming, empty_trees


def decoded(num_nodes: int) -> StepTiming:
    return timing(8, num_nodes, 10.0 + 0.1 * (8 + num_nodes))


def experienced() -> GoodputBudget:
    """One that knows what steps of eight requests cost."""
    budget = GoodputBudget(8, 8)
    budget.seed([decoded(nodes) for nodes in (0, 8, 32, 64) * 10])
    return budget


def choose(budget: GoodputBudget, probability: float, length: int = 8, draft_ms: float = 0.1) -> StepPlan:
    requests = batch(8)
    return budget.choose([chains(8, length, probability)], budget.limits(requests), requests, draft_ms)


def plainly(ms: float) -> StepRecord:
    """A step without drafts that took so long."""
    return record(empty_trees([f"r{i}" for i in range(8)]), [0] * 8, timing(8, 0, ms))


def run(plan: TracePlan, budget: OffBudget | None = None) -> Result:
    trace = make_trace(plan)
    return replay(trace, budget or GoodputBudget(trace.header.max_draft_tokens, trace.header.max_depth))


def test_the_first_step_goes_without_drafts_to_be_measured() -> None:
    budget = GoodputBudget(8, 8)
    plan = choose(budget, 0.9)
    assert plan.trees.num_nodes == 0 and plan.reason == "plain, to know its cost" and plan.is_on and plan.pays
    assert choose(budget, 0.9).trees.num_nodes > 0


def test_the_chosen_nodes_are_those_of_the_most_tokens_per_millisecond() -> None:
    budget = experienced()
    plan = choose(budget, 0.6)
    # a node of depth d is reached with 0.6^d; the whole batch goes to the same depth
    rates = [8 * sum(0.6**d for d in range(depth + 1)) / budget.cost.predict(8, 8 * depth) for depth in range(9)]
    best = int(np.argmax(rates))
    assert plan.trees.sizes.tolist() == [best] * 8 and 0 < best < 8
    assert plan.reason == "goodput" and plan.pays
    assert plan.expected_tokens == pytest.approx(8 * sum(0.6**d for d in range(1, best + 1)), rel=1e-3)
    assert plan.plain_ms == pytest.approx(10.8, rel=0.02)
    assert plan.expected_ms == pytest.approx(10.8 + 0.1 * 8 * best + 0.1, rel=0.05)


def test_where_nothing_pays_the_best_set_is_verified_to_learn_from_it() -> None:
    plan = choose(experienced(), 0.02)
    assert plan.reason == "drafts do not pay" and not plan.pays
    assert plan.trees.num_nodes > 0 and plan.expected_tokens < 1.0


def test_drafts_that_save_less_than_asking_costs_do_not_pay() -> None:
    assert choose(experienced(), 0.3, length=1).pays
    expensive = choose(experienced(), 0.3, length=1, draft_ms=5.0)
    # drafters have been asked already, so what they proposed is verified
    assert not expensive.pays and expensive.trees.num_nodes == 8


def test_with_nothing_proposed_there_is_nothing_to_choose() -> None:
    plan = choose(experienced(), 0.5, length=0)
    assert plan.reason == "nothing proposed" and not plan.pays and plan.trees.num_nodes == 0


def test_plain_decoding_is_measured_again_in_a_spell_once_that_may_lose_so_much() -> None:
    budget = experienced()
    gains, begun = [], []
    for number in range(600):
        plan = choose(budget, 0.5)
        gains.append((8 + plan.expected_tokens) / plan.expected_ms / (8 / plan.plain_ms))
        if budget.steps_off(8):
            begun.append(number)
            for left in range(SPELL, 0, -1):
                assert budget.steps_off(8) == left
                budget.observe(plainly(10.8))
            assert budget.steps_off(8) == 0
    assert gains[0] > 1.0 + CREDIT / SPELL, "or the first spell would come at once"
    first = (SPELL * (gains[0] - 1.0) - CREDIT) / SHARE
    assert begun[0] == pytest.approx(first, abs=2) and begun[1] > begun[0] + LEAST


def test_the_first_plain_steps_behind_drafts_do_not_count() -> None:
    budget = experienced()
    before = budget.cost.plain_ms(8)
    budget.observe(record(chains(8, 8, 0.9), [7] * 8, decoded(64)))
    for _ in range(COLD):
        budget.observe(plainly(2.0 * before))
    assert budget.cost.plain_ms(8) == pytest.approx(before, rel=0.01)
    for _ in range(40):
        budget.observe(plainly(1.1 * before))
    assert budget.cost.plain_ms(8) == pytest.approx(1.1 * before, rel=0.03)


def test_a_drafter_that_claims_too_much_is_written_off_and_comes_back() -> None:
    budget = experienced()
    trees = chains(8, 8, 0.9)
    assert choose(budget, 0.9).pays
    for _ in range(30):
        budget.observe(record(trees, [0] * 8))
    assert not choose(budget, 0.9).pays
    for _ in range(30):
        budget.observe(record(trees, [7] * 8))
    assert choose(budget, 0.9).pays


def test_after_thousands_of_weight_updates_what_was_never_drafted_is_taken_at_its_word() -> None:
    acceptance = Acceptance()
    for version in range(3000):
        acceptance.observe(record(chains(2, 3, 0.55), [1, 2], weights_version=version))
    factors = acceptance.calibration()
    seen = factors[0, 5]
    factors[0, 5] = 1.0
    assert np.isfinite(seen) and seen != 1.0
    np.testing.assert_allclose(factors, 1.0)


@pytest.mark.parametrize("line", [gate.CPU, gate.GPU, gate.EAGER, gate.KNEE], ids=["cpu", "gpu", "eager", "knee"])
def test_a_useless_drafter_costs_at_most_three_percent(line: CostLine) -> None:
    plan = TracePlan(requests=24, batch=12, median=150, spread=0.3, acceptance=(0.01,) * 8, told=0.05, cost=line)
    assert run(plan).makespan_ms <= 1.03 * run(plan, OffBudget()).makespan_ms


@pytest.mark.parametrize("seed", range(8))
def test_auto_is_never_much_slower_than_plain_decoding_on_any_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fixed, node = rng.uniform(2.0, 30.0), np.exp(rng.uniform(np.log(0.005), np.log(0.6)))
    draft, ask = rng.uniform(0.0, 3.0), rng.uniform(0.0, 0.3)
    line = CostLine(fixed=fixed, request=node, node=node, draft=draft, ask=ask, prompt_row=node)
    batch, acceptance, told = int(rng.choice([4, 8, 16])), (rng.uniform(0.05, 0.9),) * 6, rng.uniform(0.2, 1.0)
    plan = TracePlan(
        requests=32, batch=batch, median=120, spread=0.4, acceptance=acceptance, told=told, cost=line, seed=seed
    )
    assert run(plan).makespan_ms <= 1.02 * run(plan, OffBudget()).makespan_ms
