from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.one_request import OneRequestInputs, Scene, ahead_speed, coupled_speed, run

SCENE = Scene(verify_ms=10.0, row_ms=0.1, draft_ms=1.0, branch_share=0.0, matches=(0.7, 0.9, 0.95))


def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def figures():
    return run(OneRequestInputs(tokens=6000), 1).figures


def test_streams_and_chains_agree_with_their_formulas(figures):
    assert figures["worst gap to a formula"] < 0.05


def test_a_stream_alone_can_lose_to_a_coupled_comb(figures):
    scene = "4 ms target, match 0.62"
    assert figures[f"{scene}, ahead"] < figures[f"{scene}, coupled comb of 2"]


@pytest.mark.parametrize("match", ["0.85", "0.62"])
def test_exits_make_the_stream_win_with_a_fast_verifier(figures, match):
    scene = f"4 ms target, match {match}"
    assert figures[f"{scene}, ahead, 2 exits"] > figures[f"{scene}, coupled comb of 2"]


def test_a_coupled_comb_has_the_speed_of_its_sum():
    # E tokens of a chain, and one more where the miss stood in the tree: (1 - 0.7**4) * (0.9 - 0.7) / 0.3
    tokens = (1 - 0.7**5) / 0.3 + (1 - 0.7**4) * 0.2 / 0.3
    ms = 4 * 1.0 + 10.1 + 0.1 * 4 * 2
    assert coupled_speed(SCENE, 4, 2, 40_000, rng()) == pytest.approx(tokens / ms, rel=0.02)


def test_exits_that_cost_nothing_never_slow_a_stream():
    free = replace(SCENE, row_ms=0.0, draft_ms=0.5)
    speeds = [ahead_speed(free, 5, exits, 40_000, rng()) for exits in (1, 2, 3)]
    assert speeds == sorted(speeds) and speeds[1] > 1.1 * speeds[0]


def test_a_drafter_that_always_misses_leaves_plain_decoding():
    lost = replace(SCENE, matches=(0.0, 0.0, 0.0))
    assert ahead_speed(lost, 4, 3, 5_000, rng()) == pytest.approx(1 / SCENE.plain_ms)


@given(st.integers(1, 12), st.integers(1, 3), st.floats(0.1, 30.0), st.floats(0.0, 1.0))
def test_a_verifier_that_never_waits_is_never_far_below_plain(window, exits, draft_ms, p):
    scene = replace(SCENE, row_ms=0.0, draft_ms=draft_ms, matches=(p, p, p))
    assert ahead_speed(scene, window, exits, 500, rng()) >= (1 - 1e-9) / scene.plain_ms
