"""The V1 model runner and worker on CPU of an engine that drafts: our own, whose drafts nobody verifies here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specrollout.cluster.counter import gumbel
from vllm_specrollout.cluster.messages import Noise
from vllm_specrollout.cluster.stream import Choices
from vllm_specrollout.drafters.levels import CHOICES
from vllm_specrollout.worker.streams.scheduler import Follow, StreamOutput, StreamStep, step_of
from vllm_specrollout.worker.v1.cpu_runner import SpecRolloutCPURunner
from vllm_specrollout.worker.v1.worker import SpecRolloutCPUWorker

MOST_COUNTED = 2048
"""Tokens of a row that noise is counted for: its likeliest. Of the others each has less than 1/2048 of the probability.
On a core of an AMD EPYC they take 0.09 ms a row; a vocabulary of 150,000 takes 4.8 ms."""
_LOWEST = float("-inf")


@dataclass(frozen=True, slots=True)
class _Row:
    """What is known of a row beside its logits."""

    follow: Follow
    # None: the best token is taken
    seed: int | None
    place: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Distributions, and the noise that they are met by."""

    # [rows, width] float32 logits, the highest of each row 0
    values: torch.Tensor
    # [rows, width] int64 their tokens; None: all of the vocabulary, in order
    token_ids: torch.Tensor | None
    # [rows, width] values and a sharpness -> [rows] the index that the noise chooses
    choose: Callable[[torch.Tensor, float], torch.Tensor]

    def tokens(self, index: torch.Tensor) -> torch.Tensor:
        """[rows, n] tokens of indices [rows, n]."""
        return index if self.token_ids is None else self.token_ids.gather(1, index)


def choices_of(logits: torch.Tensor, names: Sequence[str], counts: Sequence[int], step: StreamStep) -> list[Choices]:
    """[rows] what the drafter would have behind each row.

    Args:
        logits: [rows, vocab] of the requests, one behind another.
        counts: [requests] rows of each.
    """
    rows = [
        _Row(own, seed, place)
        for own, count in ((step.follow[name], count) for name, count in zip(names, counts, strict=True))
        for seed, place in zip(own.seeds[:count], own.places[:count], strict=True)
    ]
    scaled = _processed(logits, [row.follow for row in rows])
    if step.noise.noise is Noise.COUNTER:
        met = _counted(scaled, rows, step.noise.hash)
    else:
        met = _Meeting(scaled, None, _taped(rows))
    is_greedy = torch.tensor([row.seed is None for row in rows])

    def chosen(values: torch.Tensor, sharpness: float) -> torch.Tensor:
        """[rows] argmax(s * log q + noise); the best one of greedy requests."""
        return torch.where(is_greedy, values.argmax(dim=-1), met.choose(values, sharpness))

    first_s, second_s = step.sharpness
    index, left = [chosen(met.values, first_s)], met.values
    for _ in range(step.fan_out - 1):
        left = left.scatter(1, index[-1][:, None], _LOWEST)
        index.append(chosen(left, second_s))
    drawn = torch.stack(index, dim=1)
    log_q = (met.values.gather(1, drawn) - scaled.logsumexp(dim=-1, keepdim=True)).clamp_max(0.0)
    trials = None
    if step.is_trial:
        others = met.values.scatter(1, index[0][:, None], _LOWEST)
        each = [chosen(values, choice) for values in (met.values, others) for choice in CHOICES]
        trials = met.tokens(torch.stack([index[0], *each], dim=1)).numpy()
    found = zip(met.tokens(drawn).tolist(), log_q.tolist(), rows, strict=True)
    return [
        Choices(own, q, None if trials is None or row.seed is None else trials[i])
        for i, (own, q, row) in enumerate(found)
    ]


def _taped(rows: Sequence[_Row]) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """Each row has noise of its own, which vLLM's kernel on CPU makes of an integer."""
    noise = torch.tensor([row.seed or 0 for row in rows], dtype=torch.int64)

    def choose(values: torch.Tensor, sharpness: float) -> torch.Tensor:
        drawn: torch.Tensor = torch.ops._C.fused_gumbel_argmax((values * sharpness).contiguous(), noise)
        return drawn.to(torch.int64)

    return choose


