import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import batch_of, chain, limits_of, proposed
from tests.unit.observe.engine import PROMPT, record_of, timing_of, view
from vllm_specrollout.drafters.base import UNBOUNDED
from vllm_specrollout.observe.metrics import LEAST_NODES, METRICS, PREFIX, Metrics, decode, encode
from vllm_specrollout.types import EMPTY_TREE, MOST_NODES, RequestBatch, StepPlan

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "metrics.md"


def from_sources(*sources):
    return replace(chain([7] * len(sources)), source=np.asarray(sources, dtype=np.int32))


def plan_of(nodes=6, ms=0.0, tokens=0.0, reason="pays", is_on=True):
    trees = batch_of([chain([7] * nodes) if nodes else EMPTY_TREE])
    reach = np.full(nodes, tokens / max(nodes, 1), dtype=np.float32)
    return StepPlan(trees, reason, is_on, reach=reach, expected_ms=ms)


def plan(metrics, plan, limits=None, proposals=()):
    limits = limits_of(1, 0) if limits is None else limits
    batch = RequestBatch.of([view(str(i), [1]) for i in range(len(limits.max_nodes))])
    metrics.planned(batch, limits, proposals, plan, 0.5)


def test_nodes_are_counted_by_the_context_of_their_requests_whatever_the_order_of_these():
    metrics = Metrics(("ngram",))
    views = [view(name, [1] * (tokens - PROMPT)) for name, tokens in (("b", 1024), ("a", 1023), ("c", 70_000))]
    trees = batch_of([from_sources(0, 0, 0), from_sources(0, 0), from_sources(0), EMPTY_TREE], ["a", "b", "c", "d"])
    metrics.stepped(record_of(trees, [[0, 1], [0], [], []], batch=RequestBatch.of(views)))
    assert {key: n for key, n in metrics.take().items() if key.startswith("context_nodes")} == {
        "context_nodes/verified/0": 3,
        "context_nodes/verified/1024": 2,
        "context_nodes/verified/65536": 1,
        "context_nodes/accepted/0": 2,
        "context_nodes/accepted/1024": 1,
    }


def test_what_the_trainer_told_is_kept_by_its_own_names_and_shown_by_the_metrics():
    metrics = Metrics(())
    told = {"number": 2, "trainer_rows": 7, "trainer_seconds": 3, "trainer_state/halted": 1, "head_match_rate/now": 80}
    metrics.told(told)
    assert metrics.trainer == told
    shown = {"trainer_work/rows": 7, "trainer_work/seconds": 3, "trainer_state/halted": 1, "head_match_rate/now": 80}
    assert metrics.take() == shown


ELSEWHERE = {"drafters_alive/process": 2, "decoupled/trees": 9, "decoupled/wasted_nodes": 2}


@pytest.mark.parametrize(
    ("what", "told", "shown"),
    [
        ("bounded", [("model", 92), ("other", UNBOUNDED)], {"most_tokens/model": 92}),
        ("compared", [(3, 0), (2, 1)], {"withheld_tokens/same": 4, "withheld_tokens/differing": 1}),
        ("elsewhere", [(3, 5, 2), (2, 4, 0)], ELSEWHERE),
        ("elsewhere", [(0, 0, 0)], {"drafters_alive/process": 0}),
        ("failed", [("drafter a/b",)], {"failures/drafter a per b": 1}),
        ("paused", [(1, "tokens/ms")], {"decisions/off/tokens per ms": 1, "is_on": 0}),
    ],
    ids=["contexts of drafters", "withheld tokens", "drafters elsewhere", "none now", "a slash", "a slash in a reason"],
)
def test_what_is_told_is_shown_under_its_labels(what, told, shown):
    metrics = Metrics(())
    for values in told:
        getattr(metrics, what)(*values)
    assert metrics.take() == shown


def test_nodes_of_some_drafters_are_known_since_the_engine_began_whatever_was_taken():
    metrics, trees = Metrics(("history", "near", "far")), batch_of([from_sources(0, 1, 1, 2)])
    metrics.stepped(record_of(trees, [[0, 1]]))
    metrics.take()
    metrics.stepped(record_of(trees, [[0, 1, 2, 3]]))
    assert metrics.nodes_of(("near", "far")) == (6, 4)
    assert metrics.nodes_of(("history",)) == (2, 2) and metrics.nodes_of(()) == (0, 0)


def alarms(metrics, nodes, accepted, source=0, version=0):
    """What is shown of who met nothing, after a step with so many nodes of one drafter."""
    sizes = [min(MOST_NODES, nodes - begin) for begin in range(0, nodes, MOST_NODES)]
    trees = batch_of([from_sources(*[source] * size) for size in sizes])
    batch = RequestBatch.of([view("a", [1], weights_version=version)])
    metrics.stepped(record_of(trees, [list(range(accepted)), *[[]] * (len(sizes) - 1)], batch=batch))
    return {key.removeprefix("accepted_nothing/"): n for key, n in metrics.take().items() if "nothing" in key}


def test_a_drafter_of_whom_nothing_was_accepted_since_the_last_weights_is_an_alarm_until_something_is(caplog):
    metrics, half = Metrics(("ngram", "model", "model_alternatives")), LEAST_NODES // 2
    assert alarms(metrics, half, 0, 1) == {}, "of few nothing is said"
    assert alarms(metrics, half, 0, 1) == {"model": 1, "all": 1}
    assert alarms(metrics, half, 0, 1) == {}, "it is said once"
    # another drafter meets the target: that one is still none that does
    assert alarms(metrics, 4, 1, 0) == {"all": 0}
    # and a drafter's alternatives are its own
    assert alarms(metrics, 4, 1, 2) == {"model": 0}
    assert alarms(metrics, 2 * half, 0, 1) == {}, "there was one under these weights"
    (line,) = [record.message for record in caplog.records]
    assert f"none of {LEAST_NODES} draft tokens" in line and "by drafter: all, model" in line


