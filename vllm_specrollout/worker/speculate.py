"""An engine's drafters and budget, made from its configuration; the same for both model runners."""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_specrollout import drafters
from vllm_specrollout.metrics import Meter, MeteredSpeculation
from vllm_specrollout.policies.presets import make_policy
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.picking import CORE
from vllm_specrollout.worker.profiling import profiled
from vllm_specrollout.worker.recording import recorded
from vllm_specrollout.worker.unite import unite
from vllm_specrollout.worker.vocabulary import vocabulary_of


def make_speculation(vllm_config: VllmConfig, runner: str, timing_lag: int) -> MeteredSpeculation:
    """Of several tensor-parallel ranks only the first one gets drafters.

    Args:
        runner: `v1` or `v2`.
        timing_lag: as `Meter` takes it.

    Raises:
        ConfigError, UnsupportedError: a drafter cannot be made.
        TraceError: the file to record into cannot be made.
    """
    config = config_of(vllm_config)
    policy = recorded(profiled(make_policy(config, kernels=CORE), vllm_config), config, vllm_config, runner)
    vocabulary = vocabulary_of(vllm_config)
    proposers = drafters.build(config, vocabulary) if is_first_rank() else []
    meter = Meter(config.drafters, timing_lag)
    return MeteredSpeculation(proposers, policy, unite, meter, vocab_size=vocabulary.size)
