"""Hidden states by prefill: an engine that has nothing else to do computes finished answers once more, for a trainer.

What belongs here: when marked requests run, and how their rows leave the runner. They come as requests of one token
(`server/prefill.py`) and run only while no other is there; one that arrives ends them. No decode step passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.training.answers import AnswerRing, key_of
from vllm_specrollout.training.rows import RowSink, RowsPart
from vllm_specrollout.types import IntArray
from vllm_specrollout.worker.common import is_first_rank


@dataclass(frozen=True, slots=True)
class WantedRows:
    """What a step computes of a marked request: the scheduler knows it, and tells the workers."""

    # position of the first row, and tokens of the whole answer, its prompt included
    begin: int
    total: int
    # [rows] int32
    token_ids: IntArray
    mark: Mapping[str, int]


# --- the scheduler's side ---------------------------------------------------------------------------------------------


def turn(scheduler: Any, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
    """A step while marked requests are there: theirs alone, and short, so that whoever arrives waits for little."""
    if len(scheduler.requests) > len(scheduler.marked):
        drop(scheduler)
        return schedule()
    stock = scheduler.max_num_scheduled_tokens
    if scheduler.scheduler_config.enable_chunked_prefill:
        scheduler.max_num_scheduled_tokens = min(stock, scheduler.prefill_tokens)
    try:
        return schedule()
    finally:
        scheduler.max_num_scheduled_tokens = stock


def wanted_rows(scheduler: Any, output: SchedulerOutput) -> dict[str, WantedRows]:
    """What such a step computes: request -> its rows."""
    return {name: _wanted(scheduler, name, count) for name, count in output.num_scheduled_tokens.items()}


def _wanted(scheduler: Any, name: str, count: int) -> WantedRows:
    request, mark = scheduler.requests[name], scheduler.marked[name]
    end, total = request.num_computed_tokens, request.num_prompt_tokens
    return WantedRows(end - count, total, np.array(request.prompt_token_ids[end - count : end], dtype=np.int32), mark)


def drop(scheduler: Any) -> None:
    """End all marked requests, and give their KV cache back. Whoever asked is told with the next outputs."""
    names = set(scheduler.marked)
    scheduler.dropped.extend(scheduler.requests[name] for name in names)
    scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


def tell_dropped(scheduler: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
    """vLLM tells a client nothing of requests that it did not abort itself."""
    for request in scheduler.dropped:
        found = outputs.setdefault(request.client_index, EngineCoreOutputs())
        found.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
    scheduler.dropped.clear()


# --- the worker's side ------------------------------------------------------------------------------------------------


class Tap:
    """Of the first rank, from the first call of a trainer on: the answers that end, and where their rows go."""

    def __init__(self, address: str, ring: AnswerRing) -> None:
        self.sink, self.ring = RowSink(address), ring

    def take(
        self,
        wanted: Mapping[str, WantedRows],
        version: int,
        request_ids: Sequence[str],
        bounds: np.ndarray,
        hidden: torch.Tensor,
        layers: Sequence[torch.Tensor] | None,
    ) -> None:
        """Send what a step computed.

        Args:
            version: of the weights.
            bounds: [R + 1] where each request's rows begin.
            hidden: [rows, width] what the output head takes in.
            layers: [rows, width] what some layers took in, for each; none, if vLLM was not told of any at its start.
        """
        ends = zip(request_ids, bounds[:-1].tolist(), bounds[1:].tolist(), strict=False)
        # without those whose weights have changed since they were asked for
        kept = [(name, begin, end) for name, begin, end in ends if wanted[name].mark["version"] == version]
        if not kept:
            return
        rows = torch.cat([torch.arange(begin, end) for _, begin, end in kept]).to(hidden.device)
        is_sent = self.sink.send(
            [
                RowsPart(name, one.begin, len(one.token_ids), one.total, one.mark["prompt_tokens"], version)
                for name, *_ in kept
                for one in (wanted[name],)
            ],
            np.concatenate([wanted[name].token_ids for name, *_ in kept]),
            torch.stack([column[rows] for column in (*(layers or ()), hidden)], dim=1),
        )
        for one in (wanted[name] for name, *_ in kept) if is_sent else ():
            if one.begin + len(one.token_ids) == one.total:
                self.ring.computed(one.mark["key"])


def answers_for(runner: Any, address: str, most_tokens: int) -> dict[str, Any]:
    """Answers that the engine shall compute once more, in plain values; see `AnswerRing.take`.

    Args:
        address: where their rows go; another one than before takes its place.

    Raises:
        ConfigError: the address is none.
        UnsupportedError: the tokens do not tell all that an answer came of.
    """
    _check(runner.vllm_config)
    tap = _tap_of(runner, address)
    version = runner.weights_version.number
    # one token is sampled behind them, which needs room
    most = runner.max_model_len - 1
    answers = [
        (min(one.prompt_tokens, most), key_of(one.token_ids), one.token_ids[:most].tolist())
        for one in tap.ring.take(version, most_tokens)
    ]
    return {"version": version, "answers": answers}


def send_ends(runner: Any, address: str, have: int) -> int:
    """Send what a trainer has of the target itself, if its weights are others by now; every rank takes part.

    Args:
        have: version of what was sent last; a trainer has those of version 0 from the target's folder.

    Returns:
        The version that was sent last.
    """
    version = runner.weights_version.number
    if version == have:
        return have
    parts = [one for one in runner.get_model().modules() if isinstance(one, VocabParallelEmbedding)]
    heads = [one for one in parts if isinstance(one, ParallelLMHead)]
    embedding, output_head = (_whole(one) for one in (parts[0], (heads or parts)[0]))
    if not is_first_rank() or embedding is None or output_head is None:
        return have
    if torch.equal(embedding, output_head):
        embedding = output_head
    return version if _tap_of(runner, address).sink.send_ends(output_head, embedding) else have


def _whole(part: VocabParallelEmbedding) -> torch.Tensor | None:
    """[vocab, width] without what ranks pad it by; None: this rank does not have it."""
    group = get_tp_group()
    weight = part.weight.data if group.world_size == 1 else group.gather(part.weight.data, dst=0, dim=0)
    return None if weight is None or not weight.numel() else weight[: part.org_vocab_size]


def _tap_of(runner: Any, address: str) -> Tap:
    """That to this address; another one is closed."""
    tap = runner.tap
    if tap is not None and tap.sink.address == address:
        return tap
    listeners = runner.spec_rollout.listeners
    ring = next((one for one in listeners if isinstance(one, AnswerRing)), None)
    if ring is None:
        listeners.append(ring := AnswerRing())
    made = Tap(address, ring)
    if tap is not None:
        tap.sink.close()
    runner.tap = made
    return made


def _check(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    for is_on, what in (
        (vllm_config.lora_config is not None, "adapters (`--enable-lora`)"),
        (model.is_multimodal_model, "images, sound or video"),
        (model.enable_prompt_embeds, "embeddings (`--enable-prompt-embeds`)"),
    ):
        if is_on:
            raise UnsupportedError(
                f"requests of this engine may have {what}, and answers are computed once more from their tokens alone",
                "train a head for an engine that takes text",
            )
