import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster.simulate.builders import DRAFTER, OTHER, VERIFIER, setup
from vllm_specrollout.cluster.simulate.group import Waiting
from vllm_specrollout.cluster.simulate.rollout import Racing, simulate
from vllm_specrollout.cluster.simulate.windows import Reconfiguration
from vllm_specrollout.cluster.simulate.workload import Workload, constant_workload
from vllm_specrollout.decoupled.rates import Mode, coupled_rate
from vllm_specrollout.errors import ConfigError

RACING = Racing(most=2, windows=(4, 4), attach_ms=100.0)


def mixed(lengths, *rows):
    """A workload with one row of acceptances per method, the same for all requests where it is a number."""
    acceptance = np.stack([np.broadcast_to(np.asarray(row, dtype=float), len(lengths)) for row in rows])
    return Workload(length=np.asarray(lengths, dtype=np.int64), acceptance=acceptance)


def test_one_plain_request_takes_a_step_per_token():
    done = simulate(constant_workload([250], 0.5), setup(Mode.PLAIN))
    assert done.makespan_ms == pytest.approx(250 * VERIFIER.step_ms(1))
    assert done.counts.steps == 250 and done.idle_share == pytest.approx(0.0)


def test_a_plain_batch_gets_faster_as_requests_end():
    done = simulate(constant_workload([10, 30], 0.5), setup(Mode.PLAIN))
    first = 10 * VERIFIER.step_ms(2)
    assert done.finish_ms == pytest.approx([first, first + 20 * VERIFIER.step_ms(1)])


def test_a_long_coupled_request_has_the_speed_of_its_formula():
    done = simulate(constant_workload([20_000], 0.7), setup(Mode.COUPLED))
    assert 20_000 / done.makespan_ms == pytest.approx(coupled_rate(DRAFTER.line, VERIFIER, 1, 3, 0.7), rel=0.02)


def test_the_same_seed_gives_the_same_rollout_and_another_seed_another():
    work = constant_workload([100, 200, 300], 0.6)
    runs = [simulate(work, setup(), seed) for seed in (1, 1, 2)]
    assert runs[0].finish_ms.tolist() == runs[1].finish_ms.tolist() != runs[2].finish_ms.tolist()


def test_a_queue_waits_for_places():
    done = simulate(constant_workload([10] * 5, 0.5), setup(Mode.PLAIN, max_batch=2))
    step = VERIFIER.step_ms(2)
    assert done.finish_ms == pytest.approx([10 * step, 10 * step, 20 * step, 20 * step, 20 * step + 10 * 13.06])


def test_prompts_are_computed_before_the_first_step():
    done = simulate(constant_workload([10], 0.5, prompt=100), setup(Mode.PLAIN, prefill_ms=0.5))
    assert done.makespan_ms == pytest.approx(50.0 + 10 * VERIFIER.step_ms(1))


def test_requests_that_outgrow_the_kv_cache_go_back_and_lose_no_token():
    work = constant_workload([200] * 6, 0.8, prompt=10)
    free, tight = (simulate(work, setup(kv_tokens=kv, prefill_ms=0.1), 3) for kv in (1e9, 500))
    assert free.preempted == 0 and tight.preempted > 0
    assert tight.tokens == tight.counts.tokens == 1200
    assert tight.makespan_ms > free.makespan_ms


def test_a_freed_group_with_a_better_drafter_wins_the_race():
    # the second group is free at once; its method is always right, the first one's never
    work = mixed([2000, 5], 0.0, 1.0)
    alone = simulate(work, setup(groups=2, methods=(DRAFTER, OTHER)))
    raced = simulate(work, setup(groups=2, methods=(DRAFTER, OTHER), racing=RACING))
    assert raced.races == 1 and raced.races_won == 1
    assert raced.winner.tolist() == [1, 1] and raced.winner_method.tolist() == [1, 0]
    assert raced.makespan_ms < 0.6 * alone.makespan_ms
    # the loser's tokens were generated too, but count once
    assert raced.tokens == 2005 < raced.counts.tokens


def test_a_copy_begins_with_its_model_and_its_context():
    work = mixed([2000, 5], 0.0, 1.0)
    common = {"groups": 2, "methods": (DRAFTER, OTHER)}
    fast = simulate(work, setup(**common, racing=RACING))
    slow = simulate(work, setup(**common, racing=Racing(most=2, windows=(4, 4), attach_ms=1100.0)))
    assert slow.makespan_ms > fast.makespan_ms
    recomputed = simulate(work, setup(**common, racing=RACING, prefill_ms=10.0))
    assert recomputed.makespan_ms > fast.makespan_ms


