"""The engine benchmark's plan: which runs, in which order, with which settings."""

from pathlib import Path

import pytest

from bench.engine.plan import Plan, problem_id, request_params
from vllm_specrollout.config import parse, parse_request
from vllm_specrollout.errors import ConfigError

TREES = Plan.from_flags("1,4", "3,7", "0.6,0.2", shape="both", repeats=2)


def test_flags_with_lists_become_the_plan():
    assert (TREES.batches, TREES.drafts, TREES.accuracy) == ((1, 4), (3, 7), (0.6, 0.2))


def test_chain_and_tree_are_measured_by_engines_of_their_own():
    assert [(arm.name, arm.engine, arm.draft) for arm in TREES.arms()] == [
        ("chain", "chain", 3),
        ("chain", "chain", 7),
        ("tree", "tree", 3),
        ("tree", "tree", 7),
    ]


def test_the_chain_drafts_the_first_rank_only():
    chain, tree = (parse(TREES.spec_rollout(name, Path("oracle.json"))) for name in ("chain", "tree"))
    assert (chain.shape, chain.oracle.accuracy) == ("chain", (0.6,))
    assert (tree.shape, tree.oracle.accuracy) == ("tree", (0.6, 0.2))
    assert tree.max_draft_tokens == tree.max_depth == 7
    assert tree.budget == "fixed"


def test_one_rank_is_called_a_chain():
    assert {arm.name for arm in Plan().arms()} == {"chain"}


def test_warm_up_comes_first_and_stock_goes_first_in_every_other_round():
    steps = list(TREES.steps())
    assert len(steps) == 3 * 2 * 4
    assert [step.is_timed for step in steps[:8]] == [False] * 8
    assert all(step.is_timed for step in steps[8:])
    assert {step.round: step.is_stock_first for step in steps} == {-1: False, 0: True, 1: False}
    assert [step.is_last_of_batch for step in steps[:8]] == [False, False, False, True] * 2


def test_off_path_measures_the_plugin_without_drafts():
    plan = Plan(is_off_path=True)
    assert [arm.engine for arm in plan.arms()] == ["installed", "idle"]
    assert plan.spec_rollout("installed", Path("oracle.json")) is None
    idle = parse(plan.spec_rollout("idle", Path("oracle.json")))
    assert (idle.drafters, idle.ngram.min_match) == (("ngram",), 64)


def test_requests_of_both_engines_differ_in_nothing_but_their_options():
    stock, ours = request_params(TREES, 4, None), request_params(TREES, 4, 3)
    options = [values.pop("extra_args")["spec_rollout"] for values in ours]
    assert ours == stock
    assert [values["seed"] for values in stock] == [0, 1, 2, 3]
    parsed = [parse_request(option) for option in options]
    assert [option.problem_id for option in parsed] == [problem_id(4, i) for i in range(4)]
    assert {option.max_draft_tokens for option in parsed} == {3}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"shape": "bush"}, "`--shape` is 'bush', which does not exist"),
        ({"dtype": "float16"}, "`--dtype` is 'float16', which does not exist"),
        ({"tokens": 1}, "`--tokens` is 1, outside 2 to 65536"),
        ({"repeats": 0}, "`--repeats` is 0, outside 1 to 1000"),
        ({"shape": "both"}, "`--shape both` compares a chain with a tree, and one rank makes no tree"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes, cause):
    with pytest.raises(ConfigError) as caught:
        Plan(**changes)
    assert caught.value.cause == cause
