"""Rows of kernel times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..kernels import attention, verdict
from ..kernels.shapes import Attention, Cache, Verdict, model_named
from ..kernels.timing import timer_for


class Rows:
    """The rows; see runner.py.

    Args:
        setup: `device`, `cuda` or `cpu`; `layers`, calls that are timed together, or None.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self._device, self._layers = setup["device"], setup["layers"]
        self._timer = timer_for(self._device)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        """What is held goes with the process."""

    @cached_property
    def _bandwidth(self) -> float:
        return self._timer.copy_bandwidth()

    def measure(self, params: Mapping[str, Any]) -> dict[str, Any]:
        model, batch, nodes = model_named(params["model"]), params["batch"], params["nodes"]
        if params["kind"] == "attention":
            case = Attention(Cache(model, params["context"], batch), nodes, "tree" if nodes else "chain")
            values = attention.measure(self._timer, self._bandwidth, case, self._device, self._layers)
        else:
            measure = verdict.measure_verify if params["kind"] == "verify" else verdict.measure_commit
            values = measure(self._timer, self._bandwidth, Verdict(model, batch, nodes), self._device)
            values["checked"] = "by the rows of the first step, at smaller shapes"
        return {**values, "copy_bytes_per_s": self._bandwidth}
