"""An engine's drafters, budget and listeners, made from its configuration; the same for both model runners."""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_specrollout import drafters
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.profiling import seed_from_profile
from vllm_specrollout.worker.recording import recorder_of
from vllm_specrollout.worker.vocabulary import vocabulary_of


def make_speculator(vllm_config: VllmConfig, runner: str) -> tuple[Speculator, Metrics]:
    """Of several tensor-parallel ranks only the first one gets drafters.

    Args:
        runner: `v1` or `v2`.

    Raises:
        ConfigError, UnsupportedError: a drafter cannot be made.
        TraceError: the file to record into cannot be made.
    """
    config = config_of(vllm_config)
    budget = make_budget(config)
    seed_from_profile(budget, vllm_config)
    vocabulary = vocabulary_of(vllm_config)
    proposers = drafters.build(config, vocabulary) if is_first_rank() else []
    metrics = Metrics(config.sources)
    recorder = recorder_of(config, vllm_config, runner)
    listeners = [metrics] if recorder is None else [metrics, recorder]
    speculator = Speculator(
        proposers, budget, vocab_size=vocabulary.size, listeners=listeners, time_share=config.time_share
    )
    return speculator, metrics
