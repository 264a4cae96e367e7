"""From the target's logits to a verdict, on the device: vLLM's sampling at every node, then a walk down the tree."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, expand_idx_mapping, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from vllm_specrollout.kernels.tree_verify.kernel import TreeVerdict, tree_verify, walk
from vllm_specrollout.patches import features
from vllm_specrollout.types import IntArray
from vllm_specrollout.worker.v2.inputs import TreeInputs

# of the output layer's rows: vLLM's DEFAULT_VOCAB_PADDING_SIZE
_VOCAB_PADDING = 64
MOST_COPIED_MIB = 256
"""Of logits in float32, which processors make of the model's own. A step with more is judged in parts."""
MOST_SPLIT_ROWS = 64
"""On CUDA vLLM finds the top-p mask of so many rows by other sums than that of more (its `_SPLIT_MAX_BATCH`)."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """What rows of logits are judged by: a step's, or those of some of its requests."""

    # [L, vocabulary]
    logits: torch.Tensor
    # [L] places of their requests in the tables of requests; positions; tokens; places in their requests; parents
    requests: torch.Tensor
    pos: torch.Tensor
    draft_ids: torch.Tensor
    place: torch.Tensor
    parents: torch.Tensor
    # [R + 1] first row of each request
    starts: torch.Tensor
    # [R] places of the requests; most tokens that they may have, where vLLM's processors are told
    index: torch.Tensor
    index_np: IntArray
    most_tokens: IntArray | None

    @classmethod
    def of(cls, logits: torch.Tensor, batch: InputBatch, inputs: TreeInputs) -> _Rows:
        assert inputs.parents is not None and inputs.draft_ids is not None
        return cls(
            logits,
            batch.expanded_idx_mapping,
            batch.positions[batch.logits_indices],
            inputs.draft_ids,
            batch.expanded_local_pos,
            inputs.parents,
            batch.cu_num_logits,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.seq_lens_cpu_upper_bound.numpy() if features.installed().processors_know_lengths else None,
        )

    def of_requests(self, first: int, end: int, starts: IntArray) -> _Rows:
        """Those of the requests from one on until another; copied, since kernels are compiled for aligned arrays."""
        begin, stop = int(starts[first]), int(starts[end])
        per_row = (self.requests, self.pos, self.draft_ids, self.place, self.parents)
        return _Rows(
            self.logits[begin:stop],
            *(values[begin:stop].clone() for values in per_row),
            self.starts[first : end + 1] - begin,
            self.index[first:end].clone(),
            self.index_np[first:end],
            self.most_tokens[first:end] if self.most_tokens is not None else None,
        )


