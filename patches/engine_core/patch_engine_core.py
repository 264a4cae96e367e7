"""The V2 scheduler meets the workers, to ask them for drafts before it makes grammar masks."""

from vllm_specrollout.patches import Patch
from vllm_specrollout.server.engine_core import introduce_workers

PATCHES = (
    Patch(
        target="vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size",
        wrap=introduce_workers,
        why="the first call once executor and scheduler both exist; on the V2 runner the scheduler must learn what was"
        " drafted before it masks the rows of requests with a grammar, and vLLM hands it no way to ask",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/core.py",
        versions=("0.32.0",),
        remove_when="vLLM asks the workers for drafts whenever the scheduler says that there may be some",
        process="engine_core",
    ),
)
