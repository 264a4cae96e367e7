"""Profiles of vLLM engines: what one is of, and how it is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig

from vllm_specrollout.budgets import profile
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.profile import (
    Draft,
    Profile,
    ProfileKey,
    ProfileSweep,
    RandomDrafter,
    shape_hash,
    shuffled,
    undisturbed,
)
from vllm_specrollout.errors import logger
from vllm_specrollout.worker.common import config_of

_PROMPT = 16
_WARM_UP = 2  # times through all kinds of step before times count


def seed_from_profile(budget: Budget, vllm_config: VllmConfig) -> None:
    """Tell the budget what a saved profile of such an engine says, if there is one.

    Called while an engine starts: whatever is wrong with a profile, the engine goes on without it.
    """
    if config_of(vllm_config).profile == "off":
        return
    key = key_of(vllm_config)
    found = profile.load(key)
    if found is not None:
        budget.seed(shuffled(found.timings))
        logger.info("Spec rollout: step costs start from the profile %s (%d steps)", key.path, len(found.timings))


def key_of(vllm_config: VllmConfig) -> ProfileKey:
    """What a profile of this engine is of."""
    model = vllm_config.model_config
    shape = {**model.hf_config.to_dict(), "quantization": model.quantization}
    return ProfileKey(
        model=shape_hash(shape),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_of(vllm_config),
        vllm=vllm.__version__,
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        is_eager=model.enforce_eager,
    )


def device_of(vllm_config: VllmConfig) -> str:
    """The name of its GPUs, or of the CPU with its cores and the threads in use."""
    if vllm_config.device_config.device_type == "cuda":
        return torch.cuda.get_device_name()
    name = "unknown"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            name = next((line.partition(":")[2].strip() for line in handle if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def measure(
    model: str,
    dtype: str,
    batches: Sequence[int],
    kinds: Sequence[Draft],
    steps: int,
    on_batch: Callable[[int, int], None],
    *,
    is_eager: bool,
) -> Profile:
    """Start an engine in this process and time its decode steps.

    Args:
        model, dtype, is_eager: as `vllm.LLM` takes them.
        batches: numbers of requests.
        kinds: drafts that every request makes, in turn.
        steps: times each kind is run at each batch.
        on_batch: told (batches done, batches in all).
    """
    rounds = steps + _WARM_UP
    # a draft that happens to be right yields more tokens than its step needs
    max_tokens = 2 * rounds * len(kinds)
    largest = max(kind.nodes for kind in kinds)
    llm = vllm.LLM(
        model,
        dtype=dtype,
        enforce_eager=is_eager,
        max_model_len=_PROMPT + max_tokens,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        spec_rollout={
            "drafters": ["ngram"],
            "budget": "fixed",
            "profile": "off",
            "max_draft_tokens": largest,
            "max_depth": largest,
        },
    )
    engine = llm.llm_engine
    try:
        runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        vocab_size = engine.vllm_config.model_config.get_vocab_size()
        timings = []
        for i, batch in enumerate(batches):
            on_batch(i, len(batches))
            sweep = ProfileSweep(kinds)
            runner.spec_rollout.budget = sweep
            runner.spec_rollout.replace_drafters([RandomDrafter(vocab_size, sweep)])
            _run(llm, batch, vocab_size, sweep, rounds * len(kinds))
            timings += undisturbed(sweep.timings)
        on_batch(len(batches), len(batches))
        return Profile(key_of(engine.vllm_config), model, tuple(timings))
    finally:
        engine.engine_core.shutdown()


def _run(llm: Any, batch: int, vocab_size: int, sweep: ProfileSweep, steps: int) -> None:
    """`steps` decode steps of so many requests, the first rounds of them not recorded."""
    engine = llm.llm_engine
    names = [f"profile-{batch}-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        prompt = [(7 * i + 3 * j) % vocab_size for j in range(_PROMPT)]
        params = vllm.SamplingParams(temperature=1.0, seed=i, max_tokens=2 * steps, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    for step in range(steps + 1):
        sweep.is_recording = step > _WARM_UP * len(sweep.kinds)
        engine.step()
    sweep.is_recording = False
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
