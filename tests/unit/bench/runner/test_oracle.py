"""The oracle drafter: the recorded answer, as often and at the rank that its accuracy says."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.runner.oracle import ORACLE, OracleDrafter
from tests.drafters import ask
from tests.reference import trees
from tests.unit.observe.engine import walk
from vllm_specrollout import drafters
from vllm_specrollout.config import parse
from vllm_specrollout.drafters.base import Place
from vllm_specrollout.history.vocabulary import ANY_TOKEN
from vllm_specrollout.trees import build
from vllm_specrollout.types import DraftMode, DraftTree, RequestView

PROMPT = [9, 9, 9]


def make_view(answer: list[int], key: str = "p", room: int = 1000, shape: DraftMode = DraftMode.TREE) -> RequestView:
    token_ids = np.asarray(PROMPT + answer, dtype=np.int32)
    return RequestView("request", token_ids, len(PROMPT), room, shape, problem_id=key)


def oracle(answers: dict[str, list[int]], *, source: int = 0, **options: Any) -> OracleDrafter:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        path.write_text(json.dumps(answers), encoding="utf-8")
        return OracleDrafter(Place(source, 64, ANY_TOKEN), path=str(path), **options)


def draft(drafter: OracleDrafter, view: RequestView, max_nodes: int, max_depth: int, is_chain=False) -> DraftTree:
    (tree,) = ask(drafter, [view], max_nodes, max_depth, is_chain=is_chain)
    return tree


ACCURACIES = st.lists(st.sampled_from((0.0, 0.1, 0.2, 0.25)), min_size=1, max_size=4).map(tuple)
ANSWERS = st.lists(st.integers(0, 20), min_size=1, max_size=40)


@given(ACCURACIES, ANSWERS, st.integers(0, 45), st.integers(0, 30), st.integers(0, 10), st.booleans())
def test_a_draft_is_a_sound_tree_within_its_bounds(accuracy, answer, done, max_nodes, max_depth, is_chain) -> None:
    drafter = oracle({"p": answer}, accuracy=accuracy, source=2)
    tree = draft(drafter, make_view(answer[:done]), max_nodes, max_depth, is_chain)
    trees.check(tree)
    assert trees.is_ordered(tree)
    assert tree.size <= max_nodes
    assert max(build.depths(tree.parents).tolist(), default=0) <= min(max_depth, max(len(answer) - done, 0))
    assert set(tree.source.tolist()) <= {2}
    assert not is_chain or trees.is_chain(tree)


@given(ANSWERS, st.integers(0, 39), st.integers(1, 30), st.integers(1, 30))
def test_full_accuracy_drafts_exactly_the_recorded_continuation(answer, done, max_nodes, max_depth) -> None:
    drafter = oracle({"p": answer}, accuracy=(1.0,))
    tree = draft(drafter, make_view(answer[:done]), max_nodes, max_depth)
    assert tree.token_ids.tolist() == answer[done:][: min(max_nodes, max_depth)]
    assert trees.is_chain(tree) and not tree.log_q.any()


@given(ANSWERS, st.integers(1, 30))
def test_zero_accuracy_drafts_nothing_that_is_accepted(answer, max_nodes) -> None:
    tree = draft(oracle({"p": answer}, accuracy=(0.0,)), make_view([]), max_nodes, 30)
    assert tree.size == min(max_nodes, len(answer), 30)
    assert walk(tree, answer) == []


def test_each_rank_holds_the_true_token_as_often_as_its_accuracy_says() -> None:
    answer = np.random.default_rng(0).integers(0, 500, size=20_000).tolist()
    drafter = oracle({"p": answer}, accuracy=(0.5, 0.3, 0.1))
    made = [draft(drafter, make_view(answer[:done]), 3, 1) for done in range(3000)]
    hits = np.mean([tree.token_ids == answer[done] for done, tree in enumerate(made)], axis=0)
    # three standard deviations of a binomial at its widest
    assert hits == pytest.approx([0.5, 0.3, 0.1], abs=3 * 0.5 / 3000**0.5)


def test_the_accepted_tokens_are_as_many_as_the_drafts_probabilities_promise() -> None:
    answer = np.random.default_rng(1).integers(0, 500, size=3000).tolist()
    drafter = oracle({"p": answer}, accuracy=(0.6, 0.2))
    made = [draft(drafter, make_view(answer[:done]), 12, 8) for done in range(2500)]
    found = [len(walk(tree, answer[done:])) for done, tree in enumerate(made)]
    promised = [np.exp(build.cumulative_log_q(tree)).sum() for tree in made]
    assert np.mean(found) == pytest.approx(np.mean(promised), rel=0.1)


@pytest.mark.parametrize("max_depth", [1, 2, 4])
def test_the_form_is_the_best_tree_there_is(max_depth: int) -> None:
    accuracy = (0.2, 0.5)
    tree = draft(oracle({"p": list(range(30))}, accuracy=accuracy), make_view([]), 6, max_depth)
    paths = [path for depth in range(1, max_depth + 1) for path in itertools.product(accuracy, repeat=depth)]
    best = sorted((float(np.prod(path)) for path in paths), reverse=True)[:6]
    assert np.exp(build.cumulative_log_q(tree)) == pytest.approx(best)


def test_drafts_are_the_same_on_every_rank_and_differ_between_seeds_and_requests() -> None:
    answer = list(range(200))
    recorded = {"p": answer, "q": answer}

    def tokens(seed: int, key: str) -> list[int]:
        drafter = oracle(recorded, accuracy=(0.5,), seed=seed)
        return draft(drafter, make_view([], key), 60, 60).token_ids.tolist()

    assert tokens(1, "p") == tokens(1, "p")
    assert len({tuple(tokens(seed, key)) for seed in (1, 2) for key in ("p", "q")}) == 4


def test_a_draft_never_outgrows_the_tokens_the_request_may_still_make() -> None:
    drafter = oracle({"p": list(range(20))})
    assert [draft(drafter, make_view([], room=room), 9, 9).size for room in (0, 1, 2, 5, 50)] == [0, 0, 1, 4, 9]


def test_the_view_alone_can_forbid_branches_or_drafts() -> None:
    drafter = oracle({"p": list(range(20))}, accuracy=(0.4, 0.3))
    assert trees.num_paths(draft(drafter, make_view([], shape=DraftMode.CHAIN), 9, 9).parents) == 1
    assert draft(drafter, make_view([], shape=DraftMode.OFF), 9, 9).size == 0


def test_a_request_without_problem_id_is_found_by_its_own_id_and_one_that_was_not_recorded_has_no_drafts() -> None:
    drafter = oracle({"request": [4, 5]})
    assert draft(drafter, make_view([], key=""), 8, 8).token_ids.tolist() == [4, 5]
    assert draft(drafter, make_view([], key="unknown"), 8, 8).size == 0


def test_the_engine_gets_the_oracle_it_configured(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"p": [1, 2]}))
    config = parse({"drafters": [{"name": ORACLE, "path": str(path)}]})
    assert config is not None
    (drafter,) = drafters.build(config)
    assert drafter.name == ORACLE
    assert draft(drafter, make_view([]), 8, 8).token_ids.tolist() == [1, 2]


def test_from_a_position_on_it_may_be_right_no_more(tmp_path: Path) -> None:
    path, answer = tmp_path / "answers.json", list(range(30))
    path.write_text(json.dumps({"p": answer}))
    drafter = oracle({"p": [7]})
    drafter.replay(str(path), (1.0,), position=10)
    found = [len(walk(draft(drafter, make_view(answer[:done]), 4, 4), answer[done:])) for done in range(20)]
    assert found == [4] * 10 + [0] * 10
