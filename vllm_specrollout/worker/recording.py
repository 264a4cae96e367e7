"""Where an engine's recorder is made."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from vllm.config import VllmConfig

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.observe.recorder import Recorder
from vllm_specrollout.worker.common import is_first_rank

logger = logging.getLogger("vllm.specrollout")


def recorder_of(config: SpecRolloutConfig, vllm_config: VllmConfig, runner: str) -> Recorder | None:
    """Writes the engine's steps down, if the configuration says so; `runner` is `v1` or `v2`.

    Raises:
        TraceError: the file cannot be made.
    """
    if config.record is None or not is_first_rank():
        return None
    from vllm_specrollout.replay.files import ThreadSink
    from vllm_specrollout.replay.records import Header

    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    path = Path(config.record)
    if parallel.data_parallel_size > 1:
        # every engine of a data-parallel group writes its own
        path = path.with_name(f"dp{parallel.data_parallel_rank}-{path.name}")
    header = Header(
        model=vllm_config.model_config.model,
        runner=runner,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        budget=config.budget,
        drafters=config.sources,
        max_draft_tokens=config.max_draft_tokens,
        max_depth=config.max_depth,
        shape=config.shape,
    )
    logger.info("Spec rollout: recording into %s", path)
    return Recorder(header, ThreadSink(path), time.perf_counter)
