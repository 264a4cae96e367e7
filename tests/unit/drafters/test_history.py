import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.drafters import ask
from tests.reference.trees import check
from tests.unit.history.stored import answers_in
from tests.unit.history.texts_device import Later
from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason, RequestView

PROMPT = [900, 901, 902, 903]
ANSWER = list(range(100, 140))


class _Drafter(HistoryDrafter):
    """Whose indices are built when told to."""

    def __init__(self, **settings: Any) -> None:
        config = HistoryConfig(**settings)
        store, self.executor = HistoryStore(config), Later()
        make_index = partial(HistoryIndex, min_match=config.min_match, max_match=config.max_match, max_matches=32)
        super().__init__(config, store=store, cache=IndexCache(config, store, make_index, self.executor))


def _view(name: str, output: list[int], problem_id: str = "p", prompt: list[int] = PROMPT) -> RequestView:
    return RequestView(name, np.asarray(prompt + output, np.int32), len(prompt), 100, problem_id=problem_id, name=name)


def _drafts(drafter: _Drafter, *views: RequestView, is_built: bool = True) -> list[list[int]]:
    if is_built:
        ask(drafter, views, 0, 0)
        drafter.executor.run()
    trees = ask(drafter, views, 8, 8)
    for tree in trees:
        if tree.size:
            check(tree)
    return [tree.token_ids.tolist() for tree in trees]


def _finish(drafter: _Drafter, name: str, output: list[int]) -> None:
    prompt, tokens = np.asarray(PROMPT, np.int32), np.asarray(output, np.int32)
    drafter.finish(Answer(name, "p", prompt, tokens, FinishReason.FINISHED, name=name))
    drafter.forget(name)


@pytest.fixture
def drafter() -> Iterator[_Drafter]:
    made = _Drafter()
    yield made
    made.close()


def test_a_running_sibling_drafts(drafter: _Drafter) -> None:
    assert _drafts(drafter, _view("a", ANSWER), _view("b", ANSWER[:10]))[1] == ANSWER[10:18]


def test_a_finished_sibling_drafts_to_its_end_and_not_beyond(drafter: _Drafter) -> None:
    # the last step sampled two tokens behind the answer's end
    _drafts(drafter, _view("a", [*ANSWER, 7, 8]))
    _finish(drafter, "a", ANSWER)
    assert _drafts(drafter, _view("b", ANSWER[:35]))[0] == ANSWER[35:]


def test_without_siblings_only_past_epochs_and_the_request_itself_draft() -> None:
    drafter = _Drafter(siblings=False)
    _drafts(drafter, _view("a", ANSWER))
    _finish(drafter, "a", ANSWER)
    assert _drafts(drafter, _view("b", ANSWER[:10])) == [[]]
    assert _drafts(drafter, _view("c", ANSWER[:10] + ANSWER[:5]))[0][:5] == ANSWER[5:10]
    drafter.forget("c")
    drafter.begin_epoch()
    assert _drafts(drafter, _view("d", ANSWER[:10]))[0] == ANSWER[10:18]


def test_an_answer_drafts_for_as_many_epochs_as_are_kept() -> None:
    drafter = _Drafter(epochs=2)
    _drafts(drafter, _view("a", ANSWER[:4]))
    _finish(drafter, "a", ANSWER)
    found = []
    for name in "bcde":
        found.append(bool(_drafts(drafter, _view(name, ANSWER[:10]))[0]))
        _finish(drafter, name, [1])
        drafter.begin_epoch()
    assert found == [True, True, True, False]


def test_problems_do_not_draft_for_each_other() -> None:
    drafts = _drafts(_Drafter(), _view("a", ANSWER, "p"), _view("b", ANSWER[:10], "q", [5, 6, 7]))
    assert not drafts[1]


def test_the_first_tokens_are_drafted_from_the_prompts_end() -> None:
    drafter = _Drafter()
    _finish(drafter, "a", ANSWER)
    drafter.begin_epoch()
    assert _drafts(drafter, _view("b", []))[0] == ANSWER[:8]


