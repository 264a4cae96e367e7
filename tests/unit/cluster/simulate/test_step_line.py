import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.errors import ConfigError

terms = st.floats(0.0, 100.0)


def test_rows_cost_more_beyond_the_knee_alone():
    line = StepLine(base=10.0, request=0.5, row=0.1, steep=0.3, knee=20.0)
    assert line.step_ms(2) == pytest.approx(11.2)
    assert line.step_ms(2, 18) == pytest.approx(13.0)
    assert line.step_ms(2, 28) == pytest.approx(16.0)


@given(terms, terms, terms, terms, terms, st.integers(0, 500), st.integers(0, 500))
def test_a_step_never_gets_shorter_with_more_rows(base, request, row, steep, knee, rows, more):
    line = StepLine(base=base, request=request, row=row, steep=steep, knee=knee)
    assert line.step_ms(1, rows + more) >= line.step_ms(1, rows) * (1 - 1e-12)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_term_below_nothing_is_refused(value):
    with pytest.raises(ConfigError, match="below 0"):
        StepLine(base=1.0, row=value)
