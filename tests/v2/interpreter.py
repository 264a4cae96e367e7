"""Sets this process up for the V2 model runner on CPU, its kernels and ours under Triton's interpreter.

Importing this module does it all, once, and must come before vLLM is imported.
"""

from __future__ import annotations

import os

from bench.runner import interpreter

os.environ.update(
    interpreter.ENVIRONMENT,
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)
interpreter.prepare()

# vLLM's grammar kernel does not run interpreted either
import vllm.v1.worker.gpu.structured_outputs as structured_outputs  # noqa: E402

from tests.interpreted import fix_products, leave_out_what_nobody_reads, patch_language_once  # noqa: E402
from tests.v2.grammar_mask import GrammarMask  # noqa: E402

fix_products()
patch_language_once()
leave_out_what_nobody_reads()
structured_outputs._apply_grammar_bitmask_kernel = GrammarMask()
