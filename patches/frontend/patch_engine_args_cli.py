"""`--spec-rollout` on every command that takes engine arguments."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.engine_args import accept_flag, read_flag

UPSTREAM = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/engine/arg_utils.py"
REMOVE_WHEN = "vLLM lets a plugin declare engine arguments"

PATCHES = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        wrap=accept_flag,
        why="one more flag; `AsyncEngineArgs.add_cli_args` loads plugins, then calls this one by name",
        upstream=UPSTREAM,
        versions=features.ALL,
        remove_when=REMOVE_WHEN,
        process="frontend",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
        wrap=read_flag,
        why="it copies dataclass fields only, and the flag is none",
        upstream=UPSTREAM,
        versions=features.ALL,
        remove_when=REMOVE_WHEN,
        process="frontend",
    ),
)
