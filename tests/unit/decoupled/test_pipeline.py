"""Drafters that run ahead and the verifier that never waits for them, under faults of all that is between them."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.decoupled import VOCABULARY, FakeEngine, FakeNoise, Line, token_at
from vllm_specrollout.decoupled.counter import TAPE, NoiseKind
from vllm_specrollout.decoupled.link import Link
from vllm_specrollout.decoupled.loop import Loop
from vllm_specrollout.decoupled.messages import Hello, Noise, Role
from vllm_specrollout.decoupled.rates import Mode
from vllm_specrollout.decoupled.reconfigure import OwnPlan
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.types import DraftLimits, FinishedRequest, FinishReason, RequestBatch, RequestView

PROMPT = [7, 8, 9]
COUNTED = NoiseKind(Noise.COUNTER, "murmur")
KINDS = st.sampled_from((TAPE, COUNTED))


class Elsewhere:
    """A drafter's process, and the line to it. It stays when its verifier leaves."""

    def __init__(self, seed: int, chance: float = 0.0) -> None:
        self.line = Line(random.Random(seed), chance)
        self.rng = random.Random(seed + 1)
        self.hangs_until = 0
        self.now = 0.0
        self.begin()

    def begin(self) -> None:
        """A process that knows of nothing."""
        self.engine = FakeEngine(random.Random(self.rng.random()))
        self.loop = Loop(self.engine, self.line.ends[1], clock=lambda: self.now, stays=True)

    def restart(self) -> None:
        """The process is gone with all that it knew; another one begins."""
        self.begin()
        self.loop._greet()


