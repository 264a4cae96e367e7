"""The V2 model runner on CPU, its kernels and ours under Triton's interpreter.

Triton must be told before it is imported, and vLLM takes it only if it lists a CPU backend; the interpreter needs none,
so an idle one is named. All of that would change what other tests run, so these tests have a process of their own
(tests/conftest.py): `pytest tests/v2`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
)
import triton.backends


class _Idle:
    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Idle)

import vllm.v1.sample.ops.topk_topp_sampler as _topk_topp  # noqa: E402 - after the backend is named

# vLLM's own top-k/top-p kernel does not run interpreted; its PyTorch form does the same, for stock and for us
_topk_topp.HAS_TRITON = False

import vllm.v1.worker.gpu.structured_outputs as _structured_outputs  # noqa: E402 - likewise

from tests.v2.grammar_mask import GrammarMask  # noqa: E402 - likewise

_structured_outputs._apply_grammar_bitmask_kernel = GrammarMask()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling, which vLLM switches off on CPU although its engine can do it there."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_async(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