def _counted(scaled: torch.Tensor, rows: Sequence[_Row], hash_name: str) -> _Meeting:
    """A row's noise is that of a seed and a place; computed once, whatever is chosen with it."""
    values, token_ids = scaled.topk(min(MOST_COUNTED, scaled.shape[-1]), dim=-1, sorted=False)
    drawn = [i for i, row in enumerate(rows) if row.seed is not None]
    noise = np.zeros(values.shape, dtype=np.float32)
    noise[drawn] = gumbel(
        hash_name,
        np.array([rows[i].seed for i in drawn], dtype=np.int64),
        np.array([rows[i].place for i in drawn], dtype=np.int64),
        token_ids[drawn].to(torch.int32).numpy(),
    )
    added = torch.from_numpy(noise)
    return _Meeting(values, token_ids, lambda values, sharpness: (values * sharpness + added).argmax(dim=-1))


def _processed(logits: torch.Tensor, follows: Sequence[Follow]) -> torch.Tensor:
    """[rows, vocab] float32 logits as the requests' options make them, the highest 0."""
    # a broken drafter costs speed, never more
    scaled = torch.nan_to_num(logits.float(), nan=0.0, posinf=1e4, neginf=-1e4)
    scaled = scaled / torch.tensor([follow.temperature for follow in follows])[:, None]
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    least = [follow.min_p for follow in follows]
    if any(least):
        floors = torch.tensor([math.log(value) if value > 0.0 else _LOWEST for value in least])
        scaled = scaled.masked_fill(scaled < floors[:, None], _LOWEST)
    vocab = logits.shape[-1]
    k = torch.tensor([follow.top_k if 0 < follow.top_k < vocab else vocab for follow in follows])
    p = torch.tensor([follow.top_p for follow in follows])
    return apply_top_k_top_p(scaled, k if bool((k < vocab).any()) else None, p if bool((p < 1.0).any()) else None)


class StreamCPURunner(SpecRolloutCPURunner):
    """Trees get through the pass as in verification; then each row says what it would have behind it."""

    _pass = StreamStep()
    # request -> [rows]
    _choices: dict[str, list[Choices]]

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._pass = step_of(scheduler_output)
        self._planned = self._pass.trees
        self._choices = {}
        for name, tokens in self._pass.grown.items():
            if name in self.requests:
                self._grow(name, tokens)
        return super()._update_states(scheduler_output)

    def _grow(self, name: str, tokens: list[int]) -> None:
        """The request has these tokens as well."""
        request, batch = self.requests[name], self.input_batch
        begin = request.num_tokens
        request.output_token_ids.extend(tokens)
        row = batch.req_id_to_index.get(name)
        if row is not None:
            batch.token_ids_cpu[row, begin : begin + len(tokens)] = tokens
            batch.is_token_ids[row, begin : begin + len(tokens)] = True
            batch.num_tokens_no_spec[row] = begin + len(tokens)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        names, trees = self.input_batch.req_ids, self.step.trees
        counts = [1] * len(names) if trees is None else (trees.sizes + 1).tolist()
        self.paths.plan = None
        if all(name in self._pass.follow for name in names):
            rows = iter(choices_of(logits, names, counts, self._pass))
            self._choices = {name: [next(rows) for _ in range(n)] for name, n in zip(names, counts, strict=True)}
        # no token is sampled: requests grow by what the target says
        self.discard_request_mask.np[: len(names)] = True
        none = torch.zeros((len(names), 1), dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=none, logprobs_tensors=None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = CPUModelRunner.sample_tokens(self, grammar_output)
        if not isinstance(output, ModelRunnerOutput) or not self._choices:
            return output
        return StreamOutput.carrying(output, self._choices)


class StreamCPUWorker(SpecRolloutCPUWorker):
    """Chosen by `worker_cls`."""

    def init_device(self) -> None:
        super().init_device()
        # what it made holds no weights yet
        self.model_runner = StreamCPURunner(self.vllm_config, torch.device("cpu"))
