"""The GPU measurements' engine part, on whatever device vLLM runs here: a tiny model, and no figure looked at."""

import pytest

from bench.gpu.engines import Engines
from bench.gpu.plan import Cell, Plan

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_stock_and_ours_hold_equal_random_weights_and_yield_equal_tokens(tmp_path):
    plan = Plan(model="tiny", cells=(Cell(2, 64),), taus=(4.0,), rivals=(), tokens=24, repeats=1)
    with Engines(plan, tmp_path, print, is_verbose=False) as engines:
        engines.run()
    (result,) = engines.results
    assert result.row.identical, result.row.difference
    # both rounds, the warm-up included
    assert result.compared == 2 * 2 * 24
    assert result.row.steps < result.row.stock_steps == 24
    assert result.split["accepted"] > 0
    assert result.as_dict()["row"]["identical"] is True
