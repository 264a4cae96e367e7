"""What is promised of texts: a row's spans read its problem's answers and nothing else, and no buffer ever grows."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.history.texts_device import REACH, TILE, Later, Memory, ends, whole
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.index_cache import ONE, weight_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import MOST_AT_ONCE, Texts
from vllm_specrollout.types import Answer, FinishReason


@pytest.fixture
def build():
    """A store, texts over it, and the memory of their device."""

    def make(answers=(), *, most_tokens=10_000, most_problems=4, past=8, executor=None, **changes):
        config = HistoryConfig(**changes)
        store = HistoryStore(config)
        for answer in answers:
            store.append(answer)
        sizes = {"most_tokens": most_tokens, "most_problems": most_problems, "past": past}
        texts = Texts(config, store, **sizes, reach=REACH, tile=TILE, executor=executor or Later())
        return store, texts, Memory(texts)

    return make


def test_a_problems_answers_are_read_behind_the_ends_of_their_prompts_once_it_is_wanted(build, make_answer):
    mine = [make_answer("a"), make_answer("b")]
    _, texts, memory = build([*mine, make_answer("c", problem_id="q")])
    assert texts.row("p") == -1
    texts.want("p")
    assert texts.row("p") >= 0 and memory.apply() is None, "nothing has been read yet"
    memory.settle()
    assert memory.answers("p") == [whole(answer) for answer in mine]
    assert memory.eighths("p") == [0, 0] and texts.row("q") == -1
    texts.want("p")
    assert not texts._executor.tasks


def test_of_more_answers_than_a_row_holds_the_nearest_are_read_the_newest_last(build, make_answer):
    old = [make_answer(f"o{number}", epoch=0) for number in range(5)]
    store, texts, memory = build(old, past=4)
    store.begin_epoch()
    new = [make_answer(f"n{number}", epoch=1) for number in range(2)]
    for answer in new:
        store.append(answer)
    memory.want("p")
    assert memory.answers("p") == [whole(answer) for answer in [*old[-2:], *new]]
    assert memory.eighths("p") == [-8, -8, 0, 0]


def test_an_answer_that_ends_is_there_at_the_next_step_and_one_found_in_the_store_too_is_there_once(build, make_answer):
    store, texts, memory = build()
    texts.want("p")
    ends(store, texts, make_answer("a"))
    memory.apply()
    assert memory.answers("p") == [whole(make_answer("a"))]
    memory.settle()
    assert len(memory.answers("p")) == 1


def test_answers_of_one_name_in_two_epochs_are_two(build, make_answer):
    store, texts, memory = build([make_answer("a", count=5)])
    store.begin_epoch()
    texts.want("p")
    ends(store, texts, make_answer("a", epoch=1, count=6))
    memory.settle()
    texts.set_reward("a", 1.0)
    memory.apply()
    assert memory.eighths("p") == [-8, 8]


def test_a_reward_reaches_what_is_there_without_a_token_being_written(build, make_answer):
    _, texts, memory = build([make_answer("a"), make_answer("b")])
    memory.want("p")
    texts.set_reward("a", 1.0)
    texts.set_reward("nobody", 1.0)
    assert memory.apply() == 0 and memory.eighths("p") == [8, 0]


def test_a_reward_that_comes_while_its_answer_is_handed_over_counts(build, make_answer):
    store, texts, memory = build([make_answer("a")])
    texts.want("p")
    texts._executor.run()
    store.report_reward("a", 1.0)
    texts.set_reward("a", 1.0)
    assert memory.settle().eighths("p") == [8]


def test_a_new_epoch_weighs_anew_what_is_in_use_and_drops_what_is_not(build, make_answer):
    store, texts, memory = build([make_answer("a"), make_answer("b", problem_id="q")])
    memory.want("p", "q")
    row = texts.row("q")
    texts.done("q")
    store.begin_epoch()
    assert memory.apply() == 0
    assert memory.eighths("p") == [-8] and texts.row("q") == -1 and not memory.spans[row].any()
    assert memory.want("q").eighths("q") == [-8]


def test_rows_of_running_problems_are_never_given_away_and_the_least_recently_used_goes_first(build, make_answer):
    _, texts, memory = build([make_answer("a")], most_problems=2)
    memory.want("p", "q")
    rows = texts.row("p"), texts.row("q")
    texts.want("r")
    assert texts.row("r") == -1 and (texts.row("p"), texts.row("q")) == rows
    texts.done("p")
    texts.want("r")
    assert texts.row("r") == rows[0] and texts.row("p") == -1
    memory.apply()
    assert memory.answers("r") == []
    for _ in range(2):
        texts.done("r")
    texts.done("q")
    texts.want("p")
    assert texts.row("p") == rows[1], "q was wanted before r"


def test_a_problem_that_got_no_row_is_counted_on_until_its_requests_are_over(build):
    _, texts, _ = build(most_problems=1)
    texts.want("p")
    texts.want("q")
    texts.done("p")
    texts.want("q")
    texts.done("q")
    texts.want("p")
    assert (texts.row("q"), texts.row("p")) == (0, -1), "a request of q still runs"
    texts.done("p")
    assert set(texts._problems) == {"q"}


def test_where_a_row_is_full_the_lowest_weight_goes_and_then_the_oldest(build, make_answer):
    store, texts, memory = build(past=3)
    memory.want("p")
    for name in "abc":
        ends(store, texts, make_answer(name))
    texts.set_reward("a", 1.0)
    ends(store, texts, make_answer("d"))
    memory.settle()
    assert memory.answers("p") == [whole(make_answer(name)) for name in "acd"]
    assert texts.stats().evicted == 1


def test_what_comes_overwrites_what_came_first_whose_span_is_gone_by_then(build, make_answer):
    store, texts, memory = build(most_tokens=200, past=64)
    memory.want("p", "q")
    known = []
    for number in range(300):
        answer = make_answer(str(number), problem_id="pq"[number % 2], count=5 + number * 7 % 11)
        ends(store, texts, answer)
        memory.apply()
        known.append(whole(answer))
        shown = {*memory.answers("p"), *memory.answers("q")}
        # of the ring, a text's length may be left out at its end, and a second one be overwritten by a token
        assert shown == set(known[-len(shown) :]) and len(shown) == texts.stats().texts
        assert sum(map(len, known)) <= 150 or 150 < sum(map(len, shown)) == texts.stats().tokens <= 200


def test_a_problem_that_lost_answers_while_nobody_asked_has_them_read_again(build, make_answer):
    store, texts, memory = build([make_answer("a", problem_id="q")], most_tokens=200)
    memory.want("q")
    texts.done("q")
    texts.want("p")
    for number in range(8):
        ends(store, texts, make_answer(str(number)))
        memory.settle()
    assert memory.answers("q") == []
    assert memory.want("q").answers("q") == [whole(make_answer("a", problem_id="q"))]


def test_of_a_text_too_long_for_the_buffer_its_last_part_is_kept(build, make_answer):
    store, texts, memory = build([make_answer("a", count=100)], most_tokens=320)
    texts.want("p")
    ends(store, texts, make_answer("b", count=37))
    memory.settle()
    assert memory.answers("p") == [whole(make_answer("a", count=100))[-40:], whole(make_answer("b", count=37))[-40:]]
    assert texts.stats().shortened == 2


def test_a_text_with_no_place_in_it_is_left_out(build, make_answer):
    store, texts, memory = build()
    texts.want("p")
    nothing = np.zeros(0, np.int32)
    ends(store, texts, make_answer("a", count=1, prompt_ids=nothing))
    assert memory.settle().answers("p") == []


def test_a_call_hands_out_a_bounded_number_of_tokens_and_the_next_ones_the_rest(build, make_answer):
    answers = [make_answer(str(number), count=100_000) for number in range(6)]
    _, texts, memory = build(answers, most_tokens=1 << 20, max_mib=8)
    texts.want("p")
    texts._executor.run()
    written = list(iter(memory.apply, None))
    assert len(written) == 3 and max(written) <= MOST_AT_ONCE and len(memory.answers("p")) == 6


def test_what_is_read_waits_until_there_is_room_for_it_to_wait(build, make_answer):
    answers = [make_answer(str(number), problem_id=f"p{number % 40}") for number in range(400)]
    _, texts, memory = build(answers, most_problems=40, most_tokens=100_000)
    for number in range(40):
        texts.want(f"p{number}")
    while texts.stats().reading:
        assert len(texts._executor.tasks) <= 8
        texts._executor.run()
        memory.apply()
        assert texts.stats().waiting <= 8 * 8
    memory.settle()
    assert all(len(memory.answers(f"p{number}")) == 8 for number in range(40))


@pytest.mark.parametrize(("most_problems", "past"), [(64, 16), (100_000, 255)])
def test_the_buffer_and_the_spans_take_what_the_configuration_says_together(most_problems, past):
    config = HistoryConfig(max_mib=1)
    texts = Texts(config, HistoryStore(config), most_problems=most_problems, past=past, executor=Later())
    spans = 12 * texts.most_problems * past
    assert 4 * texts.most_tokens + spans == texts.stats().num_bytes <= 1 << 20
    assert spans <= 1 << 19 and texts.most_problems > 0


def test_a_million_answers_leave_no_more_behind_than_rows_hold():
    config = HistoryConfig(max_mib=1)
    store = SimpleNamespace(epoch=0, oldest=0, find=lambda _: [])
    later = Later()
    texts = Texts(config, store, most_problems=64, past=8, most_tokens=4096, executor=later)
    tokens, nothing = np.arange(3, dtype=np.int32), np.zeros(0, np.int32)
    for number in range(1_000_000):
        problem = f"p{number % 1000}"
        if not number % 10:
            texts.want(problem)
            texts.done(f"p{(number - 100) % 1000}" if number >= 100 else "nobody")
        texts.add(Answer(f"r{number}", f"p{number % 1000 // 10 * 10}", nothing, tokens, FinishReason.FINISHED, 0))
        if not number % 10:
            later.run()
            texts.take()
    stats = texts.stats()
    assert stats.evicted > 500_000 and stats.tokens <= 4096 and stats.reading <= 64
    held = (texts._named, texts._ring, texts._waiting, texts._unread, texts._problems, texts._dirty, texts._free)
    assert all(len(one) <= 64 * 8 for one in held) and sum(len(one.texts) for one in texts._problems.values()) <= 512


@pytest.mark.parametrize("what", ["find", "read"])
def test_a_store_that_fails_costs_earlier_answers_alone_and_is_asked_again(build, make_answer, caplog, what):
    store, texts, memory = build([make_answer("a")])
    works = getattr(store, what)

    def fail(*_):
        raise RuntimeError("broken")

    setattr(store, what, fail)
    texts.want("p")
    ends(store, texts, make_answer("b"))
    assert memory.settle().answers("p") == [whole(make_answer("b"))]
    assert texts.stats().given_up == 1 and "could not be read" in caplog.text
    setattr(store, what, works)
    assert len(memory.want("p").answers("p")) == 2


def test_a_disk_that_stands_still_holds_nobody_up(build, make_answer):
    pool, go_on = ThreadPoolExecutor(1), threading.Event()
    store, texts, memory = build([make_answer("a")], executor=pool)
    find = store.find
    store.find = lambda problem: (go_on.wait(), find(problem))[1]
    texts.want("p")
    texts.add(make_answer("b"))
    memory.apply()
    assert memory.answers("p") == [whole(make_answer("b"))] and texts.stats().reading == 1
    for number in range(1000):
        texts.want(f"q{number}")
        texts.done(f"q{number}")
        texts.take()
    assert texts.stats().reading <= 8 + 4
    go_on.set()
    pool.shutdown(wait=True)
    memory.apply()
    assert len(memory.answers("p")) == 2


def test_a_problem_whose_requests_are_over_is_not_read(build, make_answer):
    _, texts, memory = build([make_answer("a", problem_id=f"p{number}") for number in range(12)], most_problems=12)
    for number in range(12):
        texts.want(f"p{number}")
    for number in range(12):
        texts.done(f"p{number}")
    memory.settle()
    assert texts.stats().texts == 8, "the first ones were being read"
    assert len(memory.want("p11").answers("p11")) == 1


def test_closing_gives_up_what_is_to_be_read(build):
    _, texts, _ = build(most_problems=20)
    for number in range(20):
        texts.want(f"p{number}")
    texts.close()
    texts.close()
    assert texts.stats().reading == 8 and texts.take() is None


PROBLEMS = "pqrs"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.sampled_from(PROBLEMS)),
        *[st.tuples(st.just("end"), st.integers(0, 99), st.integers(1, 40), st.booleans())] * 4,
        st.tuples(st.just("abort"), st.integers(0, 99)),
        st.tuples(st.just("reward"), st.integers(0, 99), st.sampled_from([-1.0, 0.0, 1.0, 7.0])),
        st.tuples(st.just("epoch"), st.integers(1, 3)),
        st.tuples(st.just("read")),
        *[st.tuples(st.just("take"))] * 2,
    ),
    # long enough for the buffer to be gone round
    min_size=25,
    max_size=75,
)


class Naive:
    """Requests that come and go, and all answers there ever were: problem -> [(tokens, epoch, name)]."""

    def __init__(self, texts, store, config):
        self.texts, self.store, self.config = texts, store, config
        self.memory = Memory(texts)
        self.answers = {problem: [] for problem in PROBLEMS}
        self.rewards, self.names = {}, []
        # (problem, epoch, row) of running requests
        self.running = []
        self.oldest = 0

    def want(self, problem):
        self.texts.want(problem)
        self.running.append((problem, self.store.epoch))

    def end(self, which, count, has_long_prompt):
        if not self.running:
            self.want(PROBLEMS[which % len(PROBLEMS)])
        problem, epoch = self.running.pop(which % len(self.running))
        name = f"r{len(self.names)}"
        self.names.append(name)
        rng = np.random.default_rng(len(self.names))
        tokens, tail = (
            rng.integers(0, 1 << 30, size).astype(np.int32) for size in (count, 9 if has_long_prompt else 2)
        )
        answer = Answer(name, problem, tail, tokens, FinishReason.FINISHED, 0, epoch=epoch)
        ends(self.store, self.texts, answer)
        self.texts.done(problem)
        # one that outlived its epoch may be older than what drafted so far
        self.oldest = min(self.oldest, self.store.oldest)
        self.answers[problem].append((whole(answer)[-self.texts._longest :], epoch, name))

    def abort(self, which):
        if self.running:
            self.texts.done(self.running.pop(which % len(self.running))[0])

    def reward(self, which, reward):
        name = self.names[which % len(self.names)] if self.names else "nobody"
        if self.store.report_reward(name, reward).value != "unknown":
            self.rewards[name] = reward
            self.texts.set_reward(name, reward)

    def epoch(self, ahead):
        self.store.begin_epoch(self.store.epoch + ahead)
        self.oldest = self.store.oldest

    def read(self):
        self.texts._executor.run()

    def take(self):
        self.memory.apply()
        for problem in PROBLEMS:
            shown = self.memory.read(problem)
            assert shown is None or set(shown) <= set(self.drafting(problem, self.oldest))
            assert shown is None or len(set(shown)) == len(shown)

    def drafting(self, problem, oldest):
        """(tokens, eighths) of the problem's answers that may draft now."""
        now, config = self.store.epoch, self.config
        found = []
        for tokens, epoch, name in self.answers[problem]:
            weight = weight_of(config, min(now - epoch, config.epochs), self.rewards.get(name))
            if epoch >= oldest and len(tokens) > 1 and weight and (config.siblings or epoch != now):
                found.append((tokens, round(8 * math.log2(weight / ONE))))
        return found