def test_a_preempted_request_does_not_find_itself(drafter: _Drafter) -> None:
    _drafts(drafter, _view("a", ANSWER))
    drafter.forget("a")
    assert _drafts(drafter, _view("a", ANSWER[:10])) == [[]]


def test_a_request_that_outlives_its_epoch_belongs_to_the_old_one(drafter: _Drafter) -> None:
    _drafts(drafter, _view("a", ANSWER[:20]))
    drafter.begin_epoch()
    _drafts(drafter, _view("a", ANSWER[:30]))
    _finish(drafter, "a", ANSWER)
    assert [answer.epoch for answer in answers_in(drafter.store, "p")] == [0]


def test_an_answer_that_was_never_drafted_for_is_kept_all_the_same(drafter: _Drafter) -> None:
    _finish(drafter, "off", ANSWER)
    assert _drafts(drafter, _view("b", ANSWER[:10]))[0] == ANSWER[10:18]


def test_a_request_that_ended_without_a_token_runs_no_longer_and_leaves_no_answer(drafter: _Drafter) -> None:
    drafter.admit(_view("gone", []))
    assert drafter.report_reward(["gone"], 1.0) is RewardOutcome.EARLY
    nothing = np.zeros(0, np.int32)
    drafter.finish(Answer("gone", "p", nothing, nothing, FinishReason.ABORTED, name="gone"))
    assert drafter.report_reward(["gone"], 1.0) is RewardOutcome.UNKNOWN
    assert not answers_in(drafter.store, "p")


def test_while_an_index_is_built_its_requests_go_without_drafts() -> None:
    drafter = _Drafter()
    _finish(drafter, "a", ANSWER)
    drafter.begin_epoch()
    assert _drafts(drafter, _view("b", ANSWER[:10]), is_built=False) == [[]]
    drafter.executor.run()
    assert _drafts(drafter, _view("b", ANSWER[:10]), is_built=False)[0] == ANSWER[10:18]


def test_chains_are_chains(drafter: _Drafter) -> None:
    _drafts(drafter, _view("a", [1, 2, 3, 4, 5, 6]), _view("b", [1, 2, 3, 9, 8, 7]))
    tree = ask(drafter, [_view("c", [1, 2, 3])], 8, 8, is_chain=True)[0]
    assert tree.parents.tolist() == list(range(-1, tree.size - 1))


@pytest.mark.parametrize("is_early", [True, False], ids=["before their ends, among siblings", "in the next epoch"])
@pytest.mark.parametrize(("good", "first"), [("a", 4), ("b", 9)])
def test_of_two_branches_the_one_with_the_reward_comes_first(good: str, first: int, is_early: bool) -> None:
    drafter, answers = _Drafter(), {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 9, 8, 7]}
    _drafts(drafter, *(_view(name, own) for name, own in answers.items()))
    if is_early:
        drafter.report_reward([good], 5.0)
    for name, own in answers.items():
        _finish(drafter, name, own)
    if not is_early:
        drafter.report_reward([good], 5.0)
        drafter.begin_epoch()
    assert _drafts(drafter, _view("c", [1, 2, 3]))[0][0] == first


def test_a_reward_finds_its_request_before_and_after_its_end(drafter: _Drafter) -> None:
    _drafts(drafter, _view("a", ANSWER))
    assert drafter.report_reward(["a"], 7.0) is RewardOutcome.EARLY
    assert drafter.report_reward(["a"], 1.0) is RewardOutcome.REPEATED
    _finish(drafter, "a", ANSWER)
    assert answers_in(drafter.store, "p")[0].reward == 1.0
    assert drafter.report_reward(["a-0", "a"], 2.0) is RewardOutcome.REPEATED
    assert drafter.report_reward(["nobody"], 2.0) is RewardOutcome.UNKNOWN


def test_what_it_says_of_itself_is_plain_json(drafter: _Drafter) -> None:
    _drafts(drafter, _view("a", ANSWER), _view("b", ANSWER[:10]))
    told = json.loads(json.dumps(drafter.as_dict()))
    assert (told["lookups"], told["hits"], told["hit_rate"]) == (2, 1, 0.5)