def part_bounds(starts: IntArray, most: int, least: int = 1) -> list[int]:
    """The requests at which parts of a step begin, and the number of requests.

    Processors look back at a request's earlier rows, so parts hold whole requests. They are about equally large, of at
    most `most` rows unless one request alone has more; the last one of at least `least`, if need be with more.

    Args:
        starts: [R + 1] first row of each request, then their number.
    """
    bounds, total = [0], int(starts[-1])
    share = -(-total // max(1, -(-total // most)))
    while bounds[-1] < len(starts) - 1:
        end = int(np.searchsorted(starts, starts[bounds[-1]] + share, side="right")) - 1
        bounds.append(max(end, bounds[-1] + 1))
    while len(bounds) > 2 and total - starts[bounds[-2]] < least:
        del bounds[-2]
    return bounds


def _joined(verdicts: list[TreeVerdict]) -> TreeVerdict:
    if len(verdicts) == 1:
        return verdicts[0]
    return TreeVerdict(
        torch.cat([verdict.token_ids for verdict in verdicts]),
        torch.cat([verdict.num_sampled for verdict in verdicts]),
        torch.cat([verdict.path for verdict in verdicts]),
    )


class TreeVerifier:
    """Takes the place of vLLM's rejection sampler: exact match with the noise of plain decoding."""

    def __init__(self, sampler: Sampler, max_draft_tokens: int) -> None:
        self.sampler = sampler
        self.width = max_draft_tokens + 1
        self.is_philox = features.installed().v2_noise == "philox"
        self.rows_are_on_device = False
        """Whether how many of a request's drafts are verified is known to the device alone."""
        # False: until our kernel has proved itself, chains are judged by vLLM's sampler and plain torch
        self.has_kernel = True

    def __call__(
        self, logits: torch.Tensor, batch: InputBatch, inputs: TreeInputs, withheld: torch.Tensor
    ) -> tuple[SamplerOutput, torch.Tensor]:
        """Judge the step's drafts.

        Args:
            logits: [L, vocabulary] the target's, a root row and its nodes' rows for each request.
            batch: the step.
            inputs: its trees.
            withheld: [R] bool: requests that get the first token of their path alone; the others stand behind it all
                the same.

        Returns:
            vLLM's sampler output, sampled tokens [R, width]; and [R, width] int32, the rows (counted from the request's
            root row) of which those tokens were sampled.
        """
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        verdict, processed = self._judge(logits, batch, inputs)
        verdict.num_sampled.clamp_(max=torch.where(withheld, 1, self.width))
        is_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        sampled_from = processed if is_processed and processed is not None else logits
        logprobs = self._logprobs(sampled_from, verdict, batch)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            verdict.num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=verdict.token_ids,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=self._masks(processed, verdict, num_sampled, batch),
        )
        return output, verdict.path

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what judging launches, on a row of its own.

        Logits come as the model made them, `dtype` with rows padded or not, or processed, in float32.
        """
        states, root = self.sampler.sampling_states, torch.zeros(1, dtype=torch.int64, device=device)
        cu_rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
        request_index, _ = expand_idx_mapping(root, 1, cu_rows, self.width)
        for stride in (vocab_size, -(-vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING):
            for kind in (dtype, torch.float32):
                tree_verify(
                    torch.zeros(1, stride, dtype=kind, device=device)[:, :vocab_size],
                    request_index,
                    states.temperature.gpu,
                    states.seeds.gpu,
                    root,
                    root.to(torch.int32),
                    root.to(torch.int32) - 1,
                    cu_rows,
                    width=self.width,
                    use_fp64=self.sampler.use_fp64_gumbel,
                    is_philox=self.is_philox,
                )

    def _judge(
        self, logits: torch.Tensor, batch: InputBatch, inputs: TreeInputs
    ) -> tuple[TreeVerdict, torch.Tensor | None]:
        """The verdict, and the logits after the requests' processors, if anything is made of them."""
        states = self.sampler.sampling_states
        # every row reads them, and they lie in the host's memory
        temperature, seeds = states.temperature.gpu.clone(), states.seeds.gpu.clone()
        verdicts, processed = [], []
        for rows in self._parts(_Rows.of(logits, batch, inputs), batch):
            done = self._processed(rows)
            if self._keeps_processed:
                processed.append(done)
            verdicts.append(self._verdict(done, rows, temperature, seeds))
        return _joined(verdicts), torch.cat(processed) if len(processed) > 1 else next(iter(processed), None)

    def _parts(self, rows: _Rows, batch: InputBatch) -> list[_Rows]:
        """The step's rows, in parts that are judged one after the other.

        Where top-p is asked for, a draft's row takes the way that it would take without drafts: that of few rows, or of
        many, by the number of requests. How many sums a row is split into goes by rows, as in vLLM by requests.
        """
        most = max(1, (MOST_COPIED_MIB << 20) // (4 * rows.logits.shape[1]))
        least = 1
        if (self.sampler.sampling_states.top_p.np[batch.idx_mapping_np] != 1.0).any():
            if batch.num_reqs <= MOST_SPLIT_ROWS:
                most = min(most, MOST_SPLIT_ROWS)
            else:
                least = MOST_SPLIT_ROWS + 1
        starts = batch.cu_num_logits_np
        if self.rows_are_on_device:
            return [rows]  # the step has no more of them than one part may have
        if (bounds := part_bounds(starts, max(most, 2 * least - 1), least)) == [0, len(starts) - 1]:
            return [rows]
        return [rows.of_requests(first, end, starts) for first, end in itertools.pairwise(bounds)]

    def _processed(self, rows: _Rows) -> torch.Tensor:
        """The logits after the requests' processors."""
        more = () if rows.most_tokens is None else (rows.most_tokens,)
        return self.sampler.apply_sampling_params(
            rows.logits, rows.requests, rows.index, rows.index_np, rows.pos, rows.draft_ids, rows.place, *more
        )

    def _verdict(
        self, logits: torch.Tensor, rows: _Rows, temperature: torch.Tensor, seeds: torch.Tensor
    ) -> TreeVerdict:
        """What these processed logits make of the rows' drafts."""
        read = (logits, rows.requests, temperature, seeds, rows.pos)
        if getattr(self.sampler, "trace_replay_state", None) is not None:
            tokens = self._traced(sampled_rows(self, *read), rows).int()[:, None]
            scores = torch.zeros_like(tokens, dtype=torch.float32)
            return walk(tokens, scores, rows.draft_ids, rows.parents, rows.starts, width=self.width)
        if not self.has_kernel:
            return chain_verdict(sampled_rows(self, *read), rows.draft_ids, rows.starts, self.width)
        return tree_verify(
            *read,
            rows.draft_ids,
            rows.parents,
            rows.starts,
            width=self.width,
            use_fp64=self.sampler.use_fp64_gumbel,
            is_philox=self.is_philox,
        )

    def _traced(self, sampled: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """[L] the tokens of a replayed trace in the place of the target's own, for as long as it goes on."""
        trace, states = self.sampler.trace_replay_state, self.sampler.req_states
        index = rows.pos + 1 - states.prompt_len.gpu[rows.requests]
        is_traced = (index >= 0) & (index < trace.trace_len.gpu[rows.requests])
        tokens = trace.trace_token_ids.gpu[rows.requests, index.clamp(0, states.max_model_len - 1)]
        return torch.where(is_traced, tokens.long(), sampled)

    @property
    def _keeps_processed(self) -> bool:
        """Whether anything but the verdict is made of processed logits."""
        return self.sampler.return_sampling_mask or self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES

    def _logprobs(self, logits: torch.Tensor, verdict: TreeVerdict, batch: InputBatch) -> LogprobsTensors | None:
        """Those of the accepted paths: each request's path rows are brought to the front of its rows."""
        most = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        most_ids = self.sampler.logprob_token_ids_state.max_num_token_ids(batch.idx_mapping_np)
        if most == NO_LOGPROBS and not most_ids:
            return None
        rows, tokens = self._paths_first(verdict, batch)
        return compute_topk_scores(
            logits[rows],
            most if most != NO_LOGPROBS else 0,
            tokens,
            batch.cu_num_logits.clone() if self.rows_are_on_device else batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=most_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _masks(
        self, processed: torch.Tensor | None, verdict: TreeVerdict, num_sampled: torch.Tensor, batch: InputBatch
    ) -> SamplingMaskTensors | None:
        """What each token of the accepted paths was sampled from, where `--return-sampling-mask` asks for it."""
        if not self.sampler.return_sampling_mask or processed is None:
            return None
        rows, _ = self._paths_first(verdict, batch)
        most_kept = int(self.sampler.sampling_states.top_k.np[batch.idx_mapping_np].max())
        return SamplingMaskTensors.from_logits(
            processed[rows], batch.cu_num_logits, num_sampled, most_kept, rows_per_request=self.width
        )

    def _paths_first(self, verdict: TreeVerdict, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's logits rows with its path brought to the front.

        Returns:
            [L] int64 the rows, and [L] int64 the tokens sampled there. A row beyond the path is some row of the same
            request: it is cut off on the host.
        """
        own = batch.expanded_local_pos.long().clamp_(max=self.width - 1)
        starts = batch.cu_num_logits[:-1].long()
        sizes = (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]).long()
        request = torch.repeat_interleave(
            torch.arange(batch.num_reqs, device=own.device), sizes, output_size=own.shape[0]
        )
        rows = starts[request] + verdict.path[request, own].clamp_(min=0)
        return rows, verdict.token_ids[request, own].clamp_(min=0)


def sampled_rows(
    verifier: TreeVerifier,
    logits: torch.Tensor,
    request_index: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
) -> torch.Tensor:
    """[L] int64 the target's own token at every row, by vLLM's sampler; arguments as of `tree_verify`."""
    fp64 = verifier.sampler.use_fp64_gumbel
    return gumbel_sample(
        logits, request_index, temperature, seeds, pos, apply_temperature=False, is_drafting=False, use_fp64=fp64
    )


def chain_verdict(sampled: torch.Tensor, draft_ids: torch.Tensor, cu_rows: torch.Tensor, width: int) -> TreeVerdict:
    """What `tree_verify` finds where every tree is a chain, in plain torch and without waiting for the host.

    Args:
        sampled: [L] int64 the target's own token at every row.
        draft_ids: [L] the token that each row was computed for.
        cu_rows: [R + 1] int32 the first row of each request, then L.
        width: most tokens of a request.
    """
    depth = torch.arange(width, device=sampled.device)
    sizes = (cu_rows[1:] - cu_rows[:-1])[:, None]
    rows = (cu_rows[:-1, None].long() + depth).clamp_(max=max(len(sampled) - 1, 0))
    tokens = sampled[rows].long()
    # a row is walked to where the one before it sampled the token that it was computed for
    is_right = draft_ids[rows[:, 1:]].long() == tokens[:, :-1]
    is_walked = torch.cat([sizes > 0, is_right & (depth[1:] < sizes)], dim=1).cumprod(dim=1).bool()
    return TreeVerdict(
        torch.where(is_walked, tokens, -1),
        is_walked.sum(dim=1, dtype=torch.int32),
        torch.where(is_walked, depth, 0).to(torch.int32),
    )
