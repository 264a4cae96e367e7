"""What is promised of the index cache: indices of what is wanted, never more of them than memory allows."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.history.texts_device import Later
from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.index_cache import MOST, ONE, IndexCache, weight_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason

BYTES_PER_TOKEN = 100
REWARDS = st.none() | st.floats(-1e300, 1e300)


class NaiveIndex:
    """Remembers what it was given. All that live are counted, with the most bytes they ever had together."""

    alive: dict[int, int] = {}
    most = 0
    lock = threading.Lock()

    def __init__(self):
        self.documents = {}
        self.prompts = []
        self.next = 0
        self._count()

    @property
    def nbytes(self):
        return 64 + BYTES_PER_TOKEN * sum(len(tokens) for tokens, _, _ in self.documents.values())

    def add(self, token_ids, weight, epoch):
        self.documents[self.next] = [token_ids.tolist(), weight, epoch]
        self.next += 1
        self._count()
        return self.next - 1

    def grow(self, num_tokens):
        self.add(np.zeros(num_tokens, np.int32), ONE, 0)

    def set_weight(self, document, weight):
        self.documents[document][1] = weight

    def set_prompt(self, token_ids):
        self.prompts.append(token_ids.tolist())

    def remove(self, document):
        del self.documents[document]

    def weights(self):
        return [weight for _, weight, _ in self.documents.values()]

    def _count(self):
        with NaiveIndex.lock:
            NaiveIndex.alive[id(self)] = self.nbytes
            NaiveIndex.most = max(NaiveIndex.most, sum(NaiveIndex.alive.values()))

    def __del__(self):
        with NaiveIndex.lock:
            NaiveIndex.alive.pop(id(self), None)


@pytest.fixture(autouse=True)
def fresh_count():
    NaiveIndex.alive, NaiveIndex.most = {}, 0


@pytest.fixture
def later():
    return Later()


@pytest.fixture
def build(later):
    """A store and a cache over it."""

    def make(answers=(), index=NaiveIndex, pool=later, **changes):
        config = HistoryConfig(**changes)
        store = HistoryStore(config)
        for answer in answers:
            store.append(answer)
        return store, IndexCache(config, store, index, pool)

    return make


def wanted(cache, *problems):
    """The index of the last one, once all are built."""
    for problem in problems:
        cache.want(problem)
    cache._executor.run()
    return cache.get(problems[-1])


def tokens_in(index):
    return [tokens for tokens, _, _ in index.documents.values()]


@pytest.mark.parametrize("is_running", [False, True])
def test_behind_a_jump_of_the_epoch_answers_weigh_as_the_oldest_that_draft(build, make_answer, is_running):
    store, cache = build([make_answer("a")], decay=0.5)
    wanted(cache, "p")
    if not is_running:
        cache.done("p")
    store.begin_epoch(1_000_000)
    assert wanted(cache, "p").weights() == [ONE // 4]


def test_an_index_is_built_once_from_its_problems_answers_when_it_is_wanted(build, later, make_answer):
    mine = [make_answer("a"), make_answer("b")]
    _, cache = build([*mine, make_answer("c", problem_id="q")])
    assert cache.get("p") is None
    cache.want("p")
    cache.want("p")
    assert cache.get("p") is None, "it is being built"
    later.run()
    cache.want("p")
    assert tokens_in(cache.get("p")) == [answer.token_ids.tolist() for answer in mine]
    assert cache.get("p").prompts == [answer.prompt_ids.tolist() for answer in mine]
    assert cache.get("q") is None
    assert (cache.stats().built, cache.stats().indices, cache.stats().building) == (1, 1, 0) and not later.tasks


def test_weights_say_how_old_an_answer_is_and_how_good(build, make_answer):
    store, cache = build([make_answer("old", epoch=0), make_answer("good", epoch=0)])
    store.report_reward("good", 1.0)
    store.begin_epoch()
    store.append(make_answer("new", epoch=1))
    assert wanted(cache, "p").weights() == [ONE // 2, ONE, ONE]


def test_a_reward_reaches_an_index_that_stands(build, make_answer):
    _, cache = build([make_answer("a")])
    index = wanted(cache, "p")
    cache.track("p", "early", index.add(np.arange(3), ONE, 0), 0, reward=2.0)
    cache.track("p", "running", index.add(np.arange(3), ONE, 0), 0)
    cache.set_reward("running", 1.0)
    cache.set_reward("a", 3.0)
    cache.set_reward("nobody", 3.0)
    assert index.weights() == [4 * ONE, 3 * ONE, 2 * ONE]


def test_a_new_epoch_weighs_anew_what_is_in_use_and_drops_what_is_not(build, make_answer):
    store, cache = build([make_answer("a"), make_answer("b", problem_id="q")])
    wanted(cache, "p", "q")
    index = cache.get("p")
    cache.done("q")
    store.begin_epoch()
    assert cache.get("q") is None
    assert cache.get("p") is index and index.weights() == [ONE // 2]
    assert wanted(cache, "q").weights() == [ONE // 2]


def test_an_index_in_use_loses_what_is_too_old_but_no_answer_that_grows(build, make_answer):
    store, cache = build([make_answer("a")], epochs=0)
    index = wanted(cache, "p")
    growing, complete = (index.add(np.arange(3), ONE, 0) for _ in range(2))
    cache.track("p", "complete", complete, 0)
    store.begin_epoch()
    assert list(cache.get("p").documents) == [growing]
    cache.set_reward("complete", 1.0)


def test_an_index_finished_after_an_epoch_began_has_that_epochs_weights(build, make_answer):
    pool, reading, go_on = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    store, cache = build([make_answer("a")], pool=pool)
    read = store.read

    def slow_read(*arguments):
        reading.set()
        go_on.wait()
        return read(*arguments)

    store.read = slow_read
    cache.want("p")
    reading.wait()
    store.begin_epoch()
    assert cache.get("p") is None
    go_on.set()
    pool.shutdown(wait=True)
    assert cache.get("p").weights() == [ONE // 2]


def test_an_answer_that_ends_during_the_build_is_in_the_index(build, make_answer):
    store, cache = build([make_answer("a")])
    read = store.read

    def read_while_another_ends(*arguments):
        store.read = read
        store.append(make_answer("b"))
        return read(*arguments)

    store.read = read_while_another_ends
    assert len(wanted(cache, "p").documents) == 2


def test_a_build_that_fails_leaves_the_problem_without_index_and_is_logged(build, make_answer, caplog):
    store, cache = build([make_answer("a")])

    def fail(*_):
        raise RuntimeError("broken")

    store.read = fail
    assert wanted(cache, "p") is None and cache.stats().given_up == 1 and "could not be built" in caplog.text


def test_the_least_recently_used_index_goes_first_and_those_in_use_last(build, make_answer):
    # each takes 250 kB, and nearly twice that while it is built; the cap is 1 MiB
    answers = [make_answer(f"{name}{n}", problem_id=name, count=500) for name in "abcde" for n in range(5)]
    _, cache = build(answers, max_mib=1)
    for name in "abc":
        wanted(cache, name)
        cache.done(name)
    cache.get("a")
    wanted(cache, "d")
    assert cache.get("b") is None and all(cache.get(name) for name in "acd")
    for name in "ac":
        cache.want(name)
    wanted(cache, "e")
    assert all(cache.get(name) for name in "acd"), "in use, so the newcomer goes without their room"
    assert cache.get("e") is None or len(cache.get("e").documents) < 5


def test_answers_too_many_for_the_cap_are_indexed_from_the_newest_on(build, make_answer):
    answers = [make_answer(str(number), count=1000) for number in range(20)]
    _, cache = build(answers, max_mib=1)
    found = tokens_in(wanted(cache, "p"))
    assert 0 < len(found) < 20 and found == [answer.token_ids.tolist() for answer in answers[-len(found) :]]
    assert cache.stats().shortened == 1 and NaiveIndex.most <= 1 << 20


def test_an_index_that_outgrows_the_cap_is_dropped(build):
    _, cache = build(max_mib=1)
    wanted(cache, "p", "q")
    cache.get("p").grow(6_000)
    assert cache.get("p") is not None
    cache.get("q").grow(6_000)
    assert cache.get("q") is not None and cache.get("p") is None, "the other one made room"
    cache.get("q").grow(6_000)
    assert cache.get("q") is None


@pytest.mark.parametrize("num_threads", [1, 4])
def test_ten_thousand_problems_stay_within_a_small_cap(build, num_threads):
    pool = ThreadPoolExecutor(num_threads)
    store, cache = build(pool=pool, max_mib=1)
    rng, picks = np.random.default_rng(0), random.Random(0)
    for number in range(10_000):
        tokens = rng.integers(0, 9, int(rng.integers(1, 60))).astype(np.int32)
        store.append(Answer(f"r{number}", f"p{number}", tokens[:0], tokens, FinishReason.FINISHED, 0))
    served = 0
    for start in range(0, 10_000, 50):
        problems = [f"p{number}" for number in range(start, start + 50)]
        for problem in problems:
            cache.want(problem)
        while cache.stats().building:
            pool.submit(lambda: None).result()
        # some requests run on for long
        for problem in problems:
            served += cache.get(problem) is not None
            if picks.random() < 0.99:
                cache.done(problem)
    pool.shutdown(wait=True)
    stats = cache.stats()
    assert stats.built > 9_000 and served > 9_000 and stats.dropped > 0
    assert stats.num_bytes <= 1 << 20 and NaiveIndex.most <= 1 << 20


def test_room_is_made_for_tables_that_double(build, make_answer):
    class Doubling(NaiveIndex):
        @property
        def nbytes(self):
            return 1 << super().nbytes.bit_length()

    answers = [make_answer(str(number), problem_id=f"p{number % 4}", count=200) for number in range(80)]
    _, cache = build(answers, Doubling, max_mib=1)
    for number in range(4):
        wanted(cache, f"p{number}")
        cache.done(f"p{number}")
    assert NaiveIndex.most <= 1 << 20 and cache.stats().built == 4 and cache.get("p3").documents


def test_the_index_of_the_core_is_one_that_a_library_can_keep(build, make_answer):
    answers = [make_answer(str(number), count=2000) for number in range(20)]
    store, cache = build(answers, lambda: HistoryIndex(min_match=3, max_match=7, max_matches=32), max_mib=1)
    index = wanted(cache, "p")
    assert 0 < index.num_documents <= 21 and index.nbytes <= 1 << 20
    store.report_reward("19", 2.0)
    cache.set_reward("19", 2.0)
    for _ in range(4):
        store.begin_epoch()
        assert cache.get("p") is index
    assert cache.stats().indices == 1
    index.check_integrity()


def test_closing_gives_up_what_is_being_built(build, later):
    _, cache = build()
    cache.want("p")
    cache.close()
    later.run()
    assert cache.get("p") is None


def test_names_of_answers_go_with_their_epochs(build, make_answer):
    store, cache = build(epochs=1)
    wanted(cache, "p")
    for epoch in range(1, 9):
        store.begin_epoch(epoch)
        index = cache.get("p")
        for number in range(10):
            name = f"e{epoch}-{number}"
            cache.track("p", name, index.add(np.arange(2), ONE, epoch), epoch)
    assert len(index.documents) == len(cache._problem_of) == 20


def test_idle_indices_are_bounded_in_number_however_small_they_are(build, monkeypatch):
    monkeypatch.setattr("vllm_specrollout.history.index_cache._PER_MIB", 4)
    _, cache = build(max_mib=1)
    for number in range(20):
        wanted(cache, f"p{number}")
        cache.done(f"p{number}")
    assert cache.stats().indices <= 4 and cache.get("p19") is not None and cache.get("p0") is None


@pytest.mark.parametrize(
    "age, reward, weight",
    [(0, None, 1.0), (0, 0.0, 1.0), (0, 1.0, 2.0), (1, None, 0.5), (2, 1.0, 0.5), (0, -3.0, 1.0), (-1, None, 1.0)],
)
def test_a_weight_falls_with_age_and_grows_with_reward_unless_told_otherwise(age, reward, weight):
    assert weight_of(HistoryConfig(), age, reward) == round(weight * ONE)
    assert weight_of(HistoryConfig(reward_weight=0.0), age, reward) == weight_of(HistoryConfig(), age, None)
    assert weight_of(HistoryConfig(decay=0.0), age, reward) == (0 if age > 0 else round(weight * ONE))


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.25, 0.5), (0.0, 0.0)])
def test_with_a_large_weight_of_rewards_their_largest_sum_wins(rewards):
    """RhymeRL, 5.3. By default 9 wrong answers outweigh 2 right ones, which count twice each."""
    config = HistoryConfig(reward_weight=255.0, decay=1.0)
    wrong = 9 * weight_of(config, 1, 0.0)
    right = sum(weight_of(config, 1, reward) for reward in rewards)
    assert (right > wrong) == (sum(rewards) > 0.0)


@given(st.floats(0, 1), st.floats(0, 1024), st.integers(-3, 1024), REWARDS, REWARDS)
def test_a_weight_is_bounded_and_follows_the_reward(decay, reward_weight, age, reward, other):
    config = HistoryConfig(decay=decay, reward_weight=reward_weight)
    weight = weight_of(config, age, reward)
    assert 0 <= weight <= MOST
    if (reward or 0.0) <= (other or 0.0):
        assert weight <= weight_of(config, age, other)
    assert weight >= weight_of(config, age + 1, reward) or math.isclose(decay, 1.0)


class OwnedIndex:
    """The core's index, which has no lock: whoever calls it while another thread is in a call is told so."""

    broken = []

    def __init__(self):
        self.core = HistoryIndex(min_match=1, max_match=7, max_matches=32)
        self._inside, self.threads = 0, []

    def __getattr__(self, name):
        value = getattr(self.core, name)
        if not callable(value):
            return value

        def call(*args, **more):
            own = threading.get_ident()
            if self._inside not in (0, own):
                self.broken.append(name)
            self._inside = own
            try:
                return value(*args, **more)
            finally:
                if self.threads[-1:] != [own]:
                    self.threads.append(own)
                self._inside = 0

        return call