class Rollout:
    """Requests that decode to their end, with drafts from elsewhere.

    Args:
        windows: of each drafter.
        kind: of noise.
    """

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        windows: list[int],
        fan_out: int,
        chance: float = 0.0,
        kind: NoiseKind = TAPE,
    ) -> None:
        self.rng = random.Random(seed)
        self.noise = FakeNoise(kind)
        self.others = [Elsewhere(seed + 10 * i, chance) for i in range(1, 1 + len(windows))]
        self.now = 0.0
        self.drafter = DecoupledDrafter(
            self.noise,
            0,
            vocab_size=VOCABULARY,
            fan_out=fan_out,
            connect=lambda address, keys: self.others[int(address)].line.reopened(),
            clock=lambda: self.now,
        )
        self.windows = windows
        self.lengths = {str(i): length for i, length in enumerate(lengths)}
        self.tokens = {name: list(PROMPT) for name in self.lengths}
        self.steps = 0
        for i in range(len(windows)):
            self.attach(i)

    # of the first drafter
    @property
    def other(self) -> Elsewhere:
        return self.others[0]

    @property
    def engine(self) -> FakeEngine:
        return self.other.engine

    @property
    def loop(self) -> Loop:
        return self.other.loop

    @property
    def link(self) -> Link:
        return self.drafter.links["0"]

    def attach(self, i: int) -> None:
        self.drafter.attach(str(i), str(i), window=self.windows[i])

    def step(self) -> None:
        """One step of the verifier."""
        running = [name for name, tokens in self.tokens.items() if len(tokens) < self.end(name)]
        self.noise.lengths = {name: len(tokens) for name, tokens in self.tokens.items()}
        views = [
            RequestView(
                name, np.asarray(self.tokens[name], np.int32), len(PROMPT), self.end(name) - len(self.tokens[name])
            )
            for name in running
        ]
        batch = RequestBatch.of(views)
        trees = self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))
        for i, name in enumerate(running):
            tree, tokens = trees.tree(i), self.tokens[name]
            node = -1
            while len(tokens) < self.end(name):
                tokens.append(token_at(int(name), len(tokens)))
                rows = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
                found = [child for child, row in enumerate(rows) if row == (node, tokens[-1])]
                if not found:
                    break
                node = found[0]
            if len(tokens) >= self.end(name):
                none = np.zeros(0, np.int32)
                self.drafter.finish(FinishedRequest(name, "", none, none, FinishReason.FINISHED))
        self.steps += 1

    def turn(self) -> None:
        for other in self.others:
            other.now += 0.2
            if other.hangs_until <= self.steps:
                other.loop.turn()

    def end(self, name: str) -> int:
        return len(PROMPT) + self.lengths[name]

    @property
    def is_over(self) -> bool:
        return all(len(tokens) >= self.end(name) for name, tokens in self.tokens.items())

    def run(self, turns: int = 3) -> None:
        while not self.is_over:
            for _ in range(turns):
                self.turn()
            self.step()

    def check(self) -> None:
        """Every request has the target's tokens, and nothing is left of it."""
        for name, tokens in self.tokens.items():
            expected = [*PROMPT, *(token_at(int(name), at) for at in range(len(PROMPT), self.end(name)))]
            assert tokens == expected
        assert self.steps <= max(self.lengths.values()), "a step yields a token of each request at least"
        for link in self.drafter.links.values():
            assert not link.requests.open and not link.requests._by_handle
            score = link.requests.score
            assert 0 <= score.matched <= score.covered <= score.tried
            assert link.waited_s == 0.0
        for other in self.others:
            for wasted, levels in other.engine.wasted:
                assert wasted <= levels - 1

    def replan(self) -> None:
        """Some requests get a window and a mode of their own, others lose theirs."""
        for link in self.drafter.links.values():
            chosen = [name for name in self.lengths if self.rng.random() < 0.7]
            modes = (Mode.COUPLED, Mode.DECOUPLED)
            link.requests.plans = {name: OwnPlan(self.rng.randint(1, 16), self.rng.choice(modes)) for name in chosen}

    def check_calm(self) -> None:
        """Once faults have ended, drafters lose all streams of requests that are over, without a greeting."""
        for i, other in enumerate(self.others):
            other.hangs_until, other.line.chance = 0, 0.0
            if str(i) not in self.drafter.links:
                self.attach(i)
        # of the last one they hear: a drafter asks nothing while its verifier is silent
        name = str(len(self.lengths))
        self.lengths[name], self.tokens[name], self.steps = 150, list(PROMPT), 0
        while not self.is_over:
            self.turn()
            self.step()
            self.now += 1.0
        self.turn()
        assert not any(other.engine.streams for other in self.others)

    def check_end(self) -> None:
        """Whoever hears that its verifier leaves has nothing left of it, nor of one that left without being heard."""
        for i, other in enumerate(self.others):
            other.hangs_until, other.line.chance = 0, 0.0
            if str(i) not in self.drafter.links:
                self.attach(i)
            self.drafter.detach(str(i))
            for _ in range(2):
                other.loop.turn()
        assert not any(other.engine.streams for other in self.others)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    windows=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    fan_out=st.integers(1, 3),
    turns=st.integers(0, 6),
    kind=KINDS,
)
def test_drafters_ahead_change_no_token(
    seed: int, lengths: list[int], windows: list[int], fan_out: int, turns: int, kind: NoiseKind
) -> None:
    rollout = Rollout(seed, lengths, windows, fan_out, kind=kind)
    rollout.run(turns)
    rollout.check()
    for _ in range(2):
        rollout.turn()
    assert not any(other.engine.streams for other in rollout.others), "streams of requests that are over are closed"


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1_000_000),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    chance=st.floats(0.0, 0.5),
    mischief=st.floats(0.0, 0.2),
    changes=st.floats(0.0, 0.5),
    kind=KINDS,
)
def test_faults_of_drafters_and_of_their_lines_change_no_token(
    seed: int, lengths: list[int], windows: list[int], chance: float, mischief: float, changes: float, kind: NoiseKind
) -> None:
    """Messages are late, lost, doubled and shuffled; drafters die, hang, are detached, and come back; and requests
    change their windows and modes at any step."""
    rollout = Rollout(seed, lengths, windows, 2, chance, kind)
    rng = rollout.rng
    while not rollout.is_over:
        for i, other in enumerate(rollout.others):
            if rng.random() < mischief:
                what = rng.randrange(3)
                if what == 0:
                    other.restart()
                elif what == 1:
                    other.hangs_until = rollout.steps + rng.randrange(1, 50)
                elif str(i) in rollout.drafter.links:
                    rollout.drafter.detach(str(i))
                else:
                    rollout.attach(i)
        if rng.random() < changes:
            rollout.replan()
        for _ in range(rng.randrange(5)):
            rollout.turn()
        rollout.step()
        rollout.now += rng.choice((0.1, 1.0, 10.0))
    rollout.check()
    if rng.random() < 0.5:
        rollout.check_calm()
    rollout.check_end()


@pytest.mark.parametrize("kind", [TAPE, COUNTED], ids=str)
def test_a_drafter_that_is_always_right_saves_most_steps(kind: NoiseKind) -> None:
    rollout = Rollout(1, [200], [4], 1, kind=kind)
    rollout.engine.accuracy = (1.0, 1.0)
    rollout.run(turns=4)
    rollout.check()
    # four tokens are drafted while one step verifies
    assert rollout.steps <= 200 / 4 + 4
    assert rollout.engine.wasted == []


