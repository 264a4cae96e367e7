"""Products are compiled before the first request, one layer of each kind, within a limit of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from vllm_specrollout.worker.v1.worker import MOST_ROWS, MOST_S, warm_up


class Method:
    """Runs no product, or none without scales, and notes their sizes."""

    def __init__(self, *, fails: bool = False) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.fails = fails

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.shapes.append((x.shape[0], x.shape[1]))
        if self.fails:
            raise RuntimeError("wants scales too")
        return x


class Linear(LinearBase):
    """Of each rank its part, or one that each has whole, as a router of experts is."""

    def __init__(self, width: int, height: int, method: Method, *, is_whole: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.input_size, self.output_size, self.quant_method = width, height, method
        if not is_whole:
            self.input_size_per_partition, self.output_size_per_partition = width, height


def model(method: Method) -> torch.nn.Module:
    """Two blocks of the same two layers."""
    return torch.nn.Sequential(*(Linear(*shape, method) for shape in [(4, 8), (8, 4)] * 2), torch.nn.ReLU())


def warmed(model: torch.nn.Module, most: int, clock: Callable[[], float] = lambda: 0.0) -> int:
    return warm_up(model, torch.float32, most, clock=clock)


def test_one_layer_of_each_kind_is_run_for_every_number_of_rows() -> None:
    method = Method()
    assert warmed(model(method), 3) == 3
    assert method.shapes == [(rows, width) for rows in (1, 2, 3) for width in (4, 8)]


def test_a_layer_that_each_rank_has_whole_is_run_by_its_size() -> None:
    method = Method()
    assert warmed(torch.nn.Sequential(Linear(4, 8, method, is_whole=True)), 2) == 2
    assert method.shapes == [(1, 4), (2, 4)]


def test_a_model_without_products_is_passed_over() -> None:
    assert warmed(torch.nn.ReLU(), 3) == 3


def test_it_stops_when_its_time_is_over_and_at_as_many_rows_as_are_remembered() -> None:
    clock = itertools.count(step=MOST_S / 4)
    assert warmed(model(Method()), 100, lambda: float(next(clock))) == 3
    assert warmed(model(Method()), 10_000) == MOST_ROWS


def test_a_layer_that_cannot_be_run_by_itself_keeps_no_engine_from_starting() -> None:
    method = Method(fails=True)
    assert warmed(model(method), 9) == 0
    assert method.shapes == [(1, 4)]
