"""Where engine arguments become the engine's configuration: the one place that knows them all."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.engine_args import create

PATCHES = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        wrap=create,
        why="names our worker and scheduler and refuses what does not go together, before any worker is started",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/engine/arg_utils.py",
        versions=features.ALL,
        remove_when="vLLM calls a plugin with the engine arguments before it makes the configuration",
        process="frontend",
        guards_unsupported=True,
    ),
)