def test_a_drafter_that_is_never_right_costs_no_step() -> None:
    rollout = Rollout(1, [60], [4], 2)
    rollout.engine.accuracy = (0.0, 0.0)
    rollout.run()
    rollout.check()
    assert rollout.steps == 60


def test_an_alternative_that_holds_saves_the_step_behind_it() -> None:
    saved = []
    for fan_out in (1, 2):
        rollout = Rollout(3, [300], [4], fan_out)
        rollout.engine.accuracy = (0.6, 0.95)
        rollout.run(turns=3)
        rollout.check()
        saved.append(rollout.steps)
    assert saved[1] < 0.9 * saved[0]


def test_a_drafter_is_at_most_two_windows_ahead_of_a_verifier_that_stands_still() -> None:
    rollout = Rollout(5, [500], [6], 1)
    rollout.loop.turn()
    rollout.step()
    rollout.step()
    for _ in range(100):
        rollout.loop.turn()
    (stream,) = rollout.engine.streams.values()
    assert stream.depth == 12
    assert not rollout.engine.may_draft


@pytest.mark.parametrize(("mode", "levels"), [(Mode.COUPLED, 6), (Mode.DECOUPLED, 12)])
def test_a_miss_costs_at_most_what_may_be_drafted_behind_a_token(mode: Mode, levels: int) -> None:
    """Coupled, the w - 1 tokens behind the first one of a window; decoupled, those of the next one as well."""
    rollout = Rollout(5, [600], [4], 1)
    rollout.link.requests.plans = {"0": OwnPlan(6, mode)}
    while not rollout.is_over:
        for _ in range(rollout.rng.randrange(20)):
            rollout.turn()
        rollout.step()
    rollout.check()
    costs = [wasted for wasted, _ in rollout.engine.wasted]
    assert max(costs) == levels - 1, "and it costs that much where the drafter is fast"


def test_a_coupled_stream_waits_for_the_verdict_on_its_window() -> None:
    rollout = Rollout(5, [500], [4], 1)
    rollout.engine.accuracy = (1.0, 1.0)
    rollout.link.requests.plans = {"0": OwnPlan(6, Mode.COUPLED)}
    rollout.loop.turn()
    rollout.step()
    found = []
    for _ in range(6):
        for _ in range(100):
            rollout.loop.turn()
        (stream,) = rollout.engine.streams.values()
        assert not rollout.engine.may_draft
        before = len(rollout.tokens["0"])
        rollout.step()
        found.append((stream.depth, len(rollout.tokens["0"]) - before))
    # six levels are drafted beside a plain step, which yields the first one; the next step verifies the other five, and
    # nothing is drafted beside it
    assert found == 3 * [(6, 6), (5, 1)]


def test_a_stream_that_is_coupled_pauses_and_keeps_what_it_has() -> None:
    rollout = Rollout(5, [500], [6], 1)
    rollout.engine.accuracy = (1.0, 1.0)
    rollout.loop.turn()
    rollout.step()
    for _ in range(100):
        rollout.loop.turn()
    (stream,) = rollout.engine.streams.values()
    assert stream.depth == 12
    rollout.link.requests.plans = {"0": OwnPlan(2, Mode.COUPLED)}
    rollout.step()
    rollout.loop.turn()
    assert stream.depth == 11 and not rollout.engine.may_draft
    rollout.step()
    for _ in range(100):
        rollout.loop.turn()
    assert stream.depth == 2 and stream.wasted == 0
    rollout.run()
    rollout.check()


def test_drafting_goes_on_after_the_drafter_has_begun_anew() -> None:
    rollout = Rollout(5, [400], [4], 2)
    for _ in range(40):
        rollout.loop.turn()
        rollout.step()
    rollout.other.restart()
    before = rollout.steps, len(rollout.tokens["0"])
    rollout.run()
    rollout.check()
    assert rollout.steps - before[0] < (400 + len(PROMPT) - before[1]) / 1.5


def test_a_stream_that_is_lost_is_opened_anew() -> None:
    rollout = Rollout(5, [400], [4], 2)
    for _ in range(20):
        rollout.loop.turn()
        rollout.step()
    rollout.engine.close_all()
    rollout.run()
    rollout.check()
    assert rollout.link.requests.counts.opened == 2
    assert rollout.engine.drafted > 200


