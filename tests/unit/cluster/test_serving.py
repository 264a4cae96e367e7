"""Drafters that run ahead and a target that never waits for them, under faults of all that is between them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster.rollout import PROMPT, Rollout
from vllm_specrollout.cluster.line import ROWS, _stream_below, branches
from vllm_specrollout.cluster.messages import Rest, encode
from vllm_specrollout.cluster.serving import FORGET_S


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1_000_000),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    fan_out=st.integers(1, 3),
    late=st.floats(0.0, 0.6),
    most=st.integers(1, 64),
    mischief=st.floats(0.0, 0.2),
    changes=st.floats(0.0, 0.5),
)
def test_faults_of_drafters_and_of_their_mail_change_no_token(
    seed, lengths, windows, fan_out, late, most, mischief, changes
) -> None:
    """Messages are late, and refused where too many wait; drafters die, hang, are detached, and come back; they sleep
    and wake up; requests change their windows and modes at any step."""
    rollout = Rollout(seed, lengths, windows, fan_out, late, most)
    rng = rollout.rng
    while not rollout.is_over:
        for i, other in enumerate(rollout.others):
            if rng.random() < mischief:
                match rng.randrange(4):
                    case 0:
                        other.restart()
                    case 1:
                        other.serving.rest(rng.random() < 0.5)
                    case 2:
                        other.hangs_until = rollout.steps + rng.randrange(1, 50)
                    case _ if str(i) in rollout.drafter.links:
                        rollout.drafter.detach(str(i))
                    case _:
                        rollout.attach(i)
        if rng.random() < changes:
            rollout.replan()
        for _ in range(rng.randrange(5)):
            rollout.turn()
            for other in rollout.others:
                assert all(_stream_below(line._root) <= 2 * 16 for line in other.lines)
        rollout.step()
        rollout.now += rng.choice((0.1, 1.0, 10.0))
    rollout.check()
    rollout.check_nothing_is_left()


def test_a_drafter_that_is_always_right_saves_most_steps() -> None:
    rollout = Rollout(1, [200], [4], 1)
    rollout.engine.accuracy = (1.0, 1.0)
    rollout.run(turns=4)
    rollout.check()
    # four tokens are drafted while one step verifies
    assert rollout.steps <= 200 / 4 + 4 and rollout.accepted >= 140
    assert rollout.link.counts.wasted == 0


def test_an_alternative_that_holds_saves_the_step_behind_it() -> None:
    saved = []
    for fan_out in (1, 2):
        rollout = Rollout(3, [300], [4], fan_out)
        rollout.engine.accuracy = (0.6, 0.95)
        rollout.run(turns=3)
        rollout.check()
        saved.append(rollout.steps)
    assert saved[1] < 0.9 * saved[0]


def test_a_drafter_is_at_most_two_windows_ahead_of_a_target_that_stands_still() -> None:
    rollout = Rollout(5, [500], [6], 1)
    rollout.turn()
    rollout.step()
    rollout.step()
    for _ in range(100):
        rollout.turn()
    assert _stream_below(rollout.line._root) == 12 and not rollout.engine.running


def test_a_miss_costs_at_most_what_may_be_drafted_behind_a_token() -> None:
    """The w - 1 tokens behind the first one of a window, and those of the next one."""
    rollout = Rollout(5, [600], [6], 1)
    costs, before = [], 0
    while not rollout.is_over:
        for _ in range(rollout.rng.randrange(20)):
            rollout.turn()
            wasted = sum(line.wasted for line in rollout.others[0].lines)
            costs.append(wasted - before)
            before = wasted
        rollout.step()
    rollout.check()
    # a verdict of several tokens leaves the stream once
    assert max(costs) == 12 - 1, "and it costs that much where the drafter is fast"


def test_drafting_goes_on_after_the_drafter_has_begun_anew() -> None:
    rollout = Rollout(8, [400], [4], 2)
    assert rollout.gained(20) > 10
    rollout.others[0].restart()
    assert rollout.gained(20) > 10
    rollout.run()
    rollout.check()


def test_a_drafter_that_sleeps_holds_no_request_and_drafts_all_of_them_once_it_is_awake() -> None:
    rollout = Rollout(8, [400, 400], [4], 2)
    other = rollout.others[0]
    assert rollout.gained(20) > 10
    other.wire.to_drafter.append((next(iter(other.serving.targets)), encode(Rest(True))))
    rollout.turn()
    assert other.engine.is_asleep and not other.lines
    rollout.gained(2)  # what came before
    assert rollout.gained(20) == 0 and rollout.link.is_there, "it is known to live"
    other.wire.to_drafter.append((next(iter(other.serving.targets)), encode(Rest(False))))
    assert rollout.gained(20) > 10 and len(other.lines) == 2
    rollout.run()
    rollout.check()


def test_few_requests_have_branches_and_many_have_none() -> None:
    assert [branches(count) for count in (1, 4, 8, 16, 32, 500)] == [4, 4, 4, 2, 1, 1]
    few, many = Rollout(9, [200] * 2, [8], 2), Rollout(9, [200] * ROWS, [8], 2)
    for rollout in (few, many):
        rollout.turn()
        rollout.step()
        rollout.step()
        for _ in range(6):
            rollout.turn()
    assert max(len(line.tips) for line in few.others[0].lines) > 1
    assert max(len(line.tips) for line in many.others[0].lines) == 1


def test_one_drafter_serves_several_engines_at_once() -> None:
    first = Rollout(4, [120], [4], 2)
    second = Rollout(5, [90], [], 2)
    second.others = []
    wire = first.others[0].wire
    second.drafter.link("shared", wire.box("second"), window=4, fan_out=2)
    while not (first.is_over and second.is_over):
        for _ in range(4):
            first.turn()
        for rollout in (first, second):
            if not rollout.is_over:
                rollout.step()
    first.check()
    second.check()
    assert first.accepted > 30 and second.accepted > 20


def test_an_engine_that_vanished_leaves_nothing_and_is_greeted_where_it_comes_back() -> None:
    rollout = Rollout(6, [300], [4], 2)
    other = rollout.others[0]
    for _ in range(5):
        rollout.turn()
        rollout.step()
    rollout.turn()
    assert rollout.line
    rollout.now += FORGET_S + 1.0
    for _ in range(3):
        other.turn()
    assert not other.lines and not other.engine.running
    accepted = rollout.accepted
    rollout.run()
    rollout.check()
    assert rollout.accepted > accepted + 50


def test_an_engine_hears_that_its_drafter_lives_while_there_is_nothing_to_draft() -> None:
    rollout = Rollout(6, [300], [4], 1)
    other = rollout.others[0]
    other.engine.most_tokens = PROMPT + 4
    heard = 0
    for _ in range(40):
        rollout.turn()
        waiting = [message for box in other.wire.to_engine.values() for message in box]
        heard += len(waiting)
        rollout.step()
        rollout.now += 0.5
    assert heard > 10 and rollout.link.is_there
