"""Shared by the scheduler's and the worker's side: the configuration, the rank that drafts, and the counters."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_specrollout.config import SpecRolloutConfig, parse
from vllm_specrollout.patches import features

CONFIG_KEY = "spec_rollout"
CHAIN_ASKED = '`shape` is "chain"'
IMAGES_BOTH_WAYS = "an image's tokens attend in both directions, and a prompt may be computed beside branches"
REQUEST_METRICS_KEY = "spec_rollout_request_metrics"
"""In `additional_config`: how much each answer tells of its drafts, "summary" or "detailed"; absent: nothing."""
ROWS_FOR_DRAFTS = True if features.installed().speculates_by == "config" else None
"""The V1 runner's `speculative_config` for a step in which draft tokens are to get rows of logits."""


def config_of(vllm_config: VllmConfig) -> SpecRolloutConfig:
    """The engine's configuration; it travels in `additional_config`, so every process reads the same one."""
    config = parse(vllm_config.additional_config.get(CONFIG_KEY), origin=f"additional_config['{CONFIG_KEY}']")
    assert config is not None, "the worker and the scheduler are only chosen when spec rollout is on"
    return config


def with_model(vllm_config: VllmConfig) -> VllmConfig:
    """A shallow copy for the worker alone that names the model that drafts, if there is one.

    vLLM's runner then loads it and gives it room in the KV cache. Scheduler and front end go on as without one.
    """
    given = config_of(vllm_config).coupled_model
    if given is None:
        return vllm_config
    clone = copy.copy(vllm_config)
    clone.speculative_config = speculative_config(vllm_config, given)
    return clone


def speculative_config(vllm_config: VllmConfig, given: Mapping[str, Any]) -> SpeculativeConfig:
    """vLLM's configuration of the model that drafts.

    Raises:
        ValueError: vLLM's own, with what is wrong.
    """
    return SpeculativeConfig(
        **given,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )


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


HEADS = ("eagle", "eagle3")
"""Methods whose models draft trees on V2: each pass goes on from hidden states of the one before."""
_ANY_LENGTH = ("draft_model", "eagle", "eagle3")
"""Methods whose models run once per token, so that steps may have more drafts than they make."""


def drafting_model(config: SpecRolloutConfig) -> dict[str, Any] | None:
    """vLLM's configuration of the model whose passes run in the V2 runner's steps; None: none do."""
    return None if config.budget == "off" else config.coupled_model


def levels_of(vllm_config: VllmConfig) -> int:
    """Tokens that the model drafts in the target's steps; 0: there is none, or it would never be asked."""
    given = drafting_model(config_of(vllm_config))
    return 0 if given is None else speculative_config(vllm_config, given).num_speculative_tokens


def with_lane(vllm_config: VllmConfig) -> VllmConfig:
    """A shallow copy for the V2 worker alone whose place for drafts is filled, so that vLLM's runner drafts by itself.

    Where no model drafts it names the one of vLLM's methods for which all tokens of a request lie on the device.
    """
    config = config_of(vllm_config)
    model = drafting_model(config)
    given = model or {"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    # a tree may have more nodes than levels, and of models only heads draft trees
    has_branches = config.shape != "chain" and (model is None or model.get("method") in HEADS)
    width = config.max_draft_tokens if has_branches else min(config.max_draft_tokens, config.max_depth)
    if not has_branches and envs.VLLM_BATCH_INVARIANT:
        width = min(width, most_in_one_tile(vllm_config))
    clone = copy.copy(vllm_config)
    if model is not None:
        clone.speculative_config = speculative_config(vllm_config, given)
        if clone.speculative_config.method not in _ANY_LENGTH or not features.installed().drafts_few:
            return clone
        width = max(width, clone.speculative_config.num_speculative_tokens)
    clone.speculative_config = speculative_config(vllm_config, {**given, "num_speculative_tokens": width})
    return clone


def most_in_one_tile(vllm_config: VllmConfig) -> int:
    """Most nodes of a chain whose rows FlashAttention 3 sums as it sums a plain row: in tiles of equally many keys.

    With heads of 64 a request's rows, one for each query head of a group, take other tiles than a plain row's once
    they are more than 64. With larger heads all take the same.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    return max(64 // group - 1, 1) if model.get_head_size() <= 64 else sys.maxsize


@dataclass(slots=True)
class Stats:
    """Totals since the last reset; milliseconds are wall clock in the worker."""

    steps: int = 0
    steps_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    output_tokens: int = 0
    request_steps: int = 0
    forward_ms: float = 0.0
    step_ms: float = 0.0
    draft_ms: float = 0.0
    layout_ms: float = 0.0
    # V1 runner: accepted paths other than their trees' first; V2 runner: steps whose slots may have moved
    branches_committed: int = 0
