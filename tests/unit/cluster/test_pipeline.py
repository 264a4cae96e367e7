"""Drafters that run ahead and the verifier that never waits for them, under faults of all that is between them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.decoupled import VOCABULARY
from tests.unit.cluster.rollout import PROMPT, Rollout
from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.following import OwnPlan
from vllm_specrollout.cluster.messages import Hello, Noise, Role
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.types import DraftLimits, RequestBatch, RequestView

COUNTED = NoiseKind(Noise.COUNTER, "murmur")
KINDS = st.sampled_from((TAPE, COUNTED))


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
    from vllm_specrollout.cluster.messages import Drafts

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
