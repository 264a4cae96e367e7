"""What is promised of texts: a row's spans read its problem's answers and nothing else, and no buffer ever grows."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.index_cache import ONE, weight_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import MOST_AT_ONCE, Texts
from vllm_specrollout.types import Answer, FinishReason

POISON, REACH, TILE = -7, 4, 8


class Later(Executor):
    """Runs what was submitted when told to."""

    def __init__(self):
        self.tasks = []

    def submit(self, function, /, *args, **kwargs):
        self.tasks.append(lambda: function(*args, **kwargs))
        return Future()

    def run(self):
        while self.tasks:
            self.tasks.pop(0)()


class Memory:
    """A device's memory, which does as it is told: what was never written reads as poison."""

    def __init__(self, texts):
        self.plan = texts
        self.tokens = np.full(texts.most_tokens, POISON, np.int32)
        self.spans = np.zeros((texts.most_problems, texts.past, 3), np.int32)

    def apply(self):
        """Returns the tokens written, or None where there was nothing to do."""
        before, changes = self.tiles(), self.plan.take()
        if changes is None:
            assert self.tiles() == before
            return None
        for begin, tokens in changes.pieces:
            assert tokens.dtype == np.int32 and 0 <= begin < begin + len(tokens) <= len(self.tokens)
            self.tokens[begin : begin + len(tokens)] = tokens
        assert changes.rows.dtype == np.int64 and changes.spans.dtype == np.int32
        assert (np.diff(changes.rows) > 0).all()
        self.spans[changes.rows] = changes.spans
        begins, ends = self.spans[..., 0], self.spans[..., 1]
        assert (begins >= 0).all() and (begins <= ends).all() and (ends <= len(self.tokens)).all()
        for row, (earlier, now) in enumerate(zip(before, self.tiles(), strict=True)):
            assert self.plan.tiles_of(row) >= max(earlier, now)
        return sum(len(tokens) for _, tokens in changes.pieces)

    def settle(self):
        """Until there is nothing left to read or to write."""
        executor = self.plan._executor
        while True:
            executor.run()
            if self.apply() is None and not executor.tasks:
                return self

    def tiles(self):
        places = np.maximum(self.spans[..., 1] - self.spans[..., 0] - 1, 0)
        return (-(-places // TILE)).sum(1).tolist()

    def read(self, problem_id):
        """(tokens, eighths) of the problem's texts, in their order; None: it has no row."""
        row = self.plan.row(problem_id)
        if row < 0:
            return None
        return [(tuple(self.tokens[b:e].tolist()), w) for b, e, w in self.spans[row].tolist() if e > b]

    def answers(self, problem_id):
        return [tokens for tokens, _ in self.read(problem_id)]

    def eighths(self, problem_id):
        return [weight for _, weight in self.read(problem_id)]


@pytest.fixture
def build():
    """A store, texts over it, and the memory of their device."""

    def make(answers=(), *, most_tokens=10_000, most_problems=4, past=8, **changes):
        config = HistoryConfig(**({"epochs": 2} | changes))
        store = HistoryStore(config)
        for answer in answers:
            store.append(answer)
        sizes = {"most_tokens": most_tokens, "most_problems": most_problems, "past": past}
        texts = Texts(config, store, **sizes, reach=REACH, tile=TILE, executor=Later())
        return store, texts, Memory(texts)

    return make


def whole(answer):
    """An answer behind the last tokens of its prompt."""
    return (*answer.prompt_ids.tolist()[-REACH:], *answer.token_ids.tolist())


def ends(store, texts, answer):
    texts.add(store.append(answer))


# --- what is read -----------------------------------------------------------------------------------------------------


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
    texts.want("p")
    memory.settle()
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


def test_without_siblings_answers_of_the_present_epoch_do_not_draft_until_it_is_over(build, make_answer):
    store, texts, memory = build([make_answer("a")], siblings=False)
    store.begin_epoch()
    texts.want("p")
    ends(store, texts, make_answer("b", epoch=1))
    memory.settle()
    assert memory.answers("p") == [whole(make_answer("a"))]
    store.begin_epoch()
    memory.apply()
    assert memory.eighths("p") == [-16, -8]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_say_how_old_an_answer_is_and_how_good(build, make_answer):
    store, texts, memory = build([make_answer("old"), make_answer("good")])
    store.report_reward("good", 3.0)
    store.begin_epoch()
    texts.want("p")
    ends(store, texts, make_answer("new", epoch=1))
    memory.settle()
    assert memory.eighths("p") == [-8, 8, 0]


def test_a_reward_reaches_what_is_there_without_a_token_being_written(build, make_answer):
    _, texts, memory = build([make_answer("a"), make_answer("b")])
    texts.want("p")
    memory.settle()
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


def test_with_decay_0_older_answers_do_not_draft(build, make_answer):
    store, texts, memory = build([make_answer("a")], decay=0.0)
    texts.want("p")
    memory.settle()
    assert memory.eighths("p") == [0]
    store.begin_epoch()
    memory.apply()
    assert memory.eighths("p") == []


@pytest.mark.parametrize("is_running", [False, True])
def test_behind_a_jump_of_the_epoch_answers_weigh_as_the_oldest_that_draft(build, make_answer, is_running):
    store, texts, memory = build([make_answer("a")], decay=0.5)
    texts.want("p")
    memory.settle()
    if not is_running:
        texts.done("p")
    store.begin_epoch(1_000_000)
    texts.want("p")
    assert memory.settle().eighths("p") == [-16]


def test_a_new_epoch_weighs_anew_what_is_in_use_and_drops_what_is_not(build, make_answer):
    store, texts, memory = build([make_answer("a"), make_answer("b", problem_id="q")])
    texts.want("p")
    texts.want("q")
    memory.settle()
    row = texts.row("q")
    texts.done("q")
    store.begin_epoch()
    assert memory.apply() == 0
    assert memory.eighths("p") == [-8] and texts.row("q") == -1 and not memory.spans[row].any()
    texts.want("q")
    assert memory.settle().eighths("q") == [-8]


def test_what_is_too_old_goes_from_rows_in_use_and_is_not_taken_over_either(build, make_answer):
    store, texts, memory = build([make_answer("a")], epochs=0)
    texts.want("p")
    memory.settle()
    texts.want("q")
    store.append(make_answer("b", problem_id="q"))
    memory.apply()
    texts._executor.run()
    store.begin_epoch()
    memory.settle()
    assert memory.answers("p") == memory.answers("q") == []


# --- room -------------------------------------------------------------------------------------------------------------


def test_rows_of_running_problems_are_never_given_away_and_the_least_recently_used_goes_first(build, make_answer):
    _, texts, memory = build([make_answer("a")], most_problems=2)
    for problem in ("p", "q"):
        texts.want(problem)
    memory.settle()
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
    texts.want("p")
    memory.settle()
    for name in "abc":
        ends(store, texts, make_answer(name))
    texts.set_reward("a", 1.0)
    ends(store, texts, make_answer("d"))
    memory.settle()
    assert memory.answers("p") == [whole(make_answer(name)) for name in "acd"]
    assert texts.stats().evicted == 1


def test_what_comes_overwrites_what_came_first_whose_span_is_gone_by_then(build, make_answer):
    store, texts, memory = build(most_tokens=200, past=64)
    for problem in ("p", "q"):
        texts.want(problem)
    memory.settle()
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
    texts.want("q")
    memory.settle()
    texts.done("q")
    texts.want("p")
    for number in range(8):
        ends(store, texts, make_answer(str(number)))
        memory.settle()
    assert memory.answers("q") == []
    texts.want("q")
    assert memory.settle().answers("q") == [whole(make_answer("a", problem_id="q"))]


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


# --- faults -----------------------------------------------------------------------------------------------------------


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
    texts.want("p")
    assert len(memory.settle().answers("p")) == 2


def test_a_disk_that_stands_still_holds_nobody_up(make_answer):
    config = HistoryConfig()
    store, pool, go_on = HistoryStore(config), ThreadPoolExecutor(1), threading.Event()
    store.append(make_answer("a"))
    find = store.find
    store.find = lambda problem: (go_on.wait(), find(problem))[1]
    texts = Texts(config, store, most_tokens=1000, most_problems=4, past=4, reach=REACH, tile=TILE, executor=pool)
    memory = Memory(texts)
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
    texts.want("p11")
    assert len(memory.settle().answers("p11")) == 1


def test_closing_gives_up_what_is_to_be_read(build):
    _, texts, _ = build(most_problems=20)
    for number in range(20):
        texts.want(f"p{number}")
    texts.close()
    texts.close()
    assert texts.stats().reading == 8 and texts.take() is None


# --- against what it is to be -----------------------------------------------------------------------------------------

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


@given(
    STEPS,
    st.fixed_dictionaries(
        {
            "epochs": st.integers(1, 2),
            "siblings": st.booleans(),
            "decay": st.sampled_from([0.0, 0.5]),
            "reward_weight": st.sampled_from([1.0, 255.0]),
        }
    ),
    st.sampled_from([61, 203, 1 << 16]),
    st.sampled_from([(1, 1), (2, 3), (4, 64)]),
)
def test_every_span_reads_an_answer_that_drafts_whatever_happens(steps, changes, most_tokens, sizes):
    config = HistoryConfig(**changes)
    store = HistoryStore(config)
    (most_problems, past), later = sizes, Later()
    texts = Texts(
        config,
        store,
        most_problems=most_problems,
        past=past,
        most_tokens=most_tokens,
        reach=REACH,
        tile=TILE,
        executor=later,
    )
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
