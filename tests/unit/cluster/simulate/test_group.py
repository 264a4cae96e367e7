import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.simulate.builders import DRAFTER, VERIFIER, long_group, speed
from vllm_specrollout.cluster.simulate.group import Counts, Group, Method, Waiting, drafting_ms
from vllm_specrollout.cluster.simulate.guesses import Guesses
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import constant_workload
from vllm_specrollout.decoupled.rates import Mode, coupled_rate, decoupled_rate


@pytest.mark.parametrize(("p", "window", "batch"), [(0.5, 2, 32), (0.8, 4, 32), (0.9, 8, 321)])
def test_coupled_decoding_has_the_speed_of_its_formula(p, window, batch):
    found = speed(long_group(Mode.COUPLED, p, window, batch), 400)
    assert found == pytest.approx(coupled_rate(DRAFTER.line, VERIFIER, batch, window, p), rel=0.02)


@pytest.mark.parametrize(
    ("p", "window", "batch"), [(0.5, 2, 32), (0.8, 4, 32), (0.8, 6, 32), (0.6, 1, 32), (0.9, 5, 321)]
)
def test_decoupled_decoding_has_the_speed_of_its_formula(p, window, batch):
    found = speed(long_group(Mode.DECOUPLED, p, window, batch), 400)
    assert found == pytest.approx(decoupled_rate(DRAFTER.line, VERIFIER, batch, window, p), rel=0.02)


@pytest.mark.parametrize(("p", "window", "draft_ms"), [(0.95, 8, 2.0), (0.8, 4, 8.0), (0.95, 6, 13.0)])
def test_a_window_that_takes_several_steps_has_the_speed_of_its_timetable(p, window, draft_ms):
    slow = StepLine(base=draft_ms)
    found = speed(long_group(Mode.DECOUPLED, p, window, 8), 400, Method(name="slow", line=slow))
    assert found == pytest.approx(decoupled_rate(slow, VERIFIER, 8, window, p), rel=0.04)


def test_sure_drafts_without_cost_yield_whole_windows():
    free = Method(name="free", line=StepLine(base=1e-9))
    flat = StepLine(base=10.0)
    group = long_group(Mode.COUPLED, 1.0, 4, 3, verifier=flat)
    assert speed(group, 100, free) == pytest.approx(0.5)
    # the stream: each window but its first token, which the target's own token before has checked
    group = long_group(Mode.DECOUPLED, 1.0, 4, 3, verifier=flat)
    assert speed(group, 400, free) == pytest.approx(0.4, rel=0.01)
    assert group.counts.wasted == 0


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_hopeless_drafts_yield_one_token_a_step(mode):
    group = long_group(mode, 0.0, 3, 4)
    speed(group, 50)
    assert group.counts.tokens == 4 * 50


def test_a_verifier_that_never_waits_has_no_wait():
    never = long_group(Mode.DECOUPLED, 0.7, 4, 2, Waiting.NEVER)
    speed(never, 500)
    assert never.counts.wait_ms == 0.0 and never.counts.stalls > 0


def test_a_lone_request_that_always_waits_has_a_window_in_every_step():
    group = long_group(Mode.DECOUPLED, 0.7, 4, 1, Waiting.ALWAYS)
    speed(group, 500)
    assert group.counts.stalls == 0 and group.counts.wait_ms > 0.0


def test_requests_that_are_left_out_get_no_token():
    group = long_group(Mode.DECOUPLED, 0.0, 3, 2, Waiting.ALWAYS)
    group.copies.ahead[0] = 3.0
    group.begin(DRAFTER)
    group.end()
    assert group.copies.position.tolist() == [1, 0]


@given(
    p=st.floats(0.0, 1.0),
    windows=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    decoupled=st.booleans(),
    waiting=st.sampled_from(Waiting),
    draft_ms=st.floats(0.01, 40.0),
    seed=st.integers(0, 999),
)
def test_at_most_2w_less_1_tokens_are_wasted_per_refusal(p, windows, decoupled, waiting, draft_ms, seed):
    group = long_group(Mode.DECOUPLED, p, 1, len(windows), waiting, seed=seed)
    group.copies.reconfigure(np.asarray(windows), np.full(len(windows), decoupled))
    method = Method(name="any", line=StepLine(base=draft_ms))
    for _ in range(40):
        before = group.counts.tokens
        assert group.begin(method) > 0.0
        group.end()
        copies = group.copies
        assert group.counts.tokens > before
        assert (copies.left >= 1).all() and (copies.left <= copies.window).all()
        assert (copies.ahead >= 0.0).all() and (copies.ahead <= copies.left + copies.window).all()
    assert group.counts.excess == 0
    assert group.counts.wasted <= group.counts.drafted


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_shorter_windows_leave_the_drafters_batch_earlier(windows):
    line = StepLine(base=2.0, request=0.5)
    expected = sum(line.step_ms(sum(w >= depth for w in windows)) for depth in range(1, max(windows) + 1))
    assert drafting_ms(line, np.asarray(windows)) == pytest.approx(expected)


def test_plain_steps_until_the_first_end_are_one_event():
    work = constant_workload([5, 9], 0.5)
    group = Group(0, VERIFIER, Mode.PLAIN, work.length, Guesses(work, 1, np.random.default_rng(0)), Waiting.NEVER)
    group.copies.add(np.arange(2), np.zeros(2, dtype=np.int64), 1, False)
    assert group.begin(DRAFTER) == pytest.approx(5 * VERIFIER.step_ms(2))
    group.end()
    assert group.copies.position.tolist() == [5, 5] and group.counts.steps == 5


def test_counts_add_up():
    total = Counts(steps=1, busy_ms=2.0)
    total.add(Counts(steps=2, busy_ms=3.0, wasted=4))
    assert total == Counts(steps=3, busy_ms=5.0, wasted=4)
