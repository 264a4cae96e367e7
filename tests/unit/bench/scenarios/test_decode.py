"""Decoding with drafts of known quality: which arms, with which settings and requests."""

from pathlib import Path

import pytest

from bench.runner.oracle import ORACLE
from bench.scenarios.decode import Decode, problem_id
from vllm_specrollout.config import parse, parse_request
from vllm_specrollout.errors import ConfigError

TREES = Decode(batches=(1, 4), drafts=(3, 7), accuracy=(0.6, 0.2), shape="both", rounds=2)


def test_chain_and_tree_are_measured_by_engines_of_their_own():
    assert [(arm.name, arm.engine, arm.draft) for arm in TREES.arms()] == [
        ("chain", "chain", 3),
        ("chain", "chain", 7),
        ("tree", "tree", 3),
        ("tree", "tree", 7),
    ]
    assert {arm.name for arm in Decode().arms()} == {"chain"}, "one rank"


def test_the_chain_drafts_the_first_rank_only():
    chain, tree = (parse(TREES.spec_rollout(name, Path("oracle.json"))) for name in ("chain", "tree"))
    assert (chain.shape, chain.drafter_options[ORACLE]["accuracy"]) == ("chain", [0.6])
    assert (tree.shape, tree.drafter_options[ORACLE]["accuracy"]) == ("tree", [0.6, 0.2])
    assert tree.max_draft_tokens == tree.max_depth == 7
    assert tree.budget == "fixed"


def test_off_path_measures_the_plugin_without_drafts():
    plan = Decode(is_off_path=True)
    assert [arm.engine for arm in plan.arms()] == ["installed", "idle", "paused"]
    assert parse(plan.spec_rollout("paused", Path("oracle.json"))).budget == "off"
    assert plan.spec_rollout("installed", Path("oracle.json")) is None
    idle = parse(plan.spec_rollout("idle", Path("oracle.json")))
    assert (idle.drafters, idle.ngram.min_match) == (("ngram",), 64)


def test_requests_of_both_engines_differ_in_nothing_but_their_options():
    stock, ours = TREES.params(4, None), TREES.params(4, 3)
    options = [values.pop("extra_args")["spec_rollout"] for values in ours]
    assert ours == stock
    assert [values["seed"] for values in stock] == [0, 1, 2, 3]
    parsed = [parse_request(option) for option in options]
    assert [option.problem_id for option in parsed] == [problem_id(4, i) for i in range(4)]
    assert {option.max_draft_tokens for option in parsed} == {3}


def test_a_tree_of_one_rank_is_refused():
    with pytest.raises(ConfigError, match="`--shape both` compares a chain with a tree, and one rank makes no tree"):
        Decode(shape="both")
