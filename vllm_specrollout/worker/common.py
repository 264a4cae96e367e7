"""What the scheduler's and the worker's side share: the configuration's way in, and the drafts' way out."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

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


@dataclass(frozen=True)
class DraftReport:
    """V2 runner: what the worker tells the scheduler of its drafting."""

    # number of the engine step before which the worker would leave all room empty, so there need not be any
    asks_at: int = 0
    # request id -> most placeholders it can use; absent: no limit of its own
    limits: dict[str, int] = field(default_factory=dict)
    # request id -> nodes drafted in the step that this output is of
    drafted: dict[str, int] = field(default_factory=dict)


@dataclass
class SpecRolloutOutput(ModelRunnerOutput):
    """A step's output with news for the scheduler on board: no second call to the workers is needed to fetch them."""

    # V1 runner: the next step's drafts
    drafts: DraftTokenIds | None = None
    report: DraftReport | None = None
    # what the worker counted since its last output: see vllm_specrollout.observe.metrics
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def carrying(
        cls,
        output: ModelRunnerOutput,
        drafts: DraftTokenIds | None = None,
        report: DraftReport | None = None,
        counts: dict[str, int] | None = None,
    ) -> SpecRolloutOutput:
        values: dict[str, Any] = {f.name: getattr(output, f.name) for f in fields(output)}
        return cls(**{**values, "drafts": drafts, "report": report, "counts": counts or {}})
