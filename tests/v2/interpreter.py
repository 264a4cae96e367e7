"""Sets this process up for the V2 model runner on CPU, its kernels and ours under Triton's interpreter.

Triton must be told before it is imported, and vLLM takes it only if it lists a CPU backend; the interpreter needs none,
so an idle one is named. Importing this module does it all, once, and must come before vLLM is imported.
"""

from __future__ import annotations

import os

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
import triton.backends


class _Idle:
    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Idle)

# after the backend is named; vLLM's own top-k/top-p kernel and its grammar kernel do not run interpreted, so PyTorch
# takes their place, for stock and for us
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp  # noqa: E402
import vllm.v1.worker.gpu.structured_outputs as structured_outputs  # noqa: E402

from tests.v2.grammar_mask import GrammarMask  # noqa: E402

topk_topp.HAS_TRITON = False
structured_outputs._apply_grammar_bitmask_kernel = GrammarMask()
