import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specrollout.bench.studies import rollout
from vllm_specrollout.bench.studies.group import Mode
from vllm_specrollout.bench.studies.rollout import Racing, Reconfiguration, simulate

from tests.unit.bench.studies.builders import DRAFTER, OTHER, VERIFIER, mixed, setup
from vllm_specrollout.cluster.rates import coupled_rate
from vllm_specrollout.errors import ConfigError

RACING = Racing(most=2, windows=(4, 4), attach_ms=100.0)
TWO_GROUPS = {"groups": 2, "drafters": (DRAFTER, OTHER)}


def test_a_plain_batch_takes_a_step_per_token_and_gets_faster_as_requests_end():
    done = simulate(mixed([10, 30], 0.5), setup(Mode.PLAIN))
    first = 10 * VERIFIER.step_ms(2)
    assert done.finish_ms == pytest.approx([first, first + 20 * VERIFIER.step_ms(1)])
    assert done.idle_share == pytest.approx(0.0)


def test_a_long_coupled_request_has_the_speed_of_its_formula():
    done = simulate(mixed([20_000], 0.7), setup(Mode.COUPLED))
    assert 20_000 / done.makespan_ms == pytest.approx(coupled_rate(DRAFTER, VERIFIER, 1, 3, 0.7), rel=0.02)


def test_the_same_seed_gives_the_same_rollout_and_another_seed_another():
    runs = [simulate(mixed([100, 200, 300], 0.6), setup(), seed) for seed in (1, 1, 2)]
    assert runs[0].finish_ms.tolist() == runs[1].finish_ms.tolist() != runs[2].finish_ms.tolist()


def test_a_freed_group_with_a_better_drafter_wins_the_race():
    # the second group is free at once; its method is always right, the first one's never
    work = mixed([2000, 5], 0.0, 1.0)
    alone, raced = (simulate(work, setup(**TWO_GROUPS, racing=racing)) for racing in (None, RACING))
    assert raced.races == raced.races_won == 1 and raced.winner.tolist() == [1, 1]
    assert raced.makespan_ms < 0.6 * alone.makespan_ms
    # the loser's tokens were generated too
    assert alone.counts["tokens"] == 2005 < raced.counts["tokens"]


def test_a_copy_begins_with_its_model_and_its_context():
    work = mixed([2000, 5], 0.0, 1.0)
    fast = simulate(work, setup(**TWO_GROUPS, racing=RACING))
    slow = simulate(work, setup(**TWO_GROUPS, racing=Racing(most=2, windows=(4, 4), attach_ms=1100.0)))
    recomputed = simulate(work, setup(**TWO_GROUPS, racing=RACING, prefill_ms=10.0))
    assert slow.makespan_ms > fast.makespan_ms < recomputed.makespan_ms


def test_a_group_whose_race_is_lost_joins_another():
    # the third request goes on, so the rollout does not end with the race
    work = mixed([1000, 5, 3000], 0.0, [1.0, 0.0, 0.0])
    plan = Racing(most=1, windows=(4, 4), attach_ms=0.0)
    done = simulate(work, setup(groups=3, drafters=(DRAFTER, OTHER), racing=plan))
    assert done.winner[0] == 1 and done.winner[1] == 1 and done.races >= 2


def test_a_copy_that_comes_too_late_wins_nothing():
    done = simulate(mixed([100, 5], 1.0, 0.0), setup(**TWO_GROUPS, racing=RACING))
    assert done.races == 1 and done.winner.tolist() == [0, 1] and done.races_won == 0


def test_the_lowest_acceptance_is_raced_for_first():
    # one place in the freed group: it goes to the request that the first drafter never guesses
    work = mixed([800, 800, 800, 5], [0.9, 0.0, 0.9, 0.9], 1.0)
    plan = Racing(most=1, windows=(4, 4), attach_ms=0.0)
    done = simulate(work, setup(groups=4, drafters=(DRAFTER, OTHER), racing=plan))
    assert done.winner[1] == 3


def test_races_are_what_the_engines_own_algorithm_assigns(monkeypatch):
    work = mixed([2000, 5], 0.0, 1.0)
    monkeypatch.setattr(rollout, "assign", lambda rates, methods, workers, *, most, running: {})
    assert simulate(work, setup(**TWO_GROUPS, racing=RACING)).races == 0


def test_reconfiguration_is_asked_every_so_many_tokens():
    asked = []

    def reconfigure(hits, trials):
        asked.append(len(hits))
        assert (hits <= trials).all() and trials.min() > 0
        return np.full(len(hits), 2)

    simulate(mixed([1000, 1000], 0.6), setup(reconfigure=reconfigure, reconfigure_every=100.0))
    assert 8 <= len(asked) <= 12 and asked[0] == 2


def test_windows_that_follow_the_batch_beat_fixed_ones_in_a_tail():
    work = mixed([60] * 300 + [4000], 0.85)
    rule = Reconfiguration(VERIFIER, DRAFTER)
    fixed = simulate(work, setup(window=1))
    followed = simulate(work, setup(window=1, reconfigure=rule, reconfigure_every=50.0))
    assert followed.makespan_ms < 0.8 * fixed.makespan_ms


def test_a_request_well_below_the_average_gets_a_window_of_its_own():
    windows = Reconfiguration(VERIFIER, DRAFTER)(np.asarray([9_000] * 319 + [3_000]), np.full(320, 10_000))
    assert len(set(windows[:319])) == 1 and windows[319] < windows[0]


def test_a_request_below_the_average_by_chance_keeps_the_groups_window():
    windows = Reconfiguration(VERIFIER, DRAFTER)(np.asarray([80] * 63 + [78]), np.full(64, 100))
    assert len(set(windows)) == 1


def test_the_running_curve_falls_from_all_to_none():
    times, running = simulate(mixed([10, 20, 30], 0.5), setup()).running_curve(50)
    assert running[0] == 3 and running[-1] == 0 and (np.diff(running) <= 0).all() and len(times) == 50


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24),
    groups=st.integers(1, 5),
    mode=st.sampled_from(Mode),
    window=st.integers(1, 9),
    rates=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    races=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_is_generated_once_and_nobody_is_lost(lengths, groups, mode, window, rates, races, seed):
    groups = min(groups, len(lengths))
    races = races and mode is not Mode.PLAIN
    is_decoupled = mode in (Mode.DECOUPLED, Mode.WAITING)
    plan = setup(
        mode,
        groups=groups,
        drafters=(DRAFTER, OTHER),
        window=window,
        prefill_ms=0.01,
        reconfigure=Reconfiguration(VERIFIER, DRAFTER) if is_decoupled else None,
        reconfigure_every=20.0,
        racing=RACING if races else None,
    )
    done = simulate(mixed(lengths, *rates), plan, seed)
    assert done.counts["tokens"] == sum(lengths) if not races else done.counts["tokens"] >= sum(lengths)
    assert np.isfinite(done.finish_ms).all() and (done.finish_ms > 0.0).all()
    assert (done.winner >= 0).all() and (done.winner < groups).all()
    assert (done.busy_ms >= -1e-9).all() and (done.busy_ms <= done.makespan_ms * (1 + 1e-12)).all()
    assert done.counts["excess"] == 0 and done.counts["wasted"] <= done.counts["drafted"]
    assert done.races_won <= done.races


def test_fewer_requests_than_groups_are_refused():
    with pytest.raises(ConfigError, match="2 requests on 3 groups"):
        simulate(mixed([5, 5], 0.5), setup(groups=3))
