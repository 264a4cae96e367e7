import json
from pathlib import Path

import numpy as np
import pytest

from vllm_specrollout.metrics import METRICS, PREFIX, Meter, MeteredSpeculation, marked, take_marked
from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.step import unite_naively
from vllm_specrollout.types import Choice, Decision, DraftTree, Feedback, RequestView, Shape, StepTiming, chain

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "metrics.md"


def feedback(source, accepted):
    n = len(source)
    return Feedback(
        "r", n, len(accepted), np.arange(-1, n - 1, dtype=np.int32), np.array(source, dtype=np.int32),
        np.zeros(n, dtype=np.float32), np.array(accepted, dtype=np.int32),
    )  # fmt: skip


def timing(ms, nodes, is_decode_only=True):
    return StepTiming(4, 4 + nodes, nodes, 0, 4, ms, is_decode_only)


def choice(ms=0.0, tokens=0.0, reason="pays", is_on=True):
    return Choice(is_on, reason, 6, expected_tokens=tokens, expected_ms=ms)


def test_nodes_are_counted_for_the_drafter_that_proposed_them():
    meter = Meter(("history", "ngram"), 1)
    meter.settled([feedback([0, 1, 1], [0, 2]), feedback([1, 1], [])], None)
    assert meter.take() == {
        "verified_nodes/history": 1,
        "verified_nodes/ngram": 4,
        "accepted_nodes/history": 1,
        "accepted_nodes/ngram": 1,
        "tree_nodes/3": 1,
        "tree_nodes/2": 1,
    }
    assert meter.take() == {}


def test_a_switch_is_told_with_the_reason_of_the_new_choice():
    meter = Meter(("ngram",), 1)
    for is_on, reason in ((True, "pays"), (True, "explore"), (False, "batch too large"), (False, "x"), (True, "pays")):
        meter.chose(choice(is_on=is_on, reason=reason), 6 * is_on)
    counts = meter.take()
    switches = {key: count for key, count in counts.items() if key.startswith("switches")}
    assert switches == {"switches/off/batch too large": 1, "switches/on/pays": 1}
    assert counts["is_on"] == 1 and counts["budget_nodes"] == 6 and counts["decisions/on/pays"] == 2


@pytest.mark.parametrize(("lag", "first"), [(0, 250), (1, 100)])
def test_a_time_is_compared_with_the_choice_of_its_own_step(lag, first):
    meter = Meter(("ngram",), lag)
    meter.chose(choice(ms=9.0), 6)
    meter.settled([], None)
    meter.chose(choice(ms=12.5), 6)
    meter.settled([], timing(10.0, 6))
    assert meter.take()[f"cost_error/{first}"] == 1


def test_steps_that_were_cut_or_computed_a_prompt_are_not_compared():
    meter = Meter(("ngram",), 0)
    for cost in (timing(10.0, 5), timing(10.0, 6, is_decode_only=False), None):
        meter.chose(choice(ms=10.0), 6)
        meter.settled([], cost)
    assert not any(key.startswith("cost_error") for key in meter.take())


def test_gain_counts_only_where_some_was_expected():
    meter = Meter(("ngram",), 1)
    for expected in (2.5, 0.0, 1.5):
        meter.chose(choice(tokens=expected), 6)
        meter.settled([feedback([0, 0, 0], [0, 1])], None)
    counts = meter.take()
    assert counts["expected_tokens"] == 4000 and counts["gained_tokens"] == 4


def test_reasons_without_end_do_not_make_labels_without_end():
    meter = Meter(("ngram",), 1)
    for i in range(100):
        meter.chose(choice(reason=f"reason {i}"), 6)
    counts = meter.take()
    assert sum(key.startswith("decisions/") for key in counts) == 33 and counts["decisions/on/other"] == 68


def test_counts_travel_as_json_among_keys_of_others_and_are_taken_out():
    mixed = json.loads(json.dumps({"waiting_to_start": 2, **marked({"decisions/on/pays": 3, "is_on": 1})}))
    assert take_marked(mixed) == [("decisions", ["on", "pays"], 3), ("is_on", [], 1)]
    assert mixed == {"waiting_to_start": 2}


class Repeats:
    name = "repeats"

    def propose(self, views, decisions) -> list[DraftTree]:
        return [chain([7] * 9) for _ in views]

    def observe(self, feedback):
        pass

    def finish(self, ending):
        pass

    def forget(self, request_id):
        pass


def test_what_was_proposed_beyond_the_budget_is_drafted_but_not_chosen():
    speculation = MeteredSpeculation([Repeats()], FixedBudget(4, 4), unite_naively, Meter(("repeats",), 1))
    view = RequestView("r", np.arange(8, dtype=np.int32), 4, 100)
    assert [tree.size for tree in speculation.prepare([view, view])] == [4, 4]
    counts = speculation.meter.take()
    assert counts["drafted_nodes/repeats"] == 18 and counts["budget_nodes"] == 8


def test_a_budget_given_later_is_counted_too():
    speculation = MeteredSpeculation([Repeats()], FixedBudget(4, 4), unite_naively, Meter(("repeats",), 1))
    speculation.policy = FixedBudget(2, 2)
    speculation.prepare([RequestView("r", np.arange(8, dtype=np.int32), 4, 100)])
    assert speculation.meter.take()["budget_nodes"] == 2


def test_a_step_that_is_rested_through_is_counted_like_one_that_was_decided():
    counts = []
    for is_resting in (True, False):
        speculation = MeteredSpeculation([Repeats()], OffBudget(), unite_naively, Meter(("repeats",), 1))
        if is_resting:
            assert speculation.rests(1)
        else:
            speculation.prepare([RequestView("r", np.arange(8, dtype=np.int32), 4, 100)])
        counts.append(speculation.meter.take())
    assert counts[0] == counts[1] == {"decisions/off/off": 1, "is_on": 0, "budget_nodes": 0}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_in_the_guide_with_its_labels(metric):
    name = f"{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}"
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` | {metric.kind}")]
    assert len(rows) == 1 and all(f"`{label}`" in rows[0] for label in metric.labels)


def test_windows_count_only_requests_that_may_be_drafted_for():
    meter = Meter(("ngram",), 1)
    meter.allowed([Decision(8, 4, Shape.TREE), Decision(0, 0, Shape.OFF), Decision(3, 16, Shape.CHAIN)])
    assert meter.take() == {"windows": 2, "window_tokens": 4 + 3}
    meter.allowed([Decision(0, 0, Shape.OFF)])
    assert meter.take() == {}
