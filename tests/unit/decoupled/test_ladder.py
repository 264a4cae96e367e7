from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.decoupled.ladder import GRID, Ladder, Rung, build_ladder, load_ladder, select_method
from vllm_specrollout.decoupled.rates import Mode, coupled_rate
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError

METHODS = {"0.5B": AffineTime(0.004, 1.0), "1.5B": AffineTime(0.008, 2.0), "ngram": AffineTime(0.0, 0.02)}
VERIFY = AffineTime(0.04, 13.0, 0.03)


@pytest.fixture(scope="module")
def ladder() -> Ladder:
    return build_ladder(METHODS, VERIFY, rng=np.random.default_rng(0))


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
@pytest.mark.parametrize("batch", [1, 32])
def test_tokens_accepted_at_random_agree_with_the_formula(mode: Mode, batch: int) -> None:
    built = build_ladder(METHODS, VERIFY, batch=batch, mode=mode, rng=np.random.default_rng(0))
    for rung in built.rungs:
        assert rung.drawn == pytest.approx(rung.speedups, rel=0.03)


def test_the_windows_of_a_ladder_are_the_best(ladder: Ladder) -> None:
    rung = ladder.rungs[0]
    for p, window, speedup in zip(GRID, rung.windows, rung.speedups, strict=True):
        rates = [coupled_rate(METHODS["0.5B"], VERIFY, 1, w, p) for w in range(1, 17)]
        assert speedup == pytest.approx(max(rates) * VERIFY.ms(1))
        assert rates[window - 1] == max(rates)


def test_speedups_grow_with_acceptance_and_fall_with_cost(ladder: Ladder) -> None:
    for rung in ladder.rungs:
        assert list(rung.speedups) == sorted(rung.speedups)
    cheap, dear, free = (rung.speedups for rung in ladder.rungs)
    assert all(a > b for a, b in zip(cheap, dear, strict=True))
    assert all(a > b for a, b in zip(free, cheap, strict=True))


def test_the_generator_alone_decides_what_is_drawn() -> None:
    first, second = (build_ladder(METHODS, VERIFY, rng=np.random.default_rng(7), draws=50) for _ in range(2))
    other = build_ladder(METHODS, VERIFY, rng=np.random.default_rng(8), draws=50)
    assert first == second != other
    assert build_ladder(METHODS, VERIFY).rungs[0].drawn == ()


def test_between_two_acceptances_the_line_is_straight() -> None:
    ladder = Ladder(1, Mode.COUPLED, (0.2, 0.6), (Rung("a", (1, 3), (1.0, 2.0)),))
    assert ladder.speedup("a", 0.3) == pytest.approx(1.25)
    assert (ladder.speedup("a", 0.0), ladder.speedup("a", 1.0)) == (1.0, 2.0)
    assert [ladder.window("a", p) for p in (0.0, 0.3, 0.5, 1.0)] == [1, 1, 3, 3]


@given(low=st.floats(0.0, 0.95), high=st.floats(0.0, 0.95))
def test_more_acceptance_is_never_worth_less(low: float, high: float) -> None:
    low, high = sorted((low, high))
    built = build_ladder({"a": METHODS["0.5B"]}, VERIFY)
    assert built.speedup("a", low) <= built.speedup("a", high)


def test_one_method_is_chosen_for_the_batch_by_its_own_history(ladder: Ladder) -> None:
    found = select_method(ladder, {"0.5B": 0.7, "1.5B": 0.8, "ngram": 0.3})
    assert found.method == "0.5B"
    assert found.speedup == found.speedups["0.5B"] == ladder.speedup("0.5B", 0.7)
    assert select_method(ladder, {"1.5B": 0.8, "ngram": 0.3}).method == "1.5B"


def test_no_method_is_chosen_where_plain_decoding_is_faster(ladder: Ladder) -> None:
    found = select_method(ladder, {"0.5B": 0.0, "1.5B": 0.05})
    assert found.method is None
    assert found.speedup == 1.0


def test_a_ladder_comes_back_from_its_file(ladder: Ladder, tmp_path: Path) -> None:
    ladder.save(tmp_path / "ladder.json")
    assert load_ladder(tmp_path / "ladder.json") == ladder


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"format": 2}, "is no ladder of format 1"),
        ({"batch": 0}, "is damaged: TypeError('0 is no whole number above 0')"),
        ({"mode": "sideways"}, "is damaged: ValueError(\"'sideways' is not a valid Mode\")"),
        ({"acceptance": [0.5, 0.5]}, "is damaged: a ladder's acceptances are not ascending from 0 to 1"),
        ({"acceptance": ["x"]}, "is damaged: TypeError(\"['x'] is no list of numbers\")"),
        ({"rungs": []}, "is damaged: a ladder has no method, or one twice"),
        ({"rungs": [{"method": "a"}]}, "is damaged: KeyError('windows')"),
    ],
)
def test_a_damaged_file_is_one_clear_error(ladder: Ladder, tmp_path: Path, change: dict, cause: str) -> None:
    path = tmp_path / "ladder.json"
    ladder.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError) as caught:
        load_ladder(path)
    assert caught.value.cause == f"`{path}` {cause}"


@pytest.mark.parametrize("text", ["", "[]", "nonsense"])
def test_what_is_no_ladder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ladder.json").write_text(text)
    with pytest.raises(ConfigError, match="ladder.json"):
        load_ladder(tmp_path / "ladder.json")


def test_values_that_are_no_speedups_are_refused(ladder: Ladder) -> None:
    rung = ladder.rungs[0]
    for wrong in (replace(rung, speedups=(1.0,)), replace(rung, drawn=(float("nan"),) * len(GRID))):
        with pytest.raises(ConfigError, match="`0.5B` are no speed-ups at 20 acceptances"):
            replace(ladder, rungs=(wrong,))


def test_methods_and_acceptances_that_do_not_exist_are_refused(ladder: Ladder) -> None:
    with pytest.raises(ConfigError, match="no method `7B`"):
        select_method(ladder, {"7B": 0.5})
    with pytest.raises(ConfigError, match="outside 0 to 1"):
        ladder.speedup("0.5B", 1.5)
    with pytest.raises(ConfigError, match="no method has an acceptance"):
        select_method(ladder, {})
    with pytest.raises(ConfigError, match="a ladder for mode plain"):
        build_ladder(METHODS, VERIFY, mode=Mode.PLAIN)
