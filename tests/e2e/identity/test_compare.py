"""The comparison of logprob lists: ties at their end are told from anything else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.logprobs import Logprob

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import Report, _compare_logprobs, compare
from tests.e2e.identity.fields import UNLISTED, differences
from tests.e2e.identity.ties import Judge

_CASE = Case("made up", "0", [1, 2], {})


def _failures(x: dict[int, float], y: dict[int, float]) -> list[str]:
    report = Report()
    sides: list[Any] = [{token: SimpleNamespace(logprob=value) for token, value in side.items()} for side in (x, y)]
    _compare_logprobs(_CASE, [sides[0]], [sides[1]], "float32", report)
    return report.failures


def test_tokens_level_with_the_last_one_may_stand_in_for_each_other() -> None:
    assert not _failures({1: -0.5, 2: -2.0, 3: -2.0}, {1: -0.5, 2: -2.0, 4: -2.0})


def test_a_sampled_token_level_with_the_last_one_may_be_listed_besides() -> None:
    # top 2 and the sampled token 3, which is level with the second: listed as that, or besides
    assert not _failures({1: -0.5, 2: -2.0, 3: -2.0}, {1: -0.5, 3: -2.0})


def test_a_list_without_one_of_the_likeliest_tokens_fails() -> None:
    assert _failures({1: -0.5, 2: -1.0, 3: -2.0}, {1: -0.5, 3: -2.0})
    assert _failures({1: -0.5, 2: -1.0, 3: -2.0}, {1: -0.5, 4: -1.5, 3: -2.0})
    assert _failures({1: -0.5, 2: -2.0, 3: -2.0, 4: -2.0}, {1: -0.5, 2: -2.0})


def test_another_logprob_of_the_same_token_fails() -> None:
    assert _failures({1: -0.5, 2: -2.0}, {1: -0.5, 2: -2.1})


def _judged(by: dict[int, float] | None) -> Report:
    """Greedy answers that part at their second token, where the judge finds these logprobs."""
    case = Case("greedy", "0", [1, 2], {"temperature": 0.0})
    wanted, got = (
        SimpleNamespace(outputs=[SimpleNamespace(index=0, token_ids=tokens)], prompt_logprobs=None)
        for tokens in ([5, 6, 9], [5, 7, 8])
    )
    values = [{token: SimpleNamespace(logprob=value) for token, value in (by or {}).items()}] * 2
    found = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6], logprobs=values)])
    return compare([case], [wanted], [got], "float32", None if by is None else Judge(lambda asked: found))


def test_a_difference_between_level_tokens_is_a_tie_and_any_other_a_failure() -> None:
    level = _judged({6: -1.0, 7: -1.00005})
    assert level.ties and not level.failures
    apart = _judged({6: -1.0, 7: -1.0003})
    assert apart.failures and not apart.ties


def test_without_a_judge_every_difference_is_a_failure() -> None:
    assert _judged(None).failures


def _of_ranks(stock: list[tuple[float, int]], ours: list[tuple[float, int]]) -> list[str]:
    return list(differences(*({i: Logprob(*one) for i, one in enumerate(side)} for side in (stock, ours))))


def test_ranks_of_level_tokens_may_be_exchanged_and_no_others() -> None:
    assert not _of_ranks([(-0.5, 1), (-2.0, 2), (-2.0, 3)], [(-0.5, 1), (-2.0, 3), (-2.0, 2)])
    (further,) = _of_ranks([(-0.5, 1), (-2.0, 2)], [(-0.5, 1), (-2.0, 4)])
    (by_one,) = _of_ranks([(-0.5, 1), (-2.0, 2)], [(-0.5, 1), (-2.0, 3)])
    assert by_one.endswith(UNLISTED) and not further.endswith(UNLISTED)
    for rank in (400, 5):
        assert not _of_ranks([(-0.5, 1), (-math.inf, 400)], [(-0.5, 1), (-math.inf, rank)])
    assert _of_ranks([(-0.5, 1)], [(-0.6, 1)])
