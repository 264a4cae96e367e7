"""vLLM's schedulers alone, over a KV cache without memory: a stand-in for the workers accepts drafts at a set rate."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.e2e.identity.cases import Case
from tests.e2e.pressure import preemptions
from vllm_specrollout.worker.scheduler import DraftReport, SpecRolloutOutput, SpecRolloutScheduler
from vllm_specrollout.worker.v2.scheduler import SpecRolloutAsyncScheduler, SpecRolloutSchedulerV2

BLOCK = 32
MOST_DRAFTED = 24
SCHEDULERS = {"v1": SpecRolloutScheduler, "v2": SpecRolloutSchedulerV2, "v2 ahead": SpecRolloutAsyncScheduler}


@dataclass
class Run:
    """What became of all requests."""

    preempted: int = 0
    steps: int = 0
    accepted: int = 0


class Bench:
    """Schedulers of one configuration, over a KV cache without memory."""

    def __init__(self, model: str, max_num_seqs: int) -> None:
        init_none_hash(sha256)
        self._configs = {
            is_ours: EngineArgs(
                model,
                block_size=BLOCK,
                max_model_len=1024,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=2048,
                additional_config={"spec_rollout": {"max_draft_tokens": MOST_DRAFTED}} if is_ours else {},
            ).create_engine_config()
            for is_ours in (False, True)
        }

    def scheduler(self, kind: str, blocks: int) -> Any:
        """`stock`, `stock ahead`, or one of SCHEDULERS."""
        stock = {"stock": Scheduler, "stock ahead": AsyncScheduler}
        config = self._configs[kind not in stock]
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = kind.endswith("ahead")
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return (stock | SCHEDULERS)[kind](
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )


class _Workers:
    """Accepts each draft token with a set chance, and drafts as many as it may."""

    def __init__(self, kind: str, acceptance: float) -> None:
        self._kind, self._acceptance, self._rng = kind, acceptance, random.Random(0)
        self.accepted = 0

    def execute(self, output: SchedulerOutput, sampling: Sequence[bool]) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        room = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        sampled = [self._tokens(room.get(name, 0)) if one else [] for name, one in zip(names, sampling, strict=True)]
        made = {"req_ids": names, "req_id_to_index": {name: i for i, name in enumerate(names)}}
        if self._kind == "v1":
            ready = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
            drafts = DraftTokenIds(ready, [[7] * MOST_DRAFTED for _ in ready])
            return SpecRolloutOutput(**made, sampled_token_ids=sampled, drafts=drafts)
        return SpecRolloutOutput(**made, sampled_token_ids=sampled, report=DraftReport(0, {}, room))

    def _tokens(self, room: int) -> list[int]:
        count = 0
        while count < room and self._rng.random() < self._acceptance:
            count += 1
        self.accepted += count
        return [self._rng.randrange(5, 400) for _ in range(count + 1)]


def run(scheduler: Any, kind: str, requests: Sequence[Case], acceptance: float = 0.0) -> Run:
    """All requests at once, to the end."""
    hasher, workers, done = get_request_block_hasher(BLOCK, sha256), _Workers(kind, acceptance), Run()
    for case in requests:
        params: SamplingParams = case.sampling()
        scheduler.add_request(Request(case.problem_id, case.prompt, params, None, block_hasher=hasher))
    depth = 2 if kind.endswith("ahead") else 1
    flying: deque[tuple[SchedulerOutput, list[bool]]] = deque()
    with preemptions() as names:
        while scheduler.has_unfinished_requests() or flying:
            if scheduler.has_unfinished_requests() and len(flying) < depth:
                output = scheduler.schedule()
                done.steps += 1
                requested = [scheduler.requests[name] for name in output.num_scheduled_tokens]
                flying.append((output, [not request.is_prefill_chunk for request in requested]))
                if len(flying) < depth and output.total_num_scheduled_tokens:
                    continue
            output, sampling = flying.popleft()
            scheduler.update_from_output(output, workers.execute(output, sampling))
            assert done.steps < 50_000, "the requests never end"
    done.preempted, done.accepted = len(names), workers.accepted
    return done
