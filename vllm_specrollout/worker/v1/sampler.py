"""Sampling on the V1 runner: stock vLLM's sampler, with the noise taken from each request's tape.

A step without drafts runs the stock sampler on its own rows. A step with drafts runs the very same sampler on a batch
in which every node is a row of its own: temperature, penalties, masks and processors are those of its request, the
history is the request's output and the node's ancestors, the noise is that of the node's position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import (
    TopKTopPSampler,
    apply_top_k_top_p,
    sample_with_exponential_noise,
)
from vllm.v1.sample.sampler import Sampler

from vllm_specrollout import _core
from vllm_specrollout.trees.batch import cut
from vllm_specrollout.trees.tape import SeedArray, SeedTape, VectorTape
from vllm_specrollout.types import ROOT, BoolArray, IntArray, TreeBatch
from vllm_specrollout.worker.request import RequestEntry, Tape
from vllm_specrollout.worker.v1.thinking import at_roots

BUILTIN = (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)


def are_builtin(processors: LogitsProcessors) -> bool:
    """True if every processor is one that can be spread over nodes exactly."""
    return all(type(p) in BUILTIN for p in processors.all)


def spread(processors: LogitsProcessors, row_request: list[int], row_depth: list[int]) -> LogitsProcessors:
    """Processors for a batch of node rows.

    Args:
        processors: those of the batch, one row per request.
        row_request: [rows] request of each row.
        row_depth: [rows] tokens the row's node is ahead of the request's output; 0 for the root.
    """
    spread_out = LogitsProcessors()
    for processor in processors.argmax_invariant:
        spread_out.argmax_invariant.append(_spread_min_p(processor, row_request))
    for processor in processors.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor):
            spread_out.non_argmax_invariant.append(_spread_bias(processor, row_request))
        else:
            spread_out.non_argmax_invariant.append(_spread_min_tokens(processor, row_request, row_depth))
    return spread_out


def _spread_min_p(processor: Any, row_request: list[int]) -> Any:
    clone = copy.copy(processor)
    if processor.min_p_count:
        clone.min_p = processor.min_p[torch.tensor(row_request)]
    return clone


def _spread_bias(processor: Any, row_request: list[int]) -> Any:
    clone = copy.copy(processor)
    if not processor.biases:
        return clone
    clone.biases = {row: processor.biases[r] for row, r in enumerate(row_request) if r in processor.biases}
    rows = [row for row, bias in clone.biases.items() for _ in bias]
    tokens = [token for bias in clone.biases.values() for token in bias]
    biases = [b for bias in clone.biases.values() for b in bias.values()]
    clone.bias_tensor = torch.tensor(biases, dtype=torch.float32)
    clone.logits_slice = _slice(rows, tokens)
    return clone


def _spread_min_tokens(processor: Any, row_request: list[int], row_depth: list[int]) -> Any:
    clone = copy.copy(processor)
    clone.min_toks = {}
    for row, (r, depth) in enumerate(zip(row_request, row_depth, strict=True)):
        entry = processor.min_toks.get(r)
        if entry is not None and len(entry[1]) + depth < entry[0]:
            clone.min_toks[row] = entry
    rows: list[int] = []
    tokens: list[int] = []
    restore_rows: list[int] = []
    restore_tokens: list[int] = []
    for row, (_, _, stop_tokens, has_grammar) in clone.min_toks.items():
        rows += [row] * len(stop_tokens)
        tokens += stop_tokens
        if has_grammar:
            restore_rows += [row] * len(stop_tokens)
            restore_tokens += stop_tokens
    clone.logits_slice = _slice(rows, tokens)
    clone.restore_logits_slice = _slice(restore_rows, restore_tokens)
    return clone


def _slice(rows: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[entries] row and token of each logit that the processor changes."""
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32)


class TapeTopKTopPSampler(TopKTopPSampler):
    """vLLM's CPU sampler with the seeds given instead of drawn: the same kernel, the same integers."""

    seeds: torch.Tensor | None = None  # [rows] int64, set for the step in progress; None: draw as stock does

    def forward_cpu(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.seeds is None:
            return super().forward_cpu(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        processed = _processed(self, logits)  # before sampling, which may work in place
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), self.seeds), processed


