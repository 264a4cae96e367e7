"""What is called a tie is one: the distance found is what a bias must add before stock takes the other token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.e2e.identity.ties import JUDGE, Judge, gap

FEATURES = ("greedy", "temperature 0.7", "top_k and top_p", "frequency penalty", "everything")
LENGTH = 5
LITTLE = 1e-3


def check_gaps(path: str, **kwargs: Any) -> None:
    """Of every feature one request."""
    with engine(path, "float32", is_ours=False, **{**kwargs, **JUDGE}) as stock:

        def judge(case: Case) -> Any:
            return run(stock.llm, [case])[0]

        for case in cases(len(FEATURES), VOCAB, seed=9, max_tokens=LENGTH, only=FEATURES):
            _check(judge, replace(case, params={**case.params, "max_tokens": LENGTH, "min_tokens": LENGTH}))


def _check(judge: Callable[[Case], Any], case: Case) -> None:
    """At the first position where the bias that it takes moves no token before."""
    found = judge(replace(case, params={**case.params, "logprobs": 5})).outputs[0]
    tokens = list(found.token_ids)
    for at in range(1, len(tokens)):
        others = {token: value.logprob for token, value in found.logprobs[at].items() if token != tokens[at]}
        other = max(others, key=others.__getitem__)
        distance = gap(Judge(judge), case, tokens[:at], tokens[at], other)
        below, above = (_biased(judge, case, other, distance + more) for more in (-LITTLE, LITTLE))
        if above[:at] == tokens[:at]:
            assert (below[at], above[at]) == (tokens[at], other), case.name
            return
    pytest.fail(f"{case.name}: every bias moved an earlier token")


def _biased(judge: Callable[[Case], Any], case: Case, token: int, by: float) -> list[int]:
    """The answer with `by` added to the logit of `token` as it is sampled from."""
    bias = dict(case.params.get("logit_bias", {}))
    bias[token] = bias.get(token, 0.0) + by * (case.params.get("temperature", 1.0) or 1.0)
    return list(judge(replace(case, params={**case.params, "logit_bias": bias})).outputs[0].token_ids)


def test_a_bias_of_the_distance_found_makes_stock_take_the_other_token(models: Path) -> None:
    check_gaps(model(models, "qwen3", "float32"))


def test_another_prefix_than_stocks_proves_nothing(models: Path) -> None:
    (case,) = cases(1, VOCAB, seed=9, max_tokens=8, only=("temperature 1",))
    with engine(model(models, "qwen3", "float32"), "float32", is_ours=False, **JUDGE) as stock:
        token = run(stock.llm, [case])[0].outputs[0].token_ids[0]
        wrong = gap(Judge(lambda one: run(stock.llm, [one])[0]), case, [(token + 1) % VOCAB], 7, 8)
    assert wrong == float("inf")
