"""Whatever comes in whatever order, every span of the texts reads an answer that may draft: against a naive list."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.history.texts_device import REACH, TILE, Later, Memory, ends, whole
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.index_cache import ONE, weight_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.types import Answer, FinishReason

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
