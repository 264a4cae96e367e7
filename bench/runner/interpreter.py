"""The V2 model runner on CPU: vLLM's kernels and ours under Triton's interpreter. To run the code, never to be fast.

Triton must be told before it is imported, and vLLM takes it only if it lists a CPU backend; the interpreter needs none,
so an idle one is named. This file is also run by path, in processes that must not import this project: nothing of ours
may be imported here.
"""

from __future__ import annotations

import os

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


class _Idle:
    @staticmethod
    def is_active() -> bool:
        return False


def is_asked_for() -> bool:
    """Whether this process's environment is `ENVIRONMENT`."""
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def give_log1p() -> None:
    """Of the device's own functions the interpreter has none, and vLLM's sampler called this one before 0.31."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    libdevice.log1p = lambda x: tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)


def prepare() -> None:
    """Set this process up; before vLLM is imported."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import triton.backends

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Idle)
    give_log1p()
    # after the backend is named; vLLM's own top-k/top-p kernel does not run interpreted, so PyTorch takes its place
    import vllm.v1.sample.ops.topk_topp_sampler as topk_topp

    topk_topp.HAS_TRITON = False
