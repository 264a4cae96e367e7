"""`LLM(MODEL, spec_rollout=...)`, `EngineArgs(spec_rollout=...)`."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.engine_args import accept_keyword

PATCHES = tuple(
    Patch(
        target=f"vllm.engine.arg_utils:{name}.__init__",
        wrap=accept_keyword,
        why="one more keyword; both dataclasses have an `__init__` of their own, generated",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/engine/arg_utils.py",
        versions=features.ALL,
        remove_when="vLLM lets a plugin declare engine arguments",
        process="frontend",
    )
    for name in ("EngineArgs", "AsyncEngineArgs")
)