class ExponentialTapeSampler(TopKTopPSampler):
    """vLLM's sampler before 0.32, with the exponential noise given instead of drawn: the same arithmetic."""

    noise: torch.Tensor | None = None  # [rows, vocab] float32, set for the step in progress; None: draw as stock does

    def __init__(self, logprobs_mode: Any) -> None:
        super().__init__(logprobs_mode)
        self._stock_forward = self.forward  # an attribute: stock picks it by platform
        self.forward = self._forward

    def _forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.noise is None:
            return self._stock_forward(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        processed = _processed(self, logits)  # before sampling, which may work in place
        return sample_with_exponential_noise(logits.softmax(dim=-1, dtype=torch.float32), self.noise), processed


def _processed(sampler: TopKTopPSampler, logits: torch.Tensor) -> torch.Tensor | None:
    """What vLLM's sampler returns beside the tokens, where logprobs are those of processed logits."""
    if sampler.logprobs_mode == "processed_logits":
        return logits
    return logits.log_softmax(dim=-1, dtype=torch.float32) if sampler.logprobs_mode == "processed_logprobs" else None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step with drafts sampled."""

    output: SamplerOutput
    # [R] accepted nodes per request
    num_accepted: IntArray
    # [sum(num_accepted)] accepted nodes, numbered within each request's tree
    accepted: IntArray


def row_layout(trees: TreeBatch) -> tuple[IntArray, IntArray]:
    """Request and depth of every logits row: a root row, then its nodes, request after request."""
    return _core.row_layout(trees.node_start, trees.depth)


def sample_drafts(
    sampler: Sampler,
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    trees: TreeBatch,
    row_request: IntArray,
    row_depth: IntArray,
) -> Sampled:
    """Sample the target's token at every node and walk the trees.

    Args:
        sampler: the engine's, its `topk_topp_sampler` a `TapeTopKTopPSampler` with this step's seeds set.
        logits: [rows, vocab] in `row_layout`'s order; may be changed in place.
        metadata: the batch's, one row per request.
    """
    wants_logprobs = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
    is_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
    by_node = _spread_metadata(metadata, trees, row_request, row_depth, wants_logprobs and is_processed)
    raw = logits
    if wants_logprobs and not is_processed and logits.dtype == torch.float32:
        raw = logits.clone()  # the sampler works in place on float32
    node_output = sampler(logits, by_node)
    sampled = node_output.sampled_token_ids.view(-1).to(torch.int64)
    output, output_row, num_accepted, accepted = _core.walk(
        trees.node_start, trees.parents, trees.token_ids, sampled.numpy()
    )
    logprobs = None
    if wants_logprobs:
        rows = torch.from_numpy(output_row.reshape(-1))
        if is_processed:
            scores = node_output.logprobs_tensors.logprobs[rows]
        elif sampler.logprobs_mode == "raw_logits":
            scores = raw[rows].to(torch.float32)
        else:
            scores = sampler.compute_logprobs(raw[rows])
        logprobs = _gather_logprobs(sampler, metadata, scores, sampled[rows], output.shape[1])
    return Sampled(SamplerOutput(torch.from_numpy(output), logprobs), num_accepted, accepted)


def held_at_one(sampled: Sampled, request: int) -> tuple[Sampled, list[int]]:
    """A step in which one request got the first token of its path alone, and the tokens that it did not get.

    Logprobs stay: vLLM filters them by the tokens.
    """
    count = int(sampled.num_accepted[request])
    if not count:
        return sampled, []
    row = sampled.output.sampled_token_ids[request]
    rest = row[1 : 1 + count].tolist()
    row[1:] = -1
    first = int(sampled.num_accepted[:request].sum())
    num_accepted = sampled.num_accepted.copy()
    num_accepted[request] = 0
    return Sampled(sampled.output, num_accepted, np.delete(sampled.accepted, slice(first, first + count))), rest


def _gather_logprobs(
    sampler: Sampler, metadata: SamplingMetadata, scores: torch.Tensor, tokens: torch.Tensor, width: int
) -> LogprobsTensors:
    """Logprobs of [R x width] output rows, padding included: vLLM filters it out with the padded tokens."""
    if metadata.logprob_token_ids:
        by_row = {r * width + i: token_ids for r, token_ids in metadata.logprob_token_ids.items() for i in range(width)}
        return sampler.gather_specific_token_logprobs(scores, by_row, tokens)
    return sampler.gather_logprobs(scores, metadata.max_num_logprobs, token_ids=tokens)


def _spread_metadata(
    metadata: SamplingMetadata, trees: TreeBatch, row_request: IntArray, row_depth: IntArray, full_logprobs: bool
) -> SamplingMetadata:
    rows = torch.from_numpy(row_request.astype(np.int64))

    def gather(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(0, rows)

    has_penalties = not metadata.no_penalties
    holder = metadata.thinking_budget_state_holder
    thinking = at_roots(holder, trees) if holder is not None and holder.has_tracked_requests() else None
    needs_history = has_penalties or bool(metadata.bad_words_token_ids) or thinking is not None
    requests = row_request.tolist()
    has_processors = any(
        getattr(p, "min_p_count", 0) or getattr(p, "biases", None) or getattr(p, "min_toks", None)
        for p in metadata.logitsprocs.all
    )
    return SamplingMetadata(
        temperature=gather(metadata.temperature),
        all_greedy=metadata.all_greedy,
        all_random=metadata.all_random,
        top_p=gather(metadata.top_p),
        top_k=gather(metadata.top_k),
        generators={},
        max_num_logprobs=-1 if full_logprobs else None,
        no_penalties=metadata.no_penalties,
        prompt_token_ids=gather(metadata.prompt_token_ids) if has_penalties else None,
        frequency_penalties=gather(metadata.frequency_penalties) if has_penalties else metadata.frequency_penalties,
        presence_penalties=gather(metadata.presence_penalties) if has_penalties else metadata.presence_penalties,
        repetition_penalties=gather(metadata.repetition_penalties) if has_penalties else metadata.repetition_penalties,
        output_token_ids=_histories(metadata.output_token_ids, trees) if needs_history else [],
        allowed_token_ids_mask=gather(metadata.allowed_token_ids_mask),
        bad_words_token_ids={
            row: metadata.bad_words_token_ids[r] for row, r in enumerate(requests) if r in metadata.bad_words_token_ids
        },
        logitsprocs=spread(metadata.logitsprocs, requests, row_depth.tolist())
        if has_processors
        else type(metadata.logitsprocs)(),
        thinking_budget_state_holder=thinking,
    )


def _histories(output_token_ids: Sequence[list[int]], trees: TreeBatch) -> list[list[int]]:
    """Output so far plus ancestors, for every row."""
    histories: list[list[int]] = []
    for r, output in enumerate(output_token_ids):
        begin, end = int(trees.node_start[r]), int(trees.node_start[r + 1])
        own: list[list[int]] = [output]
        for node in range(begin, end):
            parent = int(trees.parents[node])
            before = own[0] if parent == ROOT else own[1 + parent]
            own.append([*before, int(trees.token_ids[node])])
        histories += own
    return histories


# --- noise ------------------------------------------------------------------------------------------------------------

MOST_NOISE_BYTES = 256 << 20
"""Of the noise of all drafts of one step, where it holds one float per node and entry of the vocabulary."""
AHEAD = 16
"""Steps of one batch for which seeds are laid out at once."""
_SEEDS = 2**31  # the range stock vLLM draws from, in TopKTopPSampler.forward_cpu


class Noise(Protocol):
    """One engine's noise. `sampler` takes the place of vLLM's, and reads what was set for the step in progress."""

    sampler: TopKTopPSampler
    # drafts of one step, all requests together, at most; None: as many as there are
    most_nodes: int | None

    def tape(self, generator: torch.Generator) -> Tape:
        """A request's tape, drawn from its own generator."""

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        """One row per request follows, each at its request's next position. The very same sequence as in the step
        before says that the batch is the same."""

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        """A root row and its nodes' rows per request follow; arguments as in `node_seeds`."""

    def keep(self, entries: Sequence[RequestEntry], counts: IntArray | None, is_discarded: BoolArray) -> None:
        """The step is sampled: `counts` [R] tokens of each request are kept, one where it is None; none of those that
        are still in their prompts ([R] `is_discarded`)."""

    def settle(self) -> None:
        """What was laid out ahead of the tapes is dropped, and no request is remembered: one is over."""

    def ahead(self, tokens: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        """[R, M] float32 the Gumbel noise of these tokens [R, M] int64 at the position so far ahead, so that a drafter
        knows with what the target's own token will be chosen; of greedy requests anything finite."""


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def gumbel_of(seeds: SeedArray, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[R, M] float32 the noise of tokens [R, M] under seeds [R], as `fused_gumbel_argmax` adds it.

    The token's word of the stream that SplitMix64 begins with the seed (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014), turned into a Gumbel variable.
    """
    place = (tokens + 1).astype(np.uint64)
    bits = _mixed(_mixed(seeds.astype(np.uint64))[:, None] + place * _GAMMA) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return (-np.log(-np.log(uniform))).astype(np.float32)


class SeedNoise:
    """From vLLM 0.32 on: the seeds of `fused_gumbel_argmax`."""

    most_nodes = None

    def __init__(self, logprobs_mode: Any) -> None:
        self.sampler = TapeTopKTopPSampler(logprobs_mode)
        # steps without drafts, in a row and of one batch: [AHEAD, R] the seeds of as many, and how many were sampled;
        # the tapes hear of those when the batch changes, or is drafted for
        self._batch: Sequence[RequestEntry] = ()
        self._seeds: SeedArray = np.zeros((AHEAD, 0), np.int64)
        self._sampled = 0

    def tape(self, generator: torch.Generator) -> SeedTape:
        def draw(count: int) -> SeedArray:
            """The integers that stock vLLM would draw one by one."""
            return torch.randint(0, _SEEDS, (count,), generator=generator, dtype=torch.long).numpy()

        return SeedTape(draw)

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        if entries is not self._batch or self._sampled == AHEAD:
            self.settle()
            self._batch, self._seeds = entries, np.zeros((AHEAD, len(entries)), np.int64)
            for i, entry in enumerate(entries):
                if entry.tape is not None:
                    self._seeds[:, i] = entry.tape.peek(AHEAD)
        self.sampler.seeds = torch.from_numpy(self._seeds[self._sampled])

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        self.settle()
        self.sampler.seeds = torch.from_numpy(node_seeds(entries, node_start, row_depth))

    def keep(self, entries: Sequence[RequestEntry], counts: IntArray | None, is_discarded: BoolArray) -> None:
        self.sampler.seeds = None
        if counts is None and entries is self._batch and not is_discarded.any():
            self._sampled += 1
        else:
            self.settle()
            _advance(entries, counts, is_discarded)

    def settle(self) -> None:
        for entry in self._batch:
            if entry.tape is not None:
                entry.tape.advance(self._sampled)
        self._batch, self._sampled = (), 0

    def ahead(self, tokens: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        self.settle()
        seeds = [0 if e.tape is None else e.tape.peek(depth + 1)[depth] for e in entries]
        return torch.from_numpy(gumbel_of(np.array(seeds, dtype=np.int64), tokens.numpy()))


class ExponentialNoise:
    """Before vLLM 0.32: vectors of exponential variates, drawn one position after another, kept until used up."""

    def __init__(self, logprobs_mode: Any, vocab_size: int) -> None:
        self.sampler = ExponentialTapeSampler(logprobs_mode)
        self.vocab_size = vocab_size
        self.most_nodes = MOST_NOISE_BYTES // (4 * vocab_size)
        # greedy rows do not look at it, but it must not be 0
        self._ones = torch.ones(vocab_size, dtype=torch.float32)

    def tape(self, generator: torch.Generator) -> VectorTape[torch.Tensor]:
        def draw() -> torch.Tensor:
            """[vocab] what stock vLLM draws for one token."""
            return torch.empty(self.vocab_size, dtype=torch.float32).exponential_(generator=generator)

        return VectorTape(draw)

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        self.sampler.noise = torch.stack([self._ones if e.tape is None else e.tape.peek(1)[0] for e in entries])

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        rows: list[torch.Tensor] = []
        for entry, depths in zip(entries, _depths_by_request(node_start, row_depth), strict=True):
            if entry.tape is None:
                rows += [self._ones] * len(depths)
            else:
                by_depth = entry.tape.peek(int(depths.max()) + 1)
                rows += [by_depth[depth] for depth in depths.tolist()]
        self.sampler.noise = torch.stack(rows)

    def keep(self, entries: Sequence[RequestEntry], counts: IntArray | None, is_discarded: BoolArray) -> None:
        self.sampler.noise = None
        _advance(entries, counts, is_discarded)

    def settle(self) -> None:
        """Nothing is laid out ahead."""

    def ahead(self, tokens: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        noise = torch.stack([self._ones if e.tape is None else e.tape.peek(depth + 1)[depth] for e in entries])
        # where p / e is largest, log p - log e is
        return -noise.gather(1, tokens).clamp(min=torch.finfo(torch.float32).tiny).log()


def _advance(entries: Sequence[RequestEntry], counts: IntArray | None, is_discarded: BoolArray) -> None:
    """Tapes of requests go on by what was kept of each, as in `Noise.keep`."""
    kept = repeat(1) if counts is None else counts.tolist()
    for entry, count, is_left in zip(entries, kept, is_discarded.tolist(), strict=False):
        if entry.tape is not None and not is_left:
            entry.tape.advance(count)


def fewer(trees: TreeBatch, most_nodes: int | None) -> TreeBatch:
    """The trees, cut to equal shares where they are too many nodes together."""
    if most_nodes is None or trees.num_nodes <= most_nodes:
        return trees
    share = most_nodes // np.count_nonzero(trees.sizes)
    return cut(trees, np.full(trees.num_requests, share, dtype=np.int32))


def _depths_by_request(node_start: IntArray, row_depth: IntArray) -> Iterator[IntArray]:
    """[own rows] depths of each request's rows: its root's, then its nodes'."""
    for i in range(len(node_start) - 1):
        yield row_depth[int(node_start[i]) + i : int(node_start[i + 1]) + i + 1]


def node_seeds(entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> SeedArray:
    """[rows] the noise seed of each logits row: that of its position in its request; 0 for greedy requests."""
    levels = int(row_depth.max()) + 1
    coming = [None if entry.tape is None else entry.tape.peek(levels) for entry in entries]
    return _core.by_depth(coming, node_start, row_depth)
