"""Whose answer a request's is, by what its tokens show."""

import pickle
import random

import pytest

from vllm_specrollout.history import problems
from vllm_specrollout.history.problems import Attribution, Problems, prompt_hash

PROMPT = [5, 6, 7, 8]
ANSWER = [11, 12, 13, 14, 15]


@pytest.fixture
def known() -> Problems:
    return Problems()


def answered(known: Problems, prompt: list[int] = PROMPT, answer: list[int] = ANSWER, **options: str) -> str:
    """A request that came and is over; returns its problem."""
    found = known.arrive("first", prompt, list(answer[:0]), **options)
    known._running["first"].live["first"] = answer
    known.end("first")
    return found.problem_id


def test_equal_prompts_are_one_problem_and_a_clients_id_goes_first(known):
    assert known.arrive("a", PROMPT) == known.arrive("b", list(PROMPT)) == Attribution(prompt_hash(PROMPT))
    assert known.arrive("c", [5, 6, 7]).problem_id == prompt_hash([5, 6, 7])
    assert known.arrive("d", PROMPT, given="aime-7") == Attribution("aime-7")
    # whoever sends the prompt alone means the same problem
    assert known.arrive("e", PROMPT) == Attribution("aime-7")
    assert known.arrive("f", None) == known.arrive("g", []) == Attribution("")
    assert known.arrive("h", None, given="mine") == Attribution("mine")


@pytest.mark.parametrize("count", range(1, len(ANSWER) + 1))
def test_a_prompt_that_ends_with_part_of_an_interrupted_answer_is_the_old_problem(known, count):
    problem = answered(known)
    assert known.arrive("again", PROMPT + ANSWER[:count]) == Attribution(problem, continues=True)
    # and so are its siblings, of which all have the longer prompt
    assert known.arrive("sibling", PROMPT + ANSWER[:count]) == Attribution(problem, continues=True)


def test_a_running_answer_counts_as_it_stands():
    known, answer = Problems(), []
    problem = known.arrive("live", PROMPT, answer).problem_id
    assert not known.arrive("early", PROMPT + ANSWER[:2]).continues, "it has no token yet"
    answer += ANSWER
    assert known.arrive("again", PROMPT + ANSWER[:4]) == Attribution(problem, continues=True)


@pytest.mark.parametrize("end", [ANSWER, ANSWER[:-1]], ids=["whole", "its last token replaced by the template"])
def test_the_next_turn_of_a_conversation_is_the_old_problem(known, end):
    problem = answered(known)
    turn = [*PROMPT, *end, 90, 91, 92]
    assert known.arrive("second", turn) == Attribution(problem, continues=True)
    known._running["second"].live["second"] = [21, 22, 23]
    known.end("second")
    assert known.arrive("third", [*turn, 21, 22, 23, 80]) == Attribution(problem, continues=True)


@pytest.mark.parametrize("rest", [[12, 13], [11, 13], [90], [*ANSWER[:3], 90, 91]])
def test_a_longer_prompt_that_goes_on_otherwise_is_a_problem_of_its_own(known, rest):
    answered(known)
    assert known.arrive("other", PROMPT + rest) == Attribution(prompt_hash(PROMPT + rest))


def test_the_longest_known_prompt_is_the_one_that_is_gone_on_from(known):
    short = answered(known, PROMPT, [11, 12, 13, 50, 51])
    long = answered(known, [*PROMPT, 11, 12], [13, 50, 52], given="long")
    assert short != long
    assert known.arrive("a", [*PROMPT, 11, 12, 13, 50]).problem_id == long
    assert known.arrive("b", [*PROMPT, 11, 12, 13, 50, 51]).problem_id == short


def test_a_session_says_what_tokens_do_not(known):
    problem = known.arrive("a", PROMPT, session_id="s").problem_id
    # its first turn, told in other words
    assert known.arrive("b", [7, 7, 7, 7, 7], session_id="s") == Attribution(problem, continues=True)
    assert not known.arrive("c", [7, 7, 7, 7, 7, 7], session_id="t").continues
    assert known.arrive("d", [8, 8], given="mine", session_id="s") == Attribution("mine")


