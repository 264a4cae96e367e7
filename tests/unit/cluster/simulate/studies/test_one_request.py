from dataclasses import replace

import pytest

from vllm_specrollout.cluster.simulate.inputs import load
from vllm_specrollout.cluster.simulate.studies import one_request


@pytest.fixture(scope="module")
def report():
    inputs = load("one-request")
    few = replace(inputs.inputs["tokens"], value=6000.0)
    return one_request.run(replace(inputs, inputs={**inputs.inputs, "tokens": few}), 1)


def test_streams_and_chains_agree_with_their_formulas(report):
    assert report.figures["worst gap to a formula"] < 0.05


def test_a_stream_alone_can_lose_to_a_coupled_comb(report):
    scene = "4 ms target, match 0.62"
    assert report.figures[f"{scene}, ahead"] < report.figures[f"{scene}, coupled comb of 2"]


def test_exits_make_the_stream_win_with_a_fast_verifier(report):
    for match in ("0.85", "0.62"):
        scene = f"4 ms target, match {match}"
        assert report.figures[f"{scene}, ahead, 2 exits"] > report.figures[f"{scene}, coupled comb of 2"]
