import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.formulas import MAX_WINDOW, StepLine, best_window

from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate
from vllm_specrollout.errors import ConfigError

VERIFIER = StepLine(base=13.0, request=0.06, steep=0.044, knee=256.0)
DRAFTER = StepLine(base=2.03, request=0.014)
terms = st.floats(0.0, 100.0)


def test_rows_cost_more_beyond_the_knee_alone():
    line = StepLine(base=10.0, request=0.5, row=0.1, steep=0.3, knee=20.0)
    assert [line.step_ms(2), line.step_ms(2, 18), line.step_ms(2, 28)] == pytest.approx([11.2, 13.0, 16.0])


@given(terms, terms, terms, terms, terms, st.integers(0, 500), st.integers(0, 500))
def test_a_step_never_gets_shorter_with_more_rows(base, request, row, steep, knee, rows, more):
    line = StepLine(base=base, request=request, row=row, steep=steep, knee=knee)
    assert line.step_ms(1, rows + more) >= line.step_ms(1, rows) * (1 - 1e-12)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_term_below_nothing_is_refused(value):
    with pytest.raises(ConfigError, match="below 0"):
        StepLine(base=1.0, row=value)


def test_the_best_window_grows_with_the_acceptance_and_shrinks_with_the_batch():
    coupled = [best_window(coupled_rate, p, 1, VERIFIER, DRAFTER) for p in (0.2, 0.5, 0.8, 0.95)]
    assert coupled == sorted(coupled) and coupled[0] < coupled[-1] <= MAX_WINDOW
    ahead = [best_window(decoupled_rate, 0.8, batch, VERIFIER, DRAFTER) for batch in (1, 128, 320)]
    assert ahead == sorted(ahead, reverse=True) and ahead[0] > ahead[-1]
