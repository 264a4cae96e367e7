import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.group import Guesses, Mode, drafting_ms

from tests.unit.bench.studies.builders import DRAFTER, VERIFIER, group_of, mixed, speed
from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate

FLAT, FREE = StepLine(base=10.0), StepLine(base=1e-9)


@given(st.floats(0.0, 1.0), st.integers(1, 40), st.integers(0, 9))
def test_runs_of_right_guesses_count_down_to_the_next_miss(p, length, seed):
    guesses = Guesses(mixed([length, length], p), np.random.default_rng(seed))
    for request in (0, 1):
        runs = guesses.run(0, np.full(length, request), np.arange(length))
        assert all(run in (0, after + 1) for run, after in zip(runs[:-1], runs[1:], strict=True))
        assert p > 0.0 or not runs.any()


def test_one_more_method_changes_no_other():
    alone, both = (Guesses(mixed([500], *rates), np.random.default_rng(3)) for rates in ([0.7], [0.7, 0.4]))
    request, positions = np.zeros(500, dtype=np.int64), np.arange(500)
    assert alone.run(0, request, positions).tolist() == both.run(0, request, positions).tolist()


@pytest.mark.parametrize(("p", "window", "batch"), [(0.5, 2, 32), (0.8, 4, 32), (0.9, 8, 321)])
def test_coupled_decoding_has_the_speed_of_its_formula(p, window, batch):
    found = speed(group_of(Mode.COUPLED, p, window, batch), 400)
    assert found == pytest.approx(coupled_rate(DRAFTER, VERIFIER, batch, window, p), rel=0.02)


@pytest.mark.parametrize(
    ("p", "window", "batch"), [(0.5, 2, 32), (0.8, 4, 32), (0.8, 6, 32), (0.6, 1, 32), (0.9, 5, 321)]
)
def test_decoupled_decoding_has_the_speed_of_its_formula(p, window, batch):
    found = speed(group_of(Mode.DECOUPLED, p, window, batch), 400)
    assert found == pytest.approx(decoupled_rate(DRAFTER, VERIFIER, batch, window, p), rel=0.02)


@pytest.mark.parametrize(("p", "window", "draft_ms"), [(0.95, 8, 2.0), (0.8, 4, 8.0), (0.95, 6, 13.0)])
def test_a_window_that_takes_several_steps_has_the_speed_of_its_timetable(p, window, draft_ms):
    slow = StepLine(base=draft_ms)
    found = speed(group_of(Mode.DECOUPLED, p, window, 8, drafter=slow), 400)
    assert found == pytest.approx(decoupled_rate(slow, VERIFIER, 8, window, p), rel=0.04)


def test_sure_drafts_without_cost_yield_whole_windows():
    assert speed(group_of(Mode.COUPLED, 1.0, 4, 3, FLAT, FREE), 100) == pytest.approx(0.5)
    # the stream: each window but its first token, which the target's own token before has checked
    group = group_of(Mode.DECOUPLED, 1.0, 4, 3, FLAT, FREE)
    assert speed(group, 400) == pytest.approx(0.4, rel=0.01)
    assert group.counts["wasted"] == 0


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_hopeless_drafts_yield_one_token_a_step(mode):
    group = group_of(mode, 0.0, 3, 4)
    speed(group, 50)
    assert group.counts["tokens"] == 4 * 50


def test_a_lone_request_that_waits_has_a_window_in_every_step():
    group = group_of(Mode.WAITING, 0.7, 4, 1)
    for _ in range(500):
        group.begin()
        assert group.trials[0] > 0
        group.end()


def test_requests_that_are_left_out_get_no_token():
    group = group_of(Mode.WAITING, 0.0, 3, 2)
    group.ahead[0] = 3.0
    group.begin()
    group.end()
    assert group.position.tolist() == [1, 0]


@given(
    p=st.floats(0.0, 1.0),
    windows=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    mode=st.sampled_from([Mode.DECOUPLED, Mode.WAITING]),
    draft_ms=st.floats(0.01, 40.0),
    seed=st.integers(0, 999),
)
def test_at_most_2w_less_1_tokens_are_wasted_per_refusal(p, windows, mode, draft_ms, seed):
    group = group_of(mode, p, 1, len(windows), drafter=StepLine(base=draft_ms), seed=seed)
    group.reconfigure(np.asarray(windows))
    for _ in range(40):
        before = group.counts["tokens"]
        assert group.begin() > 0.0
        group.end()
        assert group.counts["tokens"] > before
        assert (group.left >= 1).all() and (group.left <= group.window).all()
        assert (group.ahead >= 0.0).all() and (group.ahead <= group.left + group.window).all()
    assert group.counts["excess"] == 0
    assert group.counts["wasted"] <= group.counts["drafted"]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_shorter_windows_leave_the_drafters_batch_earlier(windows):
    line = StepLine(base=2.0, request=0.5)
    expected = sum(line.step_ms(sum(w >= depth for w in windows)) for depth in range(1, max(windows) + 1))
    assert drafting_ms(line, np.asarray(windows)) == pytest.approx(expected)


def test_plain_steps_until_the_first_end_are_one_event():
    group = group_of(Mode.PLAIN, 0.5, 1, 2, length=5)
    assert group.begin() == pytest.approx(5 * VERIFIER.step_ms(2))
    group.end()
    assert group.position.tolist() == [5, 5]