@pytest.mark.parametrize("token", [VOCABULARY, 1 << 20])
def test_a_token_that_the_target_does_not_have_is_never_proposed(token: int) -> None:
    from vllm_specrollout.decoupled.messages import Drafts

    rollout = Rollout(5, [50], [4], 2)
    rollout.loop.turn()
    rollout.step()
    rollout.step()
    one = np.asarray([token], np.int32)
    rollout.other.line.ends[1].send(Drafts(1, 0, len(rollout.tokens["0"]), one, one * 0 - 1, np.zeros(1, np.float32)))
    rollout.step()
    assert rollout.link.requests.counts.trees == 0
    rollout.run()
    rollout.check()


class FakeProcess:
    """Stands for a drafter's process."""

    pid, restarts, waited_s = 7, 0, 0.0

    def __init__(self) -> None:
        self.kills = 0
        self.has_ended = False

    def kill(self) -> None:
        self.kills += 1
        self.has_ended = True

    def watch(self) -> bool:
        found, self.has_ended = self.has_ended, False
        return found


def test_a_process_that_says_nothing_for_long_is_killed_and_its_successor_drafts() -> None:
    rollout = Rollout(5, [400], [4], 2)
    process = rollout.link.process = FakeProcess()
    for _ in range(20):
        rollout.loop.turn()
        rollout.step()
    for _ in range(10):
        rollout.now += 2.9
        rollout.step()
    assert process.kills == 0, "it may be busy"
    rollout.now += 2.9
    rollout.step()
    assert process.kills == 1 and not rollout.link.is_there
    rollout.other.restart()
    rollout.run()
    rollout.check()
    assert process.kills == 1
    assert rollout.engine.drafted > 100


def test_a_verifier_that_is_silent_gets_no_signs_of_life_that_pile_up() -> None:
    rollout = Rollout(5, [50], [4], 2)
    now = [0.0]
    rollout.loop._clock = lambda: now[0]
    rollout.loop.turn()
    rollout.step()
    for _ in range(1000):
        now[0] += 2.0
        rollout.loop.turn()
    assert len(rollout.other.line.ends[0].own) < 10
    rollout.run()
    rollout.check()


def test_a_drafter_keeps_to_the_levels_and_branches_that_are_allowed() -> None:
    rollout = Rollout(5, [400], [4], 3)
    for _ in range(12):
        rollout.loop.turn()
    for _ in range(30):
        rollout.step()
        for _ in range(6):
            rollout.loop.turn()
        tokens = np.asarray(rollout.tokens["0"], np.int32)
        batch = RequestBatch.of([RequestView("0", tokens, len(PROMPT), 100)])
        rollout.noise.lengths = {"0": len(tokens)}
        for depth, is_chain in ((2, False), (1, False), (3, True)):
            limits = DraftLimits(batch.max_nodes, batch.max_depth * 0 + depth, np.array([is_chain]))
            trees = rollout.drafter.propose(batch, limits)
            assert trees.depth.max(initial=0) <= depth
            assert not is_chain or trees.num_nodes == trees.depth.max(initial=0)


def test_requests_whose_ends_a_drafter_could_not_be_told_are_closed_once_it_listens_again() -> None:
    rollout = Rollout(5, [*[3] * 50, 60], [4], 2)
    rollout.turn()
    rollout.step()
    rollout.turn()
    assert len(rollout.engine.streams) == 51
    send = rollout.link.line.send
    rollout.link.requests._send = lambda message: False  # it stands still, and its ring is full
    while len(rollout.link.requests.open) > 1:
        rollout.step()
    rollout.link.requests._send = send
    for _ in range(11):
        rollout.step()
        rollout.turn()
    assert list(rollout.engine.streams) == [51], "the one that still runs"
    assert rollout.link.requests.counts.opened == 51
    rollout.run()
    rollout.check()


def test_a_question_after_a_stream_that_makes_no_drafts_does_not_keep_it() -> None:
    """Its verdicts were lost, so it can follow no more: only a request that is opened anew helps."""
    rollout = Rollout(5, [400], [4], 2)
    rollout.turn()
    rollout.step()
    rollout.turn()
    rollout.engine.step = list  # type: ignore[method-assign]
    for _ in range(70):
        rollout.step()
        for _ in range(6):
            rollout.turn()
    assert rollout.link.requests.counts.opened == 2


def test_streams_opened_between_two_greetings_are_closed() -> None:
    rollout = Rollout(5, [60], [4], 2)
    rollout.loop.turn()
    rollout.step()
    rollout.loop.turn()
    assert len(rollout.engine.streams) == 1
    rollout.other.line.ends[1].send(Hello(Role.DRAFTER, VOCABULARY, Noise.TAPE, 64, 0))
    rollout.step()
    rollout.loop.turn()
    assert list(rollout.engine.streams) == [2], "the first one is closed, and the request opened anew"
    rollout.run()
    rollout.check()
