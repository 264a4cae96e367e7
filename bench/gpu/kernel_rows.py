"""Rows without engines: what is installed, whether `specrollout doctor` is content, kernels' checks and their times."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..kernels import attention, verdict
from ..kernels.reference import TOLERANCE
from ..kernels.shapes import MODELS, Attention, Verdict
from ..kernels.timing import GraphTimer, HostTimer
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from .child import NotMeasured, Rows

_DOCTOR_S = 240
_LIBRARIES = {
    **{name: name for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm_specrollout._core")},
    "flash_attention_3": "vllm.vllm_flash_attn.flash_attn_interface",
}


class CheckRows(Rows):
    """Of the first step.

    Args:
        setup: `device`, `cuda` or `cpu`.
    """

    def installed(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What can be imported at all, and what the device is; nothing of it is right or wrong."""
        import torch

        device = self.setup["device"]
        found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device}
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "name": properties.name,
                "capability": list(torch.cuda.get_device_capability()),
                "multiprocessors": properties.multi_processor_count,
                "l2_bytes": properties.L2_cache_size,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        for title, name in _LIBRARIES.items():
            try:
                found[title] = getattr(importlib.import_module(name), "FA3_UNAVAILABLE_REASON", None) or "loaded"
            except Exception as error:
                found[title] = f"{type(error).__name__}: {error}"[:300]
        return found

    def doctor(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """In a process of its own, as a user runs it: it imports vLLM and patches it."""
        command = [sys.executable, "-P", "-c", "from vllm_specrollout.cli import main; main()", "doctor", "--json"]
        environment = {name: value for name, value in os.environ.items() if name not in INTERPRETED}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DOCTOR_S)
        try:
            report = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            raise NotMeasured(f"it ended with {done.returncode}:\n{said}") from None
        return {
            "is_right": bool(report["is_healthy"]),
            "checked": "`specrollout doctor`",
            "findings": {one["name"]: one["value"] for one in report["findings"]},
            "notes": [f"{one['name']}: {one['value']}" for one in report["findings"] if one["is_problem"]],
        }

    def tree_attention(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shape = row["context"], row["batch"], row["nodes"], row["shape"]
        excess = attention.check(attention.load(), MODELS[row["model"]], *shape, self.setup["device"])
        return {
            "is_right": excess <= TOLERANCE,
            "checked": f"off the specification by {excess:.3g}, of {TOLERANCE:g} allowed",
            "excess": None if excess != excess else excess,
        }

    def tree_verify(self, row: Mapping[str, Any]) -> dict[str, Any]:
        wrong = verdict.check_verify(verdict.load_verify(), row["batch"], row["nodes"], self.setup["device"])
        return _told(wrong, "tokens of greedy and of random walks against the specification's")

    def kv_commit(self, row: Mapping[str, Any]) -> dict[str, Any]:
        wrong = verdict.check_commit(verdict.load_commit(), row["batch"], row["nodes"], self.setup["device"])
        return _told(wrong, "every byte of every layer against the specification's")


def _told(wrong: str | None, checked: str) -> dict[str, Any]:
    return {"is_right": wrong is None, "checked": checked, "notes": [] if wrong is None else [wrong[:500]]}


class KernelRows(Rows):
    """Of kernel times.

    Args:
        setup: `device`, `cuda` or `cpu`; `layers`, calls that are timed together, or None.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(setup, rows)
        self._timer = GraphTimer() if setup["device"] == "cuda" else HostTimer()

    @cached_property
    def _bandwidth(self) -> float:
        return self._timer.copy_bandwidth()

    def attention(self, row: Mapping[str, Any]) -> dict[str, Any]:
        kind = "tree" if row["nodes"] else "chain"
        case = Attention(MODELS[row["model"]], row["context"], row["batch"], row["nodes"], kind)
        return self._measured(attention.measure, case, layers=self.setup["layers"])

    def verify(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return self._verdict(verdict.measure_verify, row)

    def commit(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return self._verdict(verdict.measure_commit, row)

    def _verdict(self, measure: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        case = Verdict(MODELS[row["model"]], row["batch"], row["nodes"])
        return {**self._measured(measure, case), "checked": "by the rows of the first step, at smaller shapes"}

    def _measured(self, measure: Any, case: Attention | Verdict, **more: Any) -> dict[str, Any]:
        values = measure(self._timer, self._bandwidth, case, self.setup["device"], **more)
        return {**values, "copy_bytes_per_s": self._bandwidth}
