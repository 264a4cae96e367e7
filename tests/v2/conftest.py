"""The V2 model runner on CPU, its kernels and ours under Triton's interpreter.

Triton must be told before it is imported, and vLLM takes it only if it lists a CPU backend; the interpreter needs none,
so an idle one is named. All of that would change what other tests run, so these tests have a process of their own
(tests/conftest.py): `pytest tests/v2`.
"""

from __future__ import annotations

import os

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
