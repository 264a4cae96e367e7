"""Answers that end with a stop string, on versions of vLLM that keep what the same step brought behind it."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.wrappers import forget_what_was_cut, stop_at_once

VERSIONS = features.until("0.31.0")
REMOVE_WHEN = "vLLM 0.31 is supported no more: 0.32 drops those tokens itself"

PATCHES = (
    Patch(
        target="vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
        wrap=stop_at_once,
        why="a step with drafts brings several tokens; it looks for stop strings behind the last of them alone",
        upstream="https://github.com/vllm-project/vllm/blob/v0.31.0/vllm/v1/engine/detokenizer.py",
        versions=VERSIONS,
        remove_when=REMOVE_WHEN,
        process="frontend",
    ),
    Patch(
        target="vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output",
        wrap=forget_what_was_cut,
        why="it takes the logprobs of all tokens that the step brought",
        upstream="https://github.com/vllm-project/vllm/blob/v0.31.0/vllm/v1/engine/logprobs.py",
        versions=VERSIONS,
        remove_when=REMOVE_WHEN,
        process="frontend",
    ),
)
