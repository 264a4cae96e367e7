"""Rows of the first step: what is installed, whether `specrollout doctor` is content, and the kernels' own checks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..kernels import attention, verdict
from ..kernels.reference import TOLERANCE
from ..kernels.shapes import model_named
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from .runner import NotMeasured

_DOCTOR_S = 240
_LIBRARIES = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm_specrollout._core")


class Rows:
    """The rows; see runner.py.

    Args:
        setup: `device`, `cuda` or `cpu`.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self._device = setup["device"]

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def measure(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "installed": self._installed,
            "doctor": self._doctor,
            "tree_attention": self._attention,
            "tree_verify": self._verify,
            "kv_commit": self._commit,
        }[params["kind"]](params)

    def _installed(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What can be imported at all, and what the device is; nothing of it is right or wrong."""
        import torch

        found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": self._device}
        if self._device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "name": properties.name,
                "capability": list(torch.cuda.get_device_capability()),
                "multiprocessors": properties.multi_processor_count,
                "l2_bytes": properties.L2_cache_size,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        for name in _LIBRARIES:
            found[name] = _import(name)
        try:
            interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
            found["flash_attention_3"] = interface.FA3_UNAVAILABLE_REASON or "loaded"
        except Exception as error:
            found["flash_attention_3"] = f"{type(error).__name__}: {error}"
        return found

    def _doctor(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """In a process of its own, as a user runs it: it imports vLLM and patches it."""
        command = [sys.executable, "-P", "-c", "from vllm_specrollout.cli import main; main()", "doctor", "--json"]
        environment = {name: value for name, value in os.environ.items() if name not in INTERPRETED}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DOCTOR_S)
        try:
            report = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise NotMeasured(
                f"it ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ) from None
        problems = [f"{one['name']}: {one['value']}" for one in report["findings"] if one["is_problem"]]
        return {
            "is_right": bool(report["is_healthy"]),
            "checked": "`specrollout doctor`",
            "findings": {one["name"]: one["value"] for one in report["findings"]},
            "notes": problems,
        }

    def _attention(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shape = row["context"], row["batch"], row["nodes"], row["shape"]
        excess = attention.check(attention.load(), model_named(row["model"]), *shape, self._device)
        return {
            "is_right": excess <= TOLERANCE,
            "checked": f"off the specification by {excess:.3g}, of {TOLERANCE:g} allowed",
            "excess": None if excess != excess else excess,
        }

    def _verify(self, row: Mapping[str, Any]) -> dict[str, Any]:
        wrong = verdict.check_verify(verdict.load_verify(), row["batch"], row["nodes"], self._device)
        return _told(wrong, "tokens of greedy and of random walks against the specification's")

    def _commit(self, row: Mapping[str, Any]) -> dict[str, Any]:
        wrong = verdict.check_commit(verdict.load_commit(), row["batch"], row["nodes"], self._device)
        return _told(wrong, "every byte of every layer against the specification's")


def _told(wrong: str | None, checked: str) -> dict[str, Any]:
    return {"is_right": wrong is None, "checked": checked, "notes": [] if wrong is None else [wrong[:500]]}


def _import(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "loaded"