def test_requests_of_another_salt_share_no_problem_unless_they_name_it(known):
    plain, one, other = (
        [
            answered(known, PROMPT, ANSWER, salt=salt, session_id="s"),
            answered(known, [*PROMPT, *ANSWER, 1], ANSWER, salt=salt),
            answered(known, [7, 7, 7], ANSWER, salt=salt, session_id="s"),
            answered(known, [8, 8, 8], ANSWER, salt=salt, given="mine"),
        ]
        for salt in ("", "one", "other")
    )
    # each goes on from its own prompt, and its own session
    for of_salt in (plain, one, other):
        assert of_salt == [of_salt[0]] * 3 + ["mine"]
    assert plain[0] == prompt_hash(PROMPT) and len({plain[0], one[0], other[0]}) == 3
    assert answered(Problems(), PROMPT, ANSWER, salt="one") == one[0]


def test_adapters_share_a_problem_only_where_the_client_names_one(known):
    plain, one, other = (
        [answered(known, PROMPT, ANSWER, adapter=name), answered(known, [8, 8], ANSWER, adapter=name, given="mine")]
        for name in ("", "one", "other")
    )
    assert len({plain[0], one[0], other[0]}) == 3
    assert plain[1] == one[1] == other[1] == "mine"
    assert known.arrive("a", [*PROMPT, *ANSWER[:2]], adapter="one") == Attribution(one[0], continues=True)


def test_adapters_whose_names_differ_in_digits_alone_are_one_line_of_policies(known):
    found = {answered(known, adapter=name) for name in ("policy-17", "policy-18", "policy-2026")}
    assert len(found) == 1
    assert known.arrive("a", [*PROMPT, *ANSWER[:2]], adapter="policy-19") == Attribution(found.pop(), continues=True)
    others = ("policy", "policy-17b", "policy-17-18", "critic-17", "", "17")
    assert len({answered(known, adapter=name) for name in (*others, "policy-1")}) == len(others) + 1


def test_a_salt_and_an_adapter_do_not_run_together():
    names = [("ab", ""), ("a", "b"), ("", "ab"), ("1:a", ""), ("", "1:a")]
    assert len({answered(Problems(), PROMPT, ANSWER, salt=a, adapter=b) for a, b in names}) == len(names)


def test_names_that_clients_choose_are_not_kept_whatever_their_length():
    known, long = Problems(), "x\ud800" * 100_000
    name = answered(known, PROMPT, ANSWER, salt=long, adapter=long, session_id=long)
    assert answered(known, [7, 7], ANSWER, salt=long, adapter=long, session_id=long) == name != prompt_hash(PROMPT)
    assert len(pickle.dumps((known._by_key, known._sessions, known._prompts))) < 10_000


def test_what_was_begun_elsewhere_goes_on_and_ids_may_come_again(known):
    assert known.arrive("a", PROMPT, [1, 2]) == Attribution(prompt_hash(PROMPT), continues=True)
    assert known.arrive("a", [9, 9], []) == Attribution(prompt_hash([9, 9]))
    known.end("a")
    known.end("a")
    assert known.arrive("b", [*PROMPT, 1]) == Attribution(prompt_hash(PROMPT), continues=True)


def test_memory_stays_bounded_and_the_oldest_goes_first():
    known = Problems(most_prompts=8, most_tokens=4 * (problems._EACH + 5))
    known.arrive("stays", [1, 1, 1])
    for number in range(30):
        answered(known, [*PROMPT, number], ANSWER, session_id=f"{number}")
    assert len(known) == 8 and len(known._by_key) == 8 and len(known._sessions) == 8
    assert known.num_tokens == 4 * (problems._EACH + 5) and sum(known._lengths.values()) == 8
    assert known._sorted_lengths == [3, 5]
    assert known.arrive("a", [*PROMPT, 29, *ANSWER]).continues
    assert not known.arrive("b", [*PROMPT, 25, *ANSWER]).continues, "its answer is forgotten"
    assert known.arrive("c", [1, 1, 1]) == Attribution(prompt_hash([1, 1, 1]))


