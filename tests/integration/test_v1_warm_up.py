"""Products are compiled before the first request, one layer of each kind, within a limit of time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.linear import LinearBase

from vllm_specrollout.worker.v1.worker import MOST_ROWS, MOST_S, products_of, warm_up


class _Method:
    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.shapes.append((x.shape[0], x.shape[1]))
        return x


class _Fails(_Method):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        super().apply(layer, x, bias)
        raise RuntimeError("wants scales too")


class _Linear(LinearBase):
    def __init__(self, width: int, height: int, method: _Method) -> None:
        torch.nn.Module.__init__(self)
        self.input_size, self.output_size = self.input_size_per_partition, self.output_size_per_partition = (
            width,
            height,
        )
        self.quant_method = method


class _Whole(LinearBase):
    """One that each rank has whole, as a router of experts is."""

    def __init__(self, width: int, height: int, method: _Method) -> None:
        torch.nn.Module.__init__(self)
        self.input_size, self.output_size, self.quant_method = width, height, method


def _model(method: _Method) -> torch.nn.Module:
    """Two blocks of the same two layers."""
    return torch.nn.Sequential(*(_Linear(*shape, method) for shape in [(4, 8), (8, 4)] * 2), torch.nn.ReLU())


def test_one_layer_of_each_kind_is_run_for_every_number_of_rows() -> None:
    method = _Method()
    assert warm_up(_model(method), torch.float32, 3, clock=lambda: 0.0) == 3
    assert method.shapes == [(rows, width) for rows in (1, 2, 3) for width in (4, 8)]


def test_a_layer_that_each_rank_has_whole_is_run_by_its_size() -> None:
    method = _Method()
    assert warm_up(torch.nn.Sequential(_Whole(4, 8, method)), torch.float32, 2, clock=lambda: 0.0) == 2
    assert method.shapes == [(1, 4), (2, 4)]


def test_layers_without_products_are_passed_over() -> None:
    assert [width for width, _ in products_of(_model(_Method()))] == [4, 8]
    assert warm_up(torch.nn.ReLU(), torch.float32, 3, clock=lambda: 0.0) == 3


def test_it_stops_when_its_time_is_over() -> None:
    clock = itertools.count(step=MOST_S / 4)
    assert warm_up(_model(_Method()), torch.float32, 100, clock=lambda: float(next(clock))) == 3


def test_no_more_rows_than_are_remembered_are_run() -> None:
    assert warm_up(_model(_Method()), torch.float32, 10_000, clock=lambda: 0.0) == MOST_ROWS


def test_a_layer_that_cannot_be_run_by_itself_keeps_no_engine_from_starting() -> None:
    method = _Fails()
    assert warm_up(_model(method), torch.float32, 9, clock=lambda: 0.0) == 0
    assert method.shapes == [(1, 4)]