def test_once_an_index_is_published_its_builder_touches_it_no_longer(tmp_path, make_answer):
    """It has one owner at a time: the thread that builds it, then the engine's."""
    config, made = HistoryConfig(dir=str(tmp_path), epochs=2), []

    def make():
        made.append(OwnedIndex())
        return made[-1]

    OwnedIndex.broken.clear()
    builder = Background("build")
    store = HistoryStore(config, Background("disk").submit)
    cache = IndexCache(config, store, make, builder)
    asked = 0
    for number in range(400):
        problem = f"p{number % 7}"
        cache.want(problem)
        if number % 4 == 3:
            # the engine goes on while indices are built, and at times one is there when it asks, however slow the host
            builder.submit(lambda: None).result(60)
        store.append(make_answer(f"r{number}", problem, epoch=store.epoch, count=50))
        if (index := cache.get(problem)) is not None:
            document = index.open(store.epoch)
            index.append(document, np.arange(20, dtype=np.int32))
            cache.track(problem, f"r{number}", document, store.epoch)
            cache.set_reward(f"r{number}", 1.0)
            asked += 1
        cache.done(problem)
        if number % 40 == 39:
            store.begin_epoch()
    cache.close()
    store.close()
    own = threading.get_ident()
    assert asked > 50 and len(made) > 7 and not OwnedIndex.broken
    # built by one, then asked by the other, and never again by the first
    assert all(one.threads in ([builder._thread.ident], [builder._thread.ident, own], [own], []) for one in made)
    for one in made:
        one.core.check_integrity()
