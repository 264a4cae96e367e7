"""Names rebound in the process that schedules: each entry only says what is put where, and why."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.wrappers import introduce_workers

UPSTREAM = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/core.py"
WHY = (
    "once executor and scheduler both exist; on the V2 runner the scheduler must learn what was drafted before it masks"
    " the rows of requests with a grammar, and vLLM hands it no way to ask"
)
REMOVE_WHEN = "vLLM asks the workers for drafts whenever the scheduler says that there may be some"

# the V2 scheduler meets the workers, to ask them for drafts before it makes grammar masks
PATCHES = tuple(
    Patch(
        target=f"vllm.v1.engine.core:EngineCore.{name}",
        wrap=introduce_workers,
        why=WHY,
        upstream=UPSTREAM,
        versions=versions,
        remove_when=REMOVE_WHEN,
        process="engine_core",
    )
    for name, versions in (
        ("_initialize_effective_attention_block_size", features.since("0.31.0")),
        # older ones have no method of their own at that point
        ("__init__", features.until("0.29.0")),
    )
)
