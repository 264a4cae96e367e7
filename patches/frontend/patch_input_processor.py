"""A request's own options are checked at the door."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.wrappers import check_options

PATCHES = (
    Patch(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        wrap=check_options,
        why="vLLM passes `extra_args` on unseen; a mistake found in the worker would kill the engine",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/input_processor.py",
        versions=features.ALL,
        remove_when="vLLM lets a plugin validate sampling parameters",
        process="frontend",
    ),
)
