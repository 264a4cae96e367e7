"""Construction of an engine's speculator: drafters, budget and listeners; the same for both model runners."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_specrollout import __version__, drafters
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.budgets.step_cost import TIME_SHARE
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import logger
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.history.vocabulary import Vocabulary
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.training.answers import AnswerRing
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.profiling import seed_from_profile

_REPLICA = "VERL_REPLICA_RANK"
MOST_PROBLEMS, MOST_PAST = 4096, 64
"""Problems whose earlier answers lie on a device, and answers of each."""


def vocabulary_of(vllm_config: VllmConfig) -> Vocabulary:
    """The model's; its tokens are looked at only if answers are to be kept for other engines."""
    model = vllm_config.model_config
    config = config_of(vllm_config)
    is_shared = "history" in config.drafters and bool(config.history.dir)
    return Vocabulary(model.model, model.get_vocab_size(), _digest(vllm_config) if is_shared else "")


def _digest(vllm_config: VllmConfig) -> str:
    """Of all tokens and their ids; empty where there is no tokenizer."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return ""
    try:
        tokens = cached_tokenizer_from_config(model).get_vocab()
    except Exception as error:  # a tokenizer is none of the engine's needs: its requests may come as token ids
        logger.info("Spec rollout: no tokenizer, so histories are told apart by the vocabulary's size alone: %s", error)
        return ""
    listed = json.dumps(sorted(tokens.items(), key=lambda item: (item[1], item[0])))
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


def recorder_of(config: SpecRolloutConfig, vllm_config: VllmConfig, runner: str) -> Recorder | None:
    """Writes the engine's steps down, if the configuration says so; `runner` is `v1` or `v2`.

    Raises:
        TraceError: the file cannot be made.
    """
    if config.record is None or not is_first_rank():
        return None
    from vllm_specrollout.replay.files import ThreadSink, recorded_by
    from vllm_specrollout.replay.records import Header

    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    path = Path(config.record)
    if parallel.data_parallel_size > 1:
        # every engine of a data-parallel group writes its own
        path = recorded_by(path, parallel.data_parallel_rank)
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
        shape="chain" if config.shape == "chain" else "tree",
    )
    logger.info("Spec rollout: recording into %s", path)
    return Recorder(header, ThreadSink(path), time.perf_counter)


def announce(vllm_config: VllmConfig, runner: str, shape: tuple[DraftMode, str]) -> None:
    """One line that says that it is on, and what it does for this model.

    Args:
        runner: `V1` or `V2`.
        shape: what may be drafted, and why not more.
    """
    config, platform = config_of(vllm_config), vllm_config.device_config.device_type
    what = {DraftMode.TREE: "trees", DraftMode.CHAIN: "chains", DraftMode.OFF: "nothing"}[shape[0]]
    is_one_of_several = vllm_config.parallel_config.data_parallel_size > 1 or bool(os.environ.get(_REPLICA))
    if is_one_of_several and "history" in config.drafters and not config.history.dir:
        logger.warning(
            "Spec rollout: this engine is one of several, and its history is its own: answers of the others draft"
            ' nothing here. Set {"history": {"dir": FOLDER}}, one folder for all engines of a host'
        )
    logger.info(
        "Spec rollout %s is on (vLLM %s, %s runner, %s): drafters %s, budget %s; %s drafted for this model%s",
        *(__version__, vllm.__version__, runner, platform, ", ".join(config.sources) or "none yet", config.budget),
        *(what, f" ({shape[1]})" if shape[1] else ""),
    )


def texts_of(config: HistoryConfig, store: HistoryStore) -> Texts:
    """The texts that a device is to hold: a token takes a quarter of what it takes in an index, so does the memory."""
    return Texts(config, store, most_problems=MOST_PROBLEMS, past=MOST_PAST, most_tokens=(config.max_mib << 18) // 4)


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
    make_texts = functools.partial(texts_of, config.history) if runner == "v2" else None
    proposers = drafters.build(config, vocabulary, make_texts) if is_first_rank() else []
    metrics = Metrics(config.sources)
    recorder = recorder_of(config, vllm_config, runner)
    listeners: list[Listener] = [metrics, *([] if recorder is None else [recorder])]
    if config.train.mode == "auto" and is_first_rank():
        listeners.append(AnswerRing())  # what ends before a trainer asks is learned from too
    speculator = Speculator(proposers, budget, vocab_size=vocabulary.size, listeners=listeners, time_share=TIME_SHARE)
    return speculator, metrics
