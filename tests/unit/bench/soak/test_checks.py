"""What a soak is judged by: each check fails when what it looks at goes wrong."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from bench.runner.server import Holding
from bench.soak import checks
from bench.soak.checks import Comparison, grown
from bench.soak.drive import Observations, Sample, parse_counts

_COUNTS = {"drafted": 0.0, "accepted": 0.0, "failures": 0.0, "tokens": 0.0, "preemptions": 0.0}
_IDLE = {**_COUNTS, "running": 0.0, "waiting": 0.0}


def sample(at_s, *, rss=100.0, files=9, sockets=3, disk=1.0, **counts):
    holding = Holding(processes=1, rss_mib=rss, files=files, sockets=sockets)
    return Sample(at_s=at_s, holdings={"worker": holding}, disk_mib=disk, counts={**_IDLE, **counts})


def outcome(of=lambda i: {}, idle=({}, {}), **counts):
    """A sample every ten seconds of ten minutes."""
    samples = [sample(10.0 * i, drafted=10.0 * i, **of(i)) for i in range(61)]
    edges = (sample(0.0, **idle[0]), sample(601.0, **idle[1]))
    return Observations(samples=samples, requests=Counter(counts), idle=edges)


def by_name(found):
    return {check.name: check for check in found}


def test_memory_that_stays_passes_and_memory_that_grows_fails_for_its_role_and_for_all():
    good = by_name(checks.memory(outcome().samples, 300.0, 0.02))
    assert all(check.passed for check in good.values()) and set(good) == {"memory, worker", "memory, all processes"}
    bad = by_name(checks.memory(outcome(lambda i: {"rss": 100.0 + 0.15 * i}).samples, 300.0, 0.02))
    assert [check.passed for check in bad.values()] == [False, False]


def test_a_run_that_is_too_short_judges_no_growth():
    (check, _) = checks.memory(outcome().samples[:32], 300.0, 0.02)
    assert check.passed is None and check.detail


def test_files_and_sockets_that_stay_open_fail():
    good = by_name(checks.handles(outcome(), 300.0))
    assert good["files, worker"].passed and good["sockets, idle"].passed
    leaky = outcome(lambda i: {"files": 9 + i // 5}, idle=({"sockets": 3}, {"sockets": 6}))
    bad = by_name(checks.handles(leaky, 300.0))
    assert not bad["files, worker"].passed and not bad["sockets, idle"].passed


def test_the_disk_is_judged_by_its_peak():
    run = outcome(lambda i: {"disk": 70.0 if i == 5 else 1.0})
    assert not checks.disk(run.samples, 64.0).passed and checks.disk(run.samples, 71.0).passed


def test_lost_requests_requests_left_behind_and_a_dead_server_fail():
    good = by_name(checks.requests(outcome(answered=5), True))
    assert not [name for name, check in good.items() if check.passed is False]
    assert good["requests answered"].value == 5
    for name, found in {
        "requests lost": checks.requests(outcome(lost=1), True),
        "requests still in the server": checks.requests(outcome(idle=({}, {"running": 1.0})), True),
        "servers that died": checks.requests(outcome(), False),
    }.items():
        assert [one for one, check in by_name(found).items() if check.passed is False] == [name]


def test_a_server_that_stops_drafting_or_answers_wrongly_elsewhere_fails():
    run = outcome()
    names = ("drafted in the last quarter", "wrong answers of other routes")
    assert [by_name(checks.drafting(run))[name].passed for name in names] == [True, True]
    run.samples = [replace(one, counts={**one.counts, "drafted": min(one.at_s, 300.0)}) for one in run.samples]
    run.routes["wrong"] = 1
    assert [by_name(checks.drafting(run))[name].passed for name in names] == [False, False]


def test_ties_pass_and_other_differences_do_not():
    assert checks.answers(Comparison(9, 99, ("a tie",), ())).passed
    found = checks.answers(Comparison(9, 99, (), ("request 3",)))
    assert (found.passed, found.identical) == (False, False)


def test_counters_are_summed_over_their_labels():
    text = """# TYPE vllm:spec_rollout_nodes_total counter
vllm:spec_rollout_nodes_total{stage="drafted",source="ngram"} 3.0
vllm:spec_rollout_nodes_total{stage="drafted",source="history"} 4.0
vllm:spec_rollout_nodes_total{stage="verified",source="history"} 2.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
"""
    found = parse_counts(text)
    assert (found["drafted"], found["running"], found["accepted"]) == (7.0, 2.0, 0.0)


TIMES = [5.0 * i for i in range(361)]


def settled(values, *, is_share=True):
    return grown("memory", "MiB", list(zip(TIMES, values, strict=True)), 300.0, 0.02, is_share=is_share).value


def test_what_stays_or_settles_or_has_peaks_does_not_grow():
    assert settled([100.0] * 361) == settled([100.0] * 361, is_share=False) == 0.0
    assert settled([50.0 if at < 300.0 else 100.0 for at in TIMES]) == 0.0
    rng = random.Random(1)
    assert abs(settled([100.0 + (40.0 if rng.random() < 0.2 else 0.0) for _ in TIMES])) < 1e-9


def test_a_leak_is_its_rate():
    # 12 an hour, upon 100
    values = [100.0 + 12.0 * at / 3600.0 for at in TIMES]
    # the quarters' medians are three quarters of 25 minutes apart
    assert settled(values, is_share=False) == pytest.approx(12.0 * 0.75 * 1500.0 / 3600.0, rel=0.02)
    assert settled(values) == pytest.approx(0.0365, abs=0.001)


def test_one_step_upwards_is_growth_wherever_it_comes():
    for minute in (12, 20, 25):
        assert settled([100.0 if at < 60.0 * minute else 103.0 for at in TIMES]) > 0.02
