"""Trainers that pause an engine with a keyword of earlier vLLMs."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.wrappers import accept_dropped_keyword

PATCHES = (
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
        wrap=accept_dropped_keyword,
        why="vLLM 0.32 dropped `wait_for_inflight_requests`, with which verl 0.9 and AReaL 1.0 abort what runs before"
        " they bring new weights",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/async_llm.py",
        versions=features.since("0.32.0"),
        remove_when="those trainers ask for a pause mode",
        process="frontend",
    ),
)