def test_new_weights_clear_the_alarm_and_begin_its_count_anew():
    metrics = Metrics(("model",))
    assert alarms(metrics, 8, 1) == {}
    assert alarms(metrics, LEAST_NODES, 0, version=1) == {"model": 1, "all": 1}, "what old weights accepted is old"
    assert alarms(metrics, LEAST_NODES - 1, 0, version=2) == {"model": 0, "all": 0}
    assert alarms(metrics, 1, 0, version=2) == {"model": 1, "all": 1}


@given(proposed(), st.integers(0, 99))
def test_every_node_is_counted_once(proposals, seed):
    metrics, names, rng = Metrics("abc"), "abc", np.random.default_rng(seed)
    trees = proposals[0]
    paths = []
    for i in range(trees.num_requests):
        path, node, tree = [], -1, trees.tree(i)
        while children := [j for j in range(tree.size) if tree.parents[j] == node]:
            if rng.random() < 0.3:
                break
            node = int(rng.choice(children))
            path.append(node)
        paths.append(path)
    metrics.stepped(record_of(trees, paths))
    plan(metrics, plan_of(), proposals=proposals)
    counts = metrics.take()
    accepted = [trees.tree(i).source[path].tolist() for i, path in enumerate(paths)]
    for source, name in enumerate(names):
        assert counts.get(f"nodes/verified/{name}", 0) == np.count_nonzero(trees.source == source)
        assert counts.get(f"nodes/accepted/{name}", 0) == sum(own.count(source) for own in accepted)
        found = sum(np.count_nonzero(one.source == source) for one in proposals)
        assert counts.get(f"nodes/drafted/{name}", 0) == found
    assert metrics.take() == {}


def test_a_node_of_a_drafter_without_a_name_is_counted_too():
    metrics = Metrics(("ngram",))
    metrics.stepped(record_of(batch_of([from_sources(3)]), [[]]))
    assert metrics.take() == {"nodes/verified/unknown": 1}


def test_decisions_are_counted_by_what_was_chosen_and_why():
    metrics = Metrics(("ngram",))
    for is_on, reason in ((True, "pays"), (True, "explore"), (False, "batch too large"), (False, "x"), (True, "pays")):
        plan(metrics, plan_of(6 * is_on, is_on=is_on, reason=reason))
    counts = metrics.take()
    assert counts["is_on"] == 1 and counts["decisions/on/pays"] == 2
    assert counts["decisions/off/batch too large"] == counts["decisions/off/x"] == counts["decisions/on/explore"] == 1


def test_a_paused_step_is_counted_like_one_that_was_decided():
    metrics = Metrics(("ngram",))
    metrics.paused(1, "off")
    paused = metrics.take()
    plan(metrics, plan_of(0, reason="off", is_on=False))
    assert paused == metrics.take() == {"decisions/off/off": 1, "is_on": 0}


def test_a_time_is_compared_with_the_plan_of_its_own_step():
    metrics = Metrics(("ngram",))
    plans = plan_of(ms=9.0), plan_of(ms=12.5)
    for each in plans:  # the second before the first one's step is over
        plan(metrics, each)
    for each, bucket in zip(plans, ("100", "250"), strict=True):
        metrics.stepped(record_of(each.trees, [[]], each, timing=timing_of(6, 10.0)))
        assert metrics.take()[f"cost_error/{bucket}"] == 1


@pytest.mark.parametrize(
    "timing",
    [timing_of(5), timing_of(6, is_decode_only=False), timing_of(6, ms=0.0), None],
    ids=["cut", "with a prompt", "no time", "not known"],
)
def test_a_step_that_is_not_the_predicted_one_is_not_compared(timing):
    metrics = Metrics(("ngram",))
    plan = plan_of(ms=10.0)
    metrics.stepped(record_of(plan.trees, [[]], plan, timing=timing))
    assert not any(key.startswith("cost_error") for key in metrics.take())


def test_reasons_without_end_do_not_make_labels_without_end():
    metrics = Metrics(("ngram",))
    for i in range(100):
        plan(metrics, plan_of(reason=f"reason {i}"))
    counts = metrics.take()
    assert sum(key.startswith("decisions/") for key in counts) == 33 and counts["decisions/on/other"] == 68


def test_counts_travel_as_json_among_keys_of_others_and_are_taken_out():
    mixed = json.loads(json.dumps({"waiting_to_start": 2, **encode({"decisions/on/pays": 3, "is_on": 1})}))
    assert decode(mixed) == [("decisions", ["on", "pays"], 3), ("is_on", [], 1)]
    assert mixed == {"waiting_to_start": 2}


@given(proposed())
def test_every_count_is_a_whole_number_that_json_takes(proposals):
    metrics = Metrics(("a", "b", "c"))
    plan(metrics, plan_of(ms=3.0, tokens=1.0), limits_of(2, 3), proposals)
    chosen = plan_of(ms=3.0, tokens=1.0)
    metrics.stepped(record_of(chosen.trees, [[0]], chosen, timing=timing_of(6)))
    counts = metrics.take()
    assert json.loads(json.dumps(counts)) == counts and all(type(count) is int for count in counts.values())


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_in_the_guide_with_its_labels(metric):
    name = f"{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}"
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` | {metric.kind}")]
    assert len(rows) == 1 and all(f"`{label}`" in rows[0] for label in metric.labels)
