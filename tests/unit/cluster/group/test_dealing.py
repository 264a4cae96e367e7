"""Requests dealt out, copied, lost and answered: what the driver keeps of it."""

from __future__ import annotations

import pytest

from vllm_specrollout.cluster.group.dealing import MOST_RUNS, Ask, Dealer, GroupError
from vllm_specrollout.cluster.group.messages import Call, Cancel, Here, Message, Piece, Progress, Run, Want

PROMPT = (1, 2)


def dealt(*asks: Ask, workers: tuple[str, ...] = ("a", "b"), places: int = 2) -> Dealer:
    dealer = Dealer(asks)
    for name in workers:
        dealer.take(name, Here(places))
    return dealer


def ask(name: str, **params: object) -> Ask:
    return Ask(name, PROMPT, params)


def piece(request: str, start: int, *tokens: int, finish: str = "") -> Message:
    return Progress((Piece(request, start, tokens, finish=finish),))


def test_the_emptiest_worker_gets_the_next_request_and_none_more_than_it_has_places() -> None:
    dealer = dealt(*(ask(str(i)) for i in range(6)), places=2)
    assert [(worker, run.request) for worker, run in dealer.due()] == [("a", "0"), ("b", "1"), ("a", "2"), ("b", "3")]
    assert dealer.waiting == 2 and dealer.due() == []
    dealer.take("b", piece("1", 0, 7, finish="stop"))
    assert dealer.due() == [("b", Run("4", PROMPT, {}))]


def test_a_copy_begins_where_the_answer_stands_and_the_first_to_end_is_the_answer() -> None:
    dealer = dealt(ask("r"))
    assert dealer.due() == [("a", Run("r", PROMPT, {}))]
    dealer.take("a", piece("r", 0, 5, 6))
    dealer.take("b", Want("r"))
    dealer.take("b", Want("r"))
    assert dealer.due() == [("b", Run("r", PROMPT, {}, (5, 6), is_copy=True))]
    dealer.take("b", piece("r", 2, 7, finish="length"))
    answer = dealer.answers["r"]
    assert (answer.token_ids, answer.finish_reason, answer.worker, answer.copies) == ((5, 6, 7), "length", "b", 2)
    assert dealer.due() == [("a", Cancel("r"))]
    dealer.take("a", piece("r", 2, 9))
    assert dealer.is_done and dealer.leave() == [("a", Cancel("r"))]
    dealer.take("a", piece("r", 3, 9, finish="stop"))
    assert dealer.answers["r"] is answer and dealer.leave() == []


def test_nobody_races_while_requests_wait_for_a_worker() -> None:
    dealer = dealt(ask("0"), ask("1"), workers=("a",), places=1)
    dealer.due()
    dealer.take("b", Want("0"))
    assert dealer.due() == []
    dealer.take("b", Here(1))
    assert dealer.due() == [("b", Run("1", PROMPT, {}))]


def test_what_was_told_of_a_lost_request_is_kept_and_it_is_the_next_to_be_dealt() -> None:
    dealer = dealt(ask("0"), ask("1"), ask("2"), workers=("a", "b"), places=1)
    dealer.due()
    dealer.take("a", piece("0", 0, 5, 6))
    dealer.lose("a")
    dealer.take("b", piece("1", 0, 3, finish="stop"))
    assert dealer.due() == [("b", Run("0", PROMPT, {}, (5, 6)))]
    assert dealer.resubmitted == 1
    # what the lost worker said too late is of a run that is over
    dealer.take("a", piece("0", 2, 8))
    dealer.take("b", piece("0", 2, 7, finish="stop"))
    assert dealer.answers["0"].token_ids == (5, 6, 7)


@pytest.mark.parametrize("params", [{"stop": ["a"]}, {"structured_outputs": {"regex": "a"}}])
def test_what_cannot_be_resumed_is_begun_anew(params: dict[str, object]) -> None:
    dealer = dealt(ask("r", **params), workers=("a", "b"))
    dealer.due()
    dealer.take("a", piece("r", 0, 5, 6))
    dealer.lose("a")
    assert dealer.due() == [("b", Run("r", PROMPT, params))]


def test_copies_that_differ_are_counted_and_the_answer_is_one_workers_own() -> None:
    dealer = dealt(ask("r"))
    dealer.due()
    dealer.take("b", Want("r"))
    dealer.due()
    dealer.take("a", piece("r", 0, 5, 6, 7))
    dealer.take("b", piece("r", 0, 5, 9, finish="stop"))
    assert dealer.answers["r"].token_ids == (5, 9) and dealer.disagreements == 1


