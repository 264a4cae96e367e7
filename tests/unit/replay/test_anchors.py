"""Steps of an H200: what was measured comes out of the table as it went in, and nothing falls where a batch grows."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.what_if import TRY

from vllm_specrollout.replay.anchors import MEASURED, RECKONED, TAIL_RECKONED

RESULT = Path(__file__).resolve().parents[3] / "bench/results/try.json"


def test_the_run_is_the_recorded_one():
    (row, _) = json.loads(RESULT.read_text())["runs"][0]["rows"]
    recorded = [row[name] for name in ("stock_makespan_s", "stock_steps", "makespan_s", "steps", "speedup")]
    assert list(TRY.values()) == [*recorded, row["tokens_per_step"]]


@pytest.mark.parametrize("requests", [12, 40, 64])
def test_measured_steps_are_those_of_the_run(requests):
    drafts = 256 / requests - 1.0
    assert MEASURED.ms(requests) == pytest.approx(1751.28 / 305)
    assert MEASURED.ms(requests, drafts) == pytest.approx(10.0) == TAIL_RECKONED.ms(requests, drafts)


def test_only_batches_below_those_measured_are_reckoned():
    assert MEASURED.ms(1, 15) == 10.0 and TAIL_RECKONED.ms(1, 15) == pytest.approx(5.45 * 10 / 8.4)
    assert MEASURED.plain == TAIL_RECKONED.plain


@pytest.mark.parametrize(
    ("batch", "drafts", "ms"), [(1, 0, 4.43), (64, 0, 5.34), (8, 7, 4.94), (32, 3, 5.62), (32, 7, 8.11), (64, 1, 6.23)]
)
def test_reckoned_steps_are_the_sums_of_their_parts(batch, drafts, ms):
    assert RECKONED.ms(batch, drafts) == pytest.approx(ms, abs=0.1)


@given(
    st.sampled_from([MEASURED, TAIL_RECKONED, RECKONED]), st.integers(1, 300), st.integers(1, 300), st.integers(0, 20)
)
def test_more_requests_or_drafts_never_take_less(steps, requests, more, drafts):
    assert steps.ms(requests, drafts) <= steps.ms(requests + more, drafts) + 1e-9
    assert steps.ms(requests, drafts) <= steps.ms(requests, drafts + more) + 1e-9
