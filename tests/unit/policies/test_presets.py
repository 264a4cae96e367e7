"""Every budget by name: deterministic, within its decisions, and never a malformed tree, whatever it is fed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import tree_parents
from tests.unit.policies.builders import feedback_of, timing, views
from vllm_specrollout.config import BUDGETS, SpecRolloutConfig
from vllm_specrollout.policies.budget import Policy
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.policies.presets import make_policy, names, seed_with
from vllm_specrollout.trees.build import check, depths, is_ordered, order
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import Choice, Decision, DraftTree, RequestView, Shape, StepTiming


@dataclass(frozen=True)
class _Step:
    """What the engine does once: who runs, what drafters propose, what comes of it."""

    views: list[RequestView]
    trees: list[DraftTree]
    # [R] of each request's verified tree, which share of its nodes lies before the one the target reached
    reached: list[float]
    ms: float
    is_decode_only: bool


@st.composite
def _trees(draw: st.DrawFn) -> DraftTree:
    parents = draw(tree_parents(16))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    return order(
        DraftTree(
            np.arange(len(parents), dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.log(rng.uniform(0.01, 1.0, len(parents))).astype(np.float32),
            rng.integers(0, 2, len(parents)).astype(np.int32),
        )
    )


@st.composite
def _steps(draw: st.DrawFn) -> list[_Step]:
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        batch = draw(st.one_of(st.integers(0, 6), st.sampled_from([31, 32, 33])))
        running = views(
            batch,
            shape=draw(st.sampled_from(Shape)),
            max_new_tokens=draw(st.integers(1, 40)),
            max_draft_tokens=draw(st.sampled_from([0, 1, 5, 1 << 30])),
            weights_version=draw(st.integers(0, 1)),
            problem_id=draw(st.sampled_from(["", "p"])),
        )
        few = draw(st.lists(_trees(), min_size=1, max_size=3))
        shares = [draw(st.floats(0.0, 1.0))] * batch
        trees = [few[i % len(few)] for i in range(batch)]
        ms = draw(st.sampled_from([0.0, 0.5, 10.0, 5000.0]))
        steps.append(_Step(running, trees, shares, ms, draw(st.booleans())))
    return steps


def _play(policy: Policy, steps: list[_Step]) -> list[tuple[list[Decision], list[DraftTree], Choice | None]]:
    """As `step.Speculation` asks: nobody proposes where nothing may be drafted. Timings come one step late."""
    played, late = [], None
    for step in steps:
        decisions = policy.decide(step.views)
        trees = step.trees if any(d.max_nodes for d in decisions) else []
        offered = [_offered(tree, d) for tree, d in zip(trees, decisions, strict=False)]
        chosen = policy.choose(offered, decisions) if trees else [_NOTHING] * len(decisions)
        played.append((decisions, chosen, policy.explain()))
        items = [
            feedback_of(tree, int(share * (tree.size + 1)) - 1 if share < 1.0 else tree.size - 1, v.request_id)
            for tree, share, v in zip(chosen, step.reached, step.views, strict=True)
            if tree.size
        ]
        policy.observe(items, late)
        nodes, batch = sum(tree.size for tree in chosen), len(step.views)
        late = timing(batch, nodes, step.ms, tokens=batch + sum(i.accepted for i in items))
        if not step.is_decode_only:
            late = StepTiming(batch, batch + nodes + 9, nodes, 0, batch, step.ms, False)
    return played


def _offered(tree: DraftTree, decision: Decision) -> DraftTree:
    """What `step.Speculation` hands on: no more nodes and levels than allowed; several drafters' chains may branch."""
    return prune(tree, replace(decision, shape=Shape.TREE)) if decision.max_nodes else _NOTHING


_NOTHING = order(
    DraftTree(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
)


@pytest.mark.parametrize("name", BUDGETS)
@given(steps=_steps())
@settings(max_examples=40, deadline=None)
def test_whatever_happens_trees_are_sound_and_within_their_decisions(name: str, steps: list[_Step]) -> None:
    policy = make_policy(SpecRolloutConfig(budget=name))
    for (decisions, chosen, _), step in zip(_play(policy, steps), steps, strict=True):
        assert len(decisions) == len(chosen) == len(step.views)
        for decision, tree, view, proposed in zip(decisions, chosen, step.views, step.trees, strict=True):
            check(tree)
            assert is_ordered(tree) or name == "auto"  # ordered by its own estimates, not by the drafters'
            assert tree.size <= min(decision.max_nodes, view.max_draft_tokens)
            if not tree.size:
                continue
            assert decision.shape is not Shape.OFF and view.shape is not Shape.OFF
            assert int(depths(tree.parents).max()) <= min(decision.max_depth, view.max_new_tokens - 1)
            if Shape.CHAIN in (decision.shape, view.shape):
                assert tree.parents.tolist() == list(range(-1, tree.size - 1))
            # a token of each proposed node stands for it: what is kept hangs where it hung
            parent_of = dict(zip(proposed.token_ids.tolist(), proposed.parents.tolist(), strict=True))
            for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
                old = parent_of[token]
                assert (old == -1) == (parent == -1)
                assert parent == -1 or proposed.token_ids[old] == tree.token_ids[parent]


@pytest.mark.parametrize("name", BUDGETS)
@given(steps=_steps(), seed=st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_under_one_seed_every_budget_does_the_same(name: str, steps: list[_Step], seed: int) -> None:
    def run() -> list[object]:
        played = _play(make_policy(SpecRolloutConfig(budget=name), seed=seed), steps)
        return [(decisions, [t.token_ids.tolist() for t in trees], choice) for decisions, trees, choice in played]

    assert run() == run()


@pytest.mark.parametrize("name", BUDGETS)
@given(steps=_steps())
@settings(max_examples=10, deadline=None)
def test_every_budget_says_how_many_nodes_it_chose(name: str, steps: list[_Step]) -> None:
    for decisions, chosen, choice in _play(make_policy(SpecRolloutConfig(budget=name)), steps):
        if any(tree.size for tree in chosen):
            assert choice is not None and choice.is_on and choice.reason
            assert choice.nodes == sum(tree.size for tree in chosen)
        if not any(d.max_nodes for d in decisions) and name in ("off", "tlt", "fastgrpo", "specactor"):
            assert choice is not None and not choice.is_on and choice.nodes == 0


def test_every_name_makes_a_budget() -> None:
    assert names() == BUDGETS
    assert len({type(make_policy(SpecRolloutConfig(budget=name))) for name in names()}) == len(BUDGETS)


def test_off_never_drafts() -> None:
    policy = OffBudget()
    assert policy.explain() is None
    assert not any(d.max_nodes for d in policy.decide(views(3)))
    assert policy.explain() == Choice(False, "off", 0)


def test_a_profile_reaches_whoever_learns_costs() -> None:
    timings = [timing(1 + i % 8, 8 * (i % 5), 10.0 + 0.5 * (1 + i % 8 + 8 * (i % 5))) for i in range(200)]
    for name in names():
        policy = make_policy(SpecRolloutConfig(budget=name))
        is_used = seed_with(policy, timings)
        assert is_used == hasattr(policy, "cost") == (name not in ("fixed", "off", "tlt"))
        if is_used:
            assert policy.cost.predict(33) == pytest.approx(10.0 + 0.5 * 33, rel=0.1)  # type: ignore[attr-defined]