def test_more_prompts_than_are_remembered_may_run_at_once():
    known = Problems(most_prompts=4)
    problems_of = [known.arrive(f"{number}", [number, 1, 2], []).problem_id for number in range(12)]
    assert problems_of == [prompt_hash([number, 1, 2]) for number in range(12)] and len(known) == 12
    # of those, none was forgotten: a sibling is of the same problem, and so is whoever goes on
    known._running["0"].live["0"] += ANSWER
    assert known.arrive("again", [0, 1, 2, *ANSWER[:3]]) == Attribution(problems_of[0], continues=True)
    for number in range(12):
        known.end(f"{number}")
    assert len(known) == 4 == len(known._by_key) == sum(known._lengths.values()), "the longer one runs"
    known.end("again")
    assert len(known) == 4 == len(known._idle) and not known._running
    assert not known.arrive("0", [0, 1, 2], []).continues, "the first to end was the first to go"


def test_any_order_of_coming_and_ending_keeps_the_limit_and_loses_none_that_runs():
    chance = random.Random(3)
    known, running = Problems(most_prompts=5, most_tokens=1000), {}
    for number in range(3000):
        if running and chance.random() < 0.5:
            known.end(chance.choice([*running]))
            running = {name: prompt for name, prompt in running.items() if name in known._running}
        else:
            prompt = [chance.randrange(30)] * chance.randrange(1, 4)
            running[f"{number}"] = prompt_hash(prompt)
            known.arrive(f"{number}", prompt, [1, 2][: chance.randrange(3)], given=chance.choice(["", "mine"]))
        names = set(running.values())
        assert names <= known._prompts.keys() and not names & known._idle.keys()
        assert known._prompts.keys() == names | known._idle.keys()
        assert len(known) <= max(5, len(names)) and len(known._by_key) == len(known) == sum(known._lengths.values())


def test_an_arrival_is_compared_with_a_limited_number_of_answers_the_latest_first(monkeypatch):
    compared = []
    goes_on = problems._goes_on
    monkeypatch.setattr(problems, "_goes_on", lambda rest, answer: compared.append(answer) or goes_on(rest, answer))
    known, most = Problems(), problems.MOST_COMPARED
    prompts = [PROMPT, [*PROMPT, 11], [*PROMPT, 11, 12]]
    for prompt in prompts:
        for number in range(2 * most):
            answered(known, prompt, [11, 12, 100 + number])
            known.arrive(f"{len(prompt)} waits {number}", prompt, [])
    compared.clear()
    assert known.arrive("late", [*PROMPT, 11, 12, 11, 12, 100 + 2 * most - 1]).continues, "the last that ended"
    assert len(compared) == 1
    compared.clear()
    assert not known.arrive("other", [*PROMPT, 11, 12, 11, 13, 14]).continues
    assert len(compared) == 2 * most
    compared.clear()
    # a prompt with few answers leaves room for what it goes on from itself
    answered(known, [*PROMPT, 11, 12, 13], [14])
    assert known.arrive("more", [*PROMPT, 11, 12, 13, 15, 16]).problem_id == prompt_hash([*PROMPT, 11, 12, 13, 15, 16])
    assert len(compared) <= 4 * most


def test_equal_words_are_looked_at_again(monkeypatch):
    monkeypatch.setattr(problems, "_words_of", lambda tokens: tokens.astype("uint64") * 0)
    known = Problems()
    answered(known)
    assert not known.arrive("other", [4, 3, 2, 1, *ANSWER]).continues
    assert known.arrive("again", [*PROMPT, *ANSWER]).continues
