"""What an engine learns of its host: whether a row has the same bits alone and among others."""

import pytest
import torch
from vllm import _custom_ops as ops

from tests.unlike import unlike_rows
from vllm_specrollout.worker import rows
from vllm_specrollout.worker.rows import HeadShape, RowsAlike, attention_alike, linear_alike_from

SHAPE = HeadShape(num_heads=8, num_kv_heads=2, head_size=64, block_size=32, isa="vec")


@pytest.fixture
def spoiled(monkeypatch):
    unlike_rows.spoil(ops, monkeypatch.setattr)


def product(turn_from):
    """A product whose rows round otherwise once there are so many."""

    def multiply(x):
        return x.clone() if len(x) < turn_from else x * (1 + torch.finfo(x.dtype).eps)

    return multiply


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_that_rounds_several_rows_otherwise_is_noticed_and_rows_apart_are_not(spoiled, dtype):
    assert not attention_alike(SHAPE, dtype)
    assert attention_alike(SHAPE, dtype, is_apart=True)


@pytest.mark.parametrize(("turn_from", "found"), [(100, 1), (2, 2), (9, 0)])
def test_products_are_alike_from_the_fewest_rows_on_that_always_round_alike(turn_from, found):
    assert linear_alike_from([(32, product(turn_from))], torch.bfloat16) == found
    assert linear_alike_from([(32, product(100)), (32, product(turn_from))], torch.bfloat16) == found


@pytest.mark.parametrize(
    ("answer", "promise"),
    [
        (RowsAlike(attention=True, linear_from=1), "stock's tokens"),
        (RowsAlike(attention=True, linear_from=2), "stock's tokens, but for ties of lone requests"),
        (RowsAlike(attention=True, linear_from=0), "stock's tokens, but for ties"),
        (RowsAlike(attention=False, linear_from=1), "stock's tokens, but for ties"),
    ],
)
def test_what_is_promised_follows_from_what_the_host_answered(answer, promise):
    assert answer.promise == promise and answer.are_alike == (promise == "stock's tokens")


def test_rows_are_timed_through_all_layers_and_the_slowest_round_does_not_count(monkeypatch):
    now = [0.0]

    def layer(width, dtype):
        def multiply(x):
            now[0] += 1.0 + len(x) + (500.0 if now[0] == 0.0 else 0.0)
            return x

        return multiply

    monkeypatch.setattr(rows, "_product", layer)
    assert rows.time_rows(lambda: now[0]) == {count: 6000.0 * (1 + count) for count in rows.TIMED}


def test_a_host_of_unlike_rows_is_told_by_doctors_question(spoiled):
    assert not rows.ask_host("bfloat16").attention
