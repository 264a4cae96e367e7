import pytest

from bench.runner.fields import Row
from bench.runner.results import SERVING, reduced
from bench.scenarios.serving import AGAIN, ARMS, STOCK, RandomServing
from vllm_specrollout.config import parse

SCENARIO = RandomServing(rounds=2)


def told(tokens_per_s: float, token_us: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "token_us": token_us}


def row(name: str, *, differs: bool) -> Row:
    stock = [told(1000.0, 2000.0), told(800.0, 2500.0)]
    return SCENARIO._row(name, [told(950.0, 2100.0), told(800.0, 2540.0)], stock, differs)


def test_a_ratio_is_over_stocks_of_the_same_round():
    found = row("ours", differs=False)
    assert (
        found.identical
        and found.ratio == pytest.approx(0.975)
        and found.ratio_quartiles == pytest.approx((0.9625, 0.9875))
    )
    assert found.tokens_per_s == 875.0 and found.added_us == 70.0


def test_a_server_whose_seeded_answers_are_not_stocks_shows_no_speed():
    found = row("ours", differs=True)
    assert not found.identical and (found.ratio, found.tokens_per_s, found.added_us) == (None, None, None)


def test_stock_runs_twice_and_ours_as_it_is_and_with_drafts_off():
    assert [name for name, ours in ARMS.items() if ours is None] == [STOCK, AGAIN]
    assert [parse(ours).budget for ours in ARMS.values() if ours is not None] == ["auto", "off"]


def test_a_row_without_identical_answers_is_kept_without_figures():
    kept = reduced({"bench": "serving", "command": "", "versions": {"commit": None, "vllm": "0.32.0"}, "host": {},
                    "rows": [row("ours", differs=True)]})  # fmt: skip
    assert kept["rows"] == [{"name": "ours", "identical": False, "rounds": 2}]
    assert set(SERVING) >= {"run", "identical", "of stock's"}