def test_losers_leave_at_the_end_of_their_step():
    # the third request goes on, so the rollout does not end with the race, and the loser's group joins another
    work = mixed([1000, 5, 3000], 0.0, [1.0, 0.0, 0.0])
    plan = Racing(most=1, windows=(4, 4), attach_ms=0.0)
    done = simulate(work, setup(groups=3, methods=(DRAFTER, OTHER), racing=plan))
    assert done.winner[0] == 1 and done.winner[1] == 1
    assert done.cancelled >= 1 and done.races >= 2


def test_a_copy_that_comes_too_late_is_cancelled():
    work = mixed([100, 5], 1.0, 0.0)
    done = simulate(work, setup(groups=2, methods=(DRAFTER, OTHER), racing=RACING))
    assert done.winner.tolist() == [0, 1] and done.races_won == 0


def test_reconfiguration_is_asked_every_so_many_tokens():
    asked = []

    def reconfigure(hits, trials):
        asked.append(len(hits))
        assert (hits <= trials).all() and trials.min() > 0
        return np.full(len(hits), 2), np.ones(len(hits), dtype=bool)

    simulate(constant_workload([1000, 1000], 0.6), setup(reconfigure=reconfigure, reconfigure_every=100.0))
    assert 8 <= len(asked) <= 12 and asked[0] == 2


def test_windows_that_follow_the_batch_beat_fixed_ones_in_a_tail():
    work = constant_workload([60] * 300 + [4000], 0.85)
    fixed = simulate(work, setup(window=1))
    rule = Reconfiguration(VERIFIER, DRAFTER.line)
    followed = simulate(work, setup(window=1, reconfigure=rule, reconfigure_every=50.0))
    assert followed.makespan_ms < 0.8 * fixed.makespan_ms


def test_the_running_curve_falls_from_all_to_none():
    times, running = simulate(constant_workload([10, 20, 30], 0.5), setup()).running_curve(50)
    assert running[0] == 3 and running[-1] == 0 and (np.diff(running) <= 0).all() and len(times) == 50


def test_a_request_that_a_copy_ended_while_it_waited_again_does_not_come_back():
    lengths = [14, 20, 13, 16, 24, 6, 53, 18, 6, 49, 29, 6, 42, 37, 42, 22, 15, 25]
    tight = {"groups": 3, "methods": (DRAFTER, OTHER), "window": 1, "max_batch": 5, "kv_tokens": 40.0}
    done = simulate(mixed(lengths, 1.0, 0.7927), setup(Mode.COUPLED, **tight, prefill_ms=0.01, racing=RACING), 69)
    assert done.preempted > 0 and done.races_won > 0 and done.tokens == sum(lengths)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24),
    groups=st.integers(1, 5),
    mode=st.sampled_from(Mode),
    waiting=st.sampled_from(Waiting),
    window=st.integers(1, 9),
    rates=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    max_batch=st.integers(1, 8),
    kv_tokens=st.sampled_from([40.0, 200.0, float("inf")]),
    races=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_is_generated_once_and_nobody_is_lost(
    lengths, groups, mode, waiting, window, rates, max_batch, kv_tokens, races, seed
):
    work = mixed(lengths, *rates)
    races = races and mode is not Mode.PLAIN
    done = simulate(
        work,
        setup(
            mode,
            groups=min(groups, len(lengths)),
            methods=(DRAFTER, OTHER),
            waiting=waiting,
            window=window,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
            prefill_ms=0.01,
            reconfigure=Reconfiguration(VERIFIER, DRAFTER.line) if mode is Mode.DECOUPLED else None,
            reconfigure_every=20.0,
            racing=RACING if races else None,
        ),
        seed,
    )
    assert done.tokens == sum(lengths)
    assert done.counts.tokens == sum(lengths) if not races else done.counts.tokens >= sum(lengths)
    assert np.isfinite(done.finish_ms).all() and (done.finish_ms > 0.0).all()
    assert (done.winner >= 0).all() and (done.winner < min(groups, len(lengths))).all()
    assert (done.busy_ms >= -1e-9).all() and (done.busy_ms <= done.makespan_ms * (1 + 1e-12)).all()
    assert done.counts.excess == 0 and done.counts.wasted <= done.counts.drafted
    assert done.races_won <= done.races


def test_what_cannot_run_is_refused():
    work = constant_workload([5, 5], 0.5)
    with pytest.raises(ConfigError, match="2 methods, and acceptances for 1"):
        simulate(work, setup(methods=(DRAFTER, OTHER)))
    with pytest.raises(ConfigError, match="2 requests on 3 groups"):
        simulate(work, setup(groups=3))
    with pytest.raises(ConfigError, match="2 windows of racing copies for 1 methods"):
        simulate(work, setup(racing=RACING))
    with pytest.raises(ConfigError, match="cannot race"):
        simulate(work, setup(Mode.PLAIN, racing=Racing(most=2, windows=(4,), attach_ms=0.0)))
