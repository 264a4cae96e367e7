"""What the scheduler's and the worker's side share: the configuration's way in, and which rank drafts."""

from __future__ import annotations

import copy

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_specrollout.config import SpecRolloutConfig, parse

CONFIG_KEY = "spec_rollout"


def config_of(vllm_config: VllmConfig) -> SpecRolloutConfig:
    """The engine's configuration; it travels in `additional_config`, so every process reads the same one."""
    config = parse(vllm_config.additional_config.get(CONFIG_KEY), origin=f"additional_config['{CONFIG_KEY}']")
    assert config is not None, "the worker and the scheduler are only chosen when spec rollout is on"
    return config


def is_first_rank() -> bool:
    """Whether this worker drafts: of several tensor-parallel ranks only the first one does, and keeps the history."""
    return get_tp_group().rank_in_group == 0


def with_speculation(vllm_config: VllmConfig, num_tokens: int) -> VllmConfig:
    """A shallow copy that says drafts may come.

    Only what has to count draft tokens (the scheduler, the grammar bitmasks) is given this copy. Everything else sees a
    plain engine, so features that stock vLLM refuses beside its own speculation (min_p, logit_bias, ...) stay usable.
    """
    clone = copy.copy(vllm_config)
    clone.speculative_config = SpeculativeConfig(
        method="custom_class",
        model="vllm_specrollout",
        num_speculative_tokens=num_tokens,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
    return clone
