import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trees import batch_of, drafted
from tests.unit.budgets.builders import timing
from tests.unit.budgets.papers.builders import view
from vllm_specrollout.budgets.base import FOR_GOOD, Budget
from vllm_specrollout.budgets.fixed import FixedBudget, OffBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.budgets.papers.das import DasBudget
from vllm_specrollout.budgets.papers.fastgrpo import FastGrpoBudget
from vllm_specrollout.budgets.papers.histospec import HistoSpecBudget
from vllm_specrollout.budgets.papers.specactor import SpecActorBudget
from vllm_specrollout.budgets.papers.tlt import TltBudget
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.config import BUDGETS, parse
from vllm_specrollout.types import (
    Answer,
    DraftMode,
    FinishReason,
    RequestBatch,
    StepPlan,
    StepRecord,
    TreeBatch,
    VerifyResult,
    empty_trees,
)

PRESETS = {
    "histospec": HistoSpecBudget,
    "das": DasBudget,
    "fastgrpo": FastGrpoBudget,
    "tlt": TltBudget,
    "specactor": SpecActorBudget,
}


Step = tuple[RequestBatch, list[TreeBatch], float, bool]
"""What the engine does once: who runs, what two drafters propose, what it costs, and whether it only decodes."""


@st.composite
def _steps(draw: st.DrawFn) -> list[Step]:
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        count = draw(st.one_of(st.integers(0, 6), st.sampled_from([31, 32, 33])))
        views = [
            view(
                f"r{i}",
                shape=draw(st.sampled_from(DraftMode)) if i < 3 else DraftMode.TREE,
                max_new_tokens=draw(st.integers(1, 40)) if i < 3 else 100,
                max_draft_tokens=draw(st.sampled_from([0, 1, 5, 1 << 30])) if i < 3 else 1 << 30,
                problem_id=f"p{i % 2}",
            )
            for i in range(count)
        ]
        few = [[draw(drafted(source)) for _ in range(2)] for source in range(2)]
        batch = RequestBatch.of(views)
        proposals = [batch_of([trees[i % 2] for i in range(count)], batch.request_ids) for trees in few]
        steps.append((batch, proposals, draw(st.sampled_from([0.0, 0.5, 10.0, 5000.0])), draw(st.booleans())))
    return steps


def _first_children(trees: TreeBatch) -> VerifyResult:
    """The target follows the first token of every draft, and rejects the next."""
    accepted = (trees.sizes > 0).astype(np.int32)
    return VerifyResult(accepted, np.zeros(int(accepted.sum()), np.int32))


def _play(budget: Budget, steps: list[Step]) -> list[tuple[RequestBatch, StepPlan | None]]:
    """As the speculator asks; a step's record comes when the next one has been planned."""
    played, late = [], None
    for batch, proposals, ms, is_decode_only in steps:
        plan = None
        if not budget.steps_off(batch.size):
            limits = budget.limits(batch)
            assert (limits.max_nodes <= batch.max_nodes).all()
            assert (limits.max_depth <= batch.max_depth).all()
            assert (limits.is_chain >= batch.is_chain).all()
            plan = budget.choose(proposals, limits, batch, 0.1)
            sizes = plan.trees.sizes
            assert (sizes <= limits.max_nodes).all() and len(sizes) == batch.size
        played.append((batch, plan))
        if late is not None:
            budget.observe(late)
        trees = plan.trees if plan else empty_trees(batch.request_ids)
        cost = timing(batch.size, trees.num_nodes, ms, is_decode_only=is_decode_only)
        late = StepRecord(plan, trees, _first_children(trees), cost, batch, proposals)
    budget.finish(Answer("r0", "p0", np.zeros(2, np.int32), np.zeros(9, np.int32), FinishReason.FINISHED))
    return played


@pytest.mark.parametrize("name", PRESETS)
@given(steps=_steps())
@settings(max_examples=25, deadline=None)
def test_plans_are_within_limits_and_say_why(name: str, steps: list[Step]) -> None:
    for batch, plan in _play(make_budget(parse({"budget": name})), steps):
        if plan is None:
            continue
        assert plan.reason
        assert plan.is_on or not plan.trees.num_nodes
        assert list(plan.trees.request_ids) == batch.request_ids
        for i in np.flatnonzero(plan.trees.sizes).tolist():
            tree = plan.trees.tree(i)
            assert batch.views[i].shape is not DraftMode.OFF
            if batch.is_chain[i] or name in ("histospec", "das", "specactor"):
                assert tree.parents.tolist() == list(range(-1, tree.size - 1))


@pytest.mark.parametrize("name", PRESETS)
@given(steps=_steps(), seed=st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_under_one_seed_every_budget_does_the_same(name: str, steps: list[Step], seed: int) -> None:
    def run() -> list[object]:
        played = _play(make_budget(parse({"budget": name}), seed=seed), steps)
        return [plan and (plan.reason, plan.trees.token_ids.tolist(), plan.trees.sizes.tolist()) for _, plan in played]

    assert run() == run()


def test_every_name_of_the_configuration_makes_a_budget_of_its_own() -> None:
    assert names() == BUDGETS
    made = {name: type(make_budget(parse({"budget": name}))) for name in BUDGETS}
    assert made == {"auto": GoodputBudget, "fixed": FixedBudget, "off": OffBudget, **PRESETS}
    assert type(make_budget(parse(True))) is GoodputBudget


@pytest.mark.parametrize("name", [name for name in BUDGETS if name not in ("auto", "off")])
def test_the_engines_limits_reach_the_budget(name: str) -> None:
    budget = make_budget(parse({"budget": name, "max_draft_tokens": 7, "max_depth": 5}))
    assert (budget.max_nodes, budget.max_depth) == (7, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("fastgrpo", "c_peak", 300), ("tlt", "threshold", 48), ("specactor", "draft_ms", 5.0)],
)
def test_options_reach_the_budget(name: str, option: str, value: float) -> None:
    budget = make_budget(parse({"budget": {"name": name, option: value}}))
    assert getattr(budget.options, option) == value  # type: ignore[attr-defined]


def test_off_is_off_for_good() -> None:
    assert make_budget(parse({"budget": "off"})).steps_off(1) == FOR_GOOD


@pytest.mark.parametrize("name", PRESETS)
def test_a_profile_reaches_whoever_learns_costs(name: str) -> None:
    budget = make_budget(parse({"budget": name}))
    sizes = [(1 + i % 8, 8 * (i % 5)) for i in range(200)]
    budget.seed([timing(batch, nodes, 10.0 + 0.5 * (batch + nodes)) for batch, nodes in sizes])
    assert budget.cost.predict(1, 32) == pytest.approx(10.0 + 0.5 * 33, rel=0.15)  # type: ignore[attr-defined]