def test_a_batch_that_is_given_up_is_cancelled_where_it_runs() -> None:
    dealer = dealt(ask("0"), ask("1"))
    dealer.due()
    with pytest.raises(GroupError):
        dealer.take("a", piece("0", 0, finish="error"))
    assert set(dealer.leave()) == {("a", Cancel("0")), ("b", Cancel("1"))}


# --- what does not arrive ---------------------------------------------------------------------------------------------


def called(dealer: Dealer, number: int, *workers: str) -> None:
    dealer.call(dict.fromkeys(workers, False), number)
    assert dealer.due() == [(worker, Call(number)) for worker in workers]


def test_a_request_that_a_worker_does_not_name_is_given_again() -> None:
    dealer = dealt(ask("0"), ask("1"), workers=("a",))
    first = dealer.due()
    called(dealer, 1, "a")
    dealer.take("a", Here(2, 1, ("1",)))
    assert dealer.due() == first[:1] and dealer.resubmitted == 1
    called(dealer, 2, "a")
    dealer.take("a", Here(2, 2, ("0", "1")))
    assert dealer.due() == []


def test_an_answer_to_a_call_before_the_request_says_nothing_of_it() -> None:
    dealer = Dealer([ask("r")], called=6)
    dealer.take("a", Here(1, 6))
    called_first = dealer.due()
    assert [type(message) for _, message in called_first] == [Run]
    dealer.take("a", Here(1, 5))
    dealer.take("a", Here(1, 6))
    assert dealer.due() == []
    called(dealer, 7, "a")
    dealer.take("a", Here(1, 7))
    assert dealer.due() == called_first


def test_an_answer_whose_end_was_lost_goes_on_where_it_was_told_to() -> None:
    dealer = dealt(ask("r"), workers=("a",))
    dealer.due()
    dealer.take("a", piece("r", 0, 5, 6))
    called(dealer, 1, "a")
    dealer.take("a", Here(2, 1))
    assert dealer.due() == [("a", Run("r", PROMPT, {}, (5, 6)))]


def test_behind_lost_tokens_a_request_ends_there_and_is_given_again() -> None:
    dealer = dealt(ask("r"), workers=("a",))
    dealer.due()
    dealer.take("a", piece("r", 0, 5))
    dealer.take("a", piece("r", 2, 7))
    dealer.take("a", piece("r", 3, 8, finish="stop"))
    assert dealer.due() == [("a", Cancel("r"))] and not dealer.is_done
    called(dealer, 1, "a")
    dealer.take("a", Here(2, 1, ("r",)))
    assert dealer.due() == [("a", Cancel("r"))], "it runs on: that was lost as well"
    dealer.take("a", Here(2, 1))
    assert dealer.due() == [("a", Run("r", PROMPT, {}, (5,)))]


def test_what_cannot_be_resumed_is_begun_anew_behind_lost_tokens() -> None:
    dealer = dealt(ask("r", stop=["a"]), workers=("a",))
    dealer.due()
    dealer.take("a", piece("r", 0, 5))
    called(dealer, 1, "a")
    dealer.take("a", Here(2, 1))
    assert dealer.due() == [("a", Run("r", PROMPT, {"stop": ["a"]}))]
    dealer.take("a", piece("r", 0, 5, 6, finish="stop"))
    assert dealer.answers["r"].token_ids == (5, 6)


def test_a_request_that_nobody_wants_is_cancelled_until_nobody_names_it() -> None:
    dealer = dealt(ask("r"))
    dealer.due()
    dealer.take("b", Want("r"))
    dealer.due()
    dealer.take("a", piece("r", 0, 5, finish="stop"))
    assert dealer.due() == [("b", Cancel("r"))]
    dealer.take("b", Here(2, 0, ("r", "of an old batch")))
    assert dealer.due() == [("b", Cancel("r")), ("b", Cancel("of an old batch"))]


def test_a_lost_copy_is_left_to_whoever_runs_the_request_as_well() -> None:
    dealer = dealt(ask("r"))
    dealer.due()
    dealer.take("b", Want("r"))
    dealer.due()
    called(dealer, 1, "a", "b")
    dealer.take("b", Here(2, 1))
    assert dealer.due() == [] and dealer.resubmitted == 0
    dealer.take("a", piece("r", 0, 5, finish="stop"))
    assert dealer.answers["r"].copies == 1


def test_a_request_that_never_arrives_fails_the_batch_and_is_named() -> None:
    dealer = dealt(ask("r"), workers=("a",))
    for number in range(1, MOST_RUNS):
        assert [type(message) for _, message in dealer.due()] == [Run]
        called(dealer, number, "a")
        dealer.take("a", Here(2, number))
    dealer.due()
    called(dealer, MOST_RUNS, "a")
    with pytest.raises(GroupError, match=f"request r was lost {MOST_RUNS} times"):
        dealer.take("a", Here(2, MOST_RUNS))
