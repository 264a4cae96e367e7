"""How an answer's rows are put together: computed twice, cut short, by other weights, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.config.drafters import CollectConfig
from vllm_specrollout.training.buffer import Example
from vllm_specrollout.types import FinishedRequest, FinishReason
from vllm_specrollout.worker.v1.collecting import Collector, layers_of

PROMPT = 4


class Kept:
    """In the place of the buffer."""

    def __init__(self) -> None:
        self.examples: list[Example] = []

    def add(self, example: Example) -> None:
        self.examples.append(example)


def collector_of(**config: object) -> tuple[Collector, Kept]:
    kept = Kept()
    return Collector(kept, CollectConfig(dir="data", **config), random.Random(0)), kept  # type: ignore[arg-type]


def rows(first: int, count: int, salt: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Rows of positions from `first` on; the token at position p is 10 + p."""
    positions = torch.arange(first, first + count)
    values = (positions + salt)[:, None].float()
    return positions, positions + 10, values.expand(count, 6), values.expand(count, 3)


def feed(collector: Collector, name: str, part: Sequence[torch.Tensor], version: int = 0) -> None:
    collector.feed([name], np.array([len(part[0])]), tuple(part), version)


def ending(name: str, length: int, version: int = 0) -> FinishedRequest:
    tokens = np.arange(length, dtype=np.int32) + 10
    return FinishedRequest(name, "p", tokens[:PROMPT], tokens[PROMPT:], FinishReason.FINISHED, version)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60), st.integers(0, 3), st.data())
def test_rows_come_out_in_order_whatever_steps_they_came_in(counts, cached, data):
    """After a preemption, rows are computed again from some position on; the later ones count."""
    collector, kept = collector_of()
    at, last_salt = cached, {}
    for step, count in enumerate(counts):
        feed(collector, "a", rows(at, count, salt=step / 128))
        last_salt |= {position: step / 128 for position in range(at, at + count)}
        at += count
        if data.draw(st.integers(0, 9)) == 0:
            at = data.draw(st.integers(cached, at))
    length = max(last_salt) + 2
    collector.finished(ending("a", length))
    if length < PROMPT + 2 or length - 1 - cached < 2:
        assert kept.examples == []
        return
    (example,) = kept.examples
    assert example.token_ids.tolist() == list(range(10 + cached, 10 + length - 1))
    assert example.num_prompt == PROMPT - cached
    expected = [position + last_salt[position] for position in range(cached, length - 1)]
    assert example.hidden[:, 0].tolist() == expected and example.last_hidden[:, 0].tolist() == expected


def test_requests_of_one_step_do_not_mix():
    collector, kept = collector_of()
    both = [torch.cat(columns) for columns in zip(rows(0, 6), rows(0, 9, salt=0.5), strict=True)]
    collector.feed(["a", "b"], np.array([6, 9]), tuple(both), 0)
    collector.finished(ending("b", 10))
    collector.finished(ending("a", 7))
    assert [len(example) for example in kept.examples] == [9, 6]
    assert kept.examples[0].hidden[0, 0] == 0.5 and kept.examples[1].hidden[0, 0] == 0.0


def test_only_what_the_newest_weights_computed_is_kept():
    collector, kept = collector_of()
    feed(collector, "a", rows(0, 6))
    feed(collector, "a", rows(6, 4), version=1)
    feed(collector, "b", rows(0, 6))
    collector.finished(ending("a", 11, version=1))
    collector.finished(ending("b", 7, version=1))
    (example,) = kept.examples
    assert example.token_ids.tolist() == [16, 17, 18, 19] and example.weights_version == 1


def test_rows_beyond_the_limit_and_after_a_gap_are_left_out():
    collector, kept = collector_of(max_answer_tokens=8)
    feed(collector, "a", rows(0, 12))
    collector.finished(ending("a", 13))
    feed(collector, "b", rows(0, 2))
    feed(collector, "b", rows(3, 4))
    collector.finished(ending("b", 8))
    assert [example.token_ids.tolist() for example in kept.examples] == [list(range(10, 18)), [13, 14, 15, 16]]


def test_what_does_not_belong_to_the_answer_is_not_kept():
    collector, kept = collector_of()
    feed(collector, "a", [*rows(0, 6)[:1], rows(0, 6)[1] + 1, *rows(0, 6)[2:]])
    collector.finished(ending("a", 7))
    feed(collector, "b", rows(0, PROMPT))
    collector.finished(ending("b", PROMPT + 1))
    feed(collector, "c", rows(0, 6))
    collector.forget("c")
    collector.finished(ending("c", 7))
    assert kept.examples == []


def test_the_share_is_of_requests_and_each_is_whole():
    collector, kept = collector_of(share=0.3)
    for i in range(200):
        feed(collector, str(i), rows(0, 3))
    for i in range(200):
        feed(collector, str(i), rows(3, 3))
        collector.finished(ending(str(i), 7))
    assert 30 < len(kept.examples) < 90 and {len(example) for example in kept.examples} == {6}


def test_a_low_a_middle_and_a_high_layer_are_taken():
    assert [layers_of(depth) for depth in (1, 2, 4, 12, 32)] == [(0, 1), (1,), (1, 2, 3), (2, 6, 9), (2, 16, 29)]