CONFIGS = st.builds(
    HistoryConfig,
    epochs=st.integers(1, 2),
    siblings=st.booleans(),
    decay=st.sampled_from([0.0, 0.5]),
    reward_weight=st.sampled_from([1.0, 255.0]),
)


@given(STEPS, CONFIGS, st.sampled_from([61, 203, 1 << 16]), st.sampled_from([(1, 1), (2, 3), (4, 64)]))
def test_every_span_reads_an_answer_that_drafts_whatever_happens(steps, config, most_tokens, sizes):
    store = HistoryStore(config)
    most_problems, past = sizes
    room = {"most_problems": most_problems, "past": past, "most_tokens": most_tokens}
    texts = Texts(config, store, **room, reach=REACH, tile=TILE, executor=Later())
    naive = Naive(texts, store, config)
    rows = dict[str, int]()
    for name, *arguments in steps:
        getattr(naive, name)(*arguments)
        running = {problem for problem, _ in naive.running}
        rows = {problem: row for problem, row in rows.items() if problem in running}
        assert all(texts.row(problem) == row for problem, row in rows.items())
        rows |= {problem: texts.row(problem) for problem in running if texts.row(problem) >= 0}
        assert len(set(rows.values())) == len(rows)
        stats = texts.stats()
        assert stats.tokens <= most_tokens and stats.texts <= most_problems * past
    naive.memory.settle()
    naive.take()
    if most_tokens == 1 << 16 and past == 64:
        # where there is room for all of it, all of it is there
        for problem in {problem for problem, _ in naive.running}:
            assert set(naive.drafting(problem, store.oldest)) <= set(naive.memory.read(problem))
    store.close()
