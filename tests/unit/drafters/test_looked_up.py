import json
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.drafters import ask
from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.looked_up import LookedUpHistory
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.types import Answer, FinishReason, RequestView

PROMPT = np.arange(900, 1000, dtype=np.int32)
ANSWER = np.arange(100, 140, dtype=np.int32)


class _AtOnce(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


def _drafter(**settings: Any) -> LookedUpHistory:
    config = HistoryConfig(**settings)
    make_texts = partial(Texts, config, most_problems=4, past=4, executor=_AtOnce())
    return LookedUpHistory(config, make_texts, store=HistoryStore(config))


def _view(name: str, problem_id: str = "p") -> RequestView:
    return RequestView(name, PROMPT, len(PROMPT), 100, problem_id=problem_id, name=name)


def _finish(drafter: LookedUpHistory, name: str, tokens: Any = ANSWER) -> None:
    drafter.finish(Answer(name, "p", PROMPT, tokens, FinishReason.FINISHED, name=name))
    drafter.forget(name)


def _shown(drafter: LookedUpHistory, name: str) -> list[tuple[list[int], int]]:
    """Tokens and eighths of what the next step adds to the request's row."""
    changes = drafter.texts.take()
    if changes is None:
        return []
    tokens = np.zeros(drafter.texts.most_tokens, np.int32)
    for begin, piece in changes.pieces:
        tokens[begin : begin + len(piece)] = piece
    spans = changes.spans[changes.rows == drafter.row_of(name)].reshape(-1, 3)
    return [(tokens[begin:end].tolist(), weight) for begin, end, weight in spans.tolist() if end > begin]


def test_it_proposes_nothing_itself_and_knows_where_the_device_is_to_look() -> None:
    drafter = _drafter()
    _finish(drafter, "a")
    assert [tree.size for tree in ask(drafter, [_view("b"), _view("c", "q")])] == [0, 0]
    assert drafter.row_of("b") != drafter.row_of("c") and min(drafter.row_of("b"), drafter.row_of("c")) >= 0
    assert drafter.row_of("nobody") == -1
    assert _shown(drafter, "b") == [([*PROMPT[-32:].tolist(), *ANSWER.tolist()], 0)]


def test_an_answer_that_ended_drafts_for_its_siblings_with_the_reward_that_came_before_or_after() -> None:
    for is_early in (True, False):
        drafter = _drafter()
        ask(drafter, [_view("a"), _view("b")])
        if is_early:
            drafter.report_reward(["a-0", "a"], 1.0)
        _finish(drafter, "a")
        if not is_early:
            assert drafter.report_reward(["a-0", "a"], 1.0) is RewardOutcome.RECORDED
        assert [weight for _, weight in _shown(drafter, "b")] == [8]


def test_siblings_are_the_running_requests_of_a_problem_and_epoch_in_the_order_they_came() -> None:
    drafter = _drafter()
    ask(drafter, [_view("c"), _view("a"), _view("q", "q"), _view("b")])
    assert drafter.siblings_of("a") == ["c", "b"] and drafter.siblings_of("q") == []
    assert drafter.row_of("a") != drafter.row_of("q")
    drafter.begin_epoch()
    ask(drafter, [_view("d"), _view("e")])
    assert drafter.siblings_of("d") == ["e"] and drafter.siblings_of("a") == ["c", "b"]
    _finish(drafter, "c")
    drafter.forget("b")
    assert drafter.siblings_of("a") == [] and drafter.siblings_of("c") == []
    ask(drafter, [_view("b")])
    assert drafter.siblings_of("d") == ["e", "b"], "it was preempted, and is back"


def test_without_siblings_no_request_has_any() -> None:
    drafter = _drafter(siblings=False)
    ask(drafter, [_view("a"), _view("b")])
    assert drafter.siblings_of("a") == []


def test_requests_that_are_over_leave_nothing_but_their_answers() -> None:
    drafter = _drafter()
    ask(drafter, [_view(name, problem) for name, problem in zip("abcdef", "ppqrst", strict=True)])
    _finish(drafter, "a")
    _finish(drafter, "b", tokens=ANSWER[:0])
    for name in "cdef":
        drafter.forget(name)
    assert not drafter._live and not drafter._groups and len(answers_in(drafter.store, "p")) == 1
    assert not any(problem.running for problem in drafter.texts._problems.values())


@pytest.mark.parametrize("what", ["find", "read"])
def test_a_store_that_fails_in_the_background_costs_drafts_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    drafter = _drafter()
    _finish(drafter, "a")
    monkeypatch.setattr(drafter.store, what, fail)
    ask(drafter, [_view("b"), _view("c")])
    assert _shown(drafter, "b") == []
    _finish(drafter, "c")
    told = json.loads(json.dumps(drafter.as_dict()))
    assert len(_shown(drafter, "b")) == 1 and told["library"]["given_up"] >= 1
