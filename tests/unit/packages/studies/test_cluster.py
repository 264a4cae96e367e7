"""A batch on many engines under the product's own ladder, with engines that fail."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specrollout.bench.studies import cluster
from vllm_specrollout.bench.studies.answers import Workload
from vllm_specrollout.bench.studies.cluster import Site, simulate
from vllm_specrollout.bench.studies.formulas import StepLine

from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate
from vllm_specrollout.replay.anchors import RealSteps

VERIFIER = StepLine(base=5.0, request=0.05, steep=0.017, knee=256.0)
FREE, MODEL = StepLine(base=0.0), StepLine(base=2.0)


def mixed(lengths, *rows):
    """A workload with one row of acceptances per method, the same for all requests where it is a number."""
    acceptance = np.stack([np.broadcast_to(np.asarray(row, dtype=float), len(lengths)) for row in rows])
    return Workload(length=np.asarray(lengths, dtype=np.int64), acceptance=acceptance)


def site(engines=2, mode="off", **given):
    given = {"drafts": False, "prefill_ms": 0.0, "prompt": 0, **given}
    return Site(engines=engines, per_host=8, places=64, verifier=VERIFIER, drafters=(FREE, MODEL), ladder=mode, **given)


def on(*counts):
    """So many requests on each engine."""
    names = [f"e{i}" for i, count in enumerate(counts) for _ in range(count)]
    return {f"r{i}": name for i, name in enumerate(names)}


def test_a_plain_batch_takes_a_step_per_token_and_gets_faster_as_requests_end():
    done = simulate(mixed([10, 30], 0.0, 0.0), site(1), on(2))
    first = 10 * VERIFIER.step_ms(2)
    assert done.finish_ms == pytest.approx([first, first + 20 * VERIFIER.step_ms(1)])
    assert done.tokens == pytest.approx(40) and done.busy_ms == pytest.approx(done.makespan_ms)
    assert (done.steps, done.request_steps) == (pytest.approx(30), pytest.approx(40))


def test_drafts_have_the_speed_of_their_formula():
    done = simulate(mixed([9000], 0.76, 0.0), site(1, drafts=True), on(1))
    best = max(coupled_rate(FREE, VERIFIER, 1, window, 0.76) for window in range(1, 17))
    assert 9000 / done.makespan_ms == pytest.approx(best, rel=1e-6)


def test_nobody_drafts_where_plain_steps_yield_more():
    # any draft makes a step three times as long
    steps = RealSteps(plain=((1, 5.0),), drafted=((1, 15.0),), rows=((1, 0.0),), prompt_ms=0.0)
    work, (plain, drafted) = mixed([300, 300], [0.2, 0.2], 0.0), (site(1), site(1, drafts=True))
    times = [simulate(work, replace(one, verifier=steps), on(2)).makespan_ms for one in (plain, drafted)]
    assert times == [pytest.approx(1500.0), pytest.approx(1500.0)]


def test_engines_with_a_drafter_apart_have_the_speed_of_its_formula():
    drafter = StepLine(base=1.0)
    apart = replace(site(1, drafts=True, is_apart=True), drafters=(drafter, MODEL))
    best = max(decoupled_rate(drafter, VERIFIER, 1, window, 0.8) for window in range(1, 17))
    done = simulate(mixed([10_000], 0.8, 0.0), apart, on(1))
    assert 10_000 / done.makespan_ms == pytest.approx(best, rel=1e-3)


def test_a_lent_drafter_is_not_used_where_it_makes_the_batch_slower():
    steps = RealSteps(plain=((1, 5.0),), drafted=((1, 20.0),), rows=((1, 0.0),), prompt_ms=0.0)
    work = mixed([4000] * 8 + [10], 0.1, [0.3] * 9)
    off, attach = (simulate(work, replace(site(mode=mode), verifier=steps), on(8, 1)) for mode in ("off", "attach"))
    assert attach.counts["attach"] >= 1 and attach.makespan_ms == pytest.approx(off.makespan_ms)


@pytest.mark.parametrize(
    ("given", "more_ms"),
    [
        pytest.param({"prompt_ms": 12.5}, 12.5, id="a step that holds prompts costs more, once for all of them"),
        pytest.param({"prompt": 100, "prefill_ms": 0.5}, 100.0, id="contexts are computed before the first step"),
    ],
)
def test_prompts_cost_their_time(given, more_ms):
    plain, held = (simulate(mixed([10, 10], 0.0, 0.0), site(1, **one), on(2)) for one in ({}, given))
    assert held.makespan_ms == pytest.approx(plain.makespan_ms + more_ms)


def test_a_straggler_is_drafted_for_from_an_engine_that_is_idle():
    work = mixed([4000, 10], [0.1, 0.9], 0.9)
    alone, attach = (simulate(work, site(mode=mode, drafts=True), on(1, 1)) for mode in ("off", "attach"))
    assert attach.counts["attach"] >= 1 and attach.tokens == pytest.approx(4010)
    assert attach.makespan_ms < 0.7 * alone.makespan_ms


def test_half_of_a_batch_moves_where_smaller_batches_repay_the_prefill():
    # a request costs as much as the whole rest of a step
    dear = StepLine(base=5.0, request=5.0)
    works = mixed([4000] * 4 + [10], 0.0, 0.0)
    off, move = (
        simulate(works, replace(site(mode=mode), verifier=dear, prompt=10), on(4, 1)) for mode in ("off", "move")
    )
    assert move.counts["move"] >= 2 and move.makespan_ms < 0.8 * off.makespan_ms


def test_the_products_own_ladder_decides(monkeypatch):
    work, run = mixed([4000, 10], [0.1, 0.9], 0.9), site(mode="attach", drafts=True)
    before = simulate(work, run, on(1, 1))
    asked = []

    def nobody_helps(engines, *rest):
        asked.append(len(engines))
        return []

    monkeypatch.setattr(cluster.ladder, "lend", nobody_helps)
    after = simulate(work, run, on(1, 1))
    assert asked and after.makespan_ms > 1.3 * before.makespan_ms


def test_answers_of_a_failed_engine_go_on_elsewhere_from_where_they_were():
    work = mixed([1000, 1000], 0.0, 0.0)
    done = simulate(work, site(failures=((3000.0, range(1)),)), on(1, 1))
    assert done.counts["resubmitted"] == 1 and done.tokens == pytest.approx(2000)
    # it waits for the next beat, and then shares an engine
    assert done.makespan_ms < 1.3 * 1000 * VERIFIER.step_ms(2)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    engines=st.integers(1, 5),
    mode=st.sampled_from(("off", "move", "attach")),
    drafts=st.booleans(),
    failures=st.lists(st.tuples(st.floats(0.0, 9000.0), st.integers(0, 5), st.integers(1, 5)), max_size=4),
    seed=st.integers(0, 9),
)
def test_a_failure_of_any_engines_at_any_time_loses_no_request(lengths, engines, mode, drafts, failures, seed):
    rng = np.random.default_rng(seed)
    first = {f"r{i}": f"e{int(rng.integers(engines))}" for i in range(len(lengths)) if rng.random() < 0.8}
    work = mixed(lengths, rng.random(len(lengths)), rng.random(len(lengths)))
    failed = tuple((ms, range(begin, begin + count)) for ms, begin, count in failures)
    setting = site(engines, mode, drafts=drafts, failures=failed, restart_ms=500.0, prefill_ms=0.02, prompt=50)
    done = simulate(work, setting, first)
    assert np.isfinite(done.finish_ms).all() and (done.finish_ms > 0.0).all()
    assert done.tokens == pytest.approx(sum(lengths), abs=1e-3), "nothing is generated twice"
