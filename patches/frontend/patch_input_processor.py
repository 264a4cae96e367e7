"""A request's own options are checked at the door."""

from vllm_specrollout.patches import Patch
from vllm_specrollout.server.requests import check_options

PATCHES = (
    Patch(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        wrap=check_options,
        why="vLLM passes `extra_args` on unseen; a mistake found in the worker would kill the engine",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/input_processor.py",
        versions=("0.32.0",),
        remove_when="vLLM lets a plugin validate sampling parameters",
        process="frontend",
    ),
)
