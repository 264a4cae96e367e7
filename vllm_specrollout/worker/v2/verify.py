"""From the target's logits to a verdict, on the device: vLLM's sampling at every node, then a walk down the tree."""

from __future__ import annotations

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, expand_idx_mapping, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from vllm_specrollout.kernels.tree_verify.kernel import TreeVerdict, tree_verify
from vllm_specrollout.patches import features
from vllm_specrollout.worker.v2.inputs import TreeInputs

# of the output layer's rows: vLLM's DEFAULT_VOCAB_PADDING_SIZE
_VOCAB_PADDING = 64


class TreeVerifier:
    """Takes the place of vLLM's rejection sampler: exact match with the noise of plain decoding."""

    def __init__(self, sampler: Sampler, max_draft_tokens: int) -> None:
        self.sampler = sampler
        self.width = max_draft_tokens + 1
        self.is_philox = features.installed().v2_noise == "philox"

    def __call__(
        self, logits: torch.Tensor, batch: InputBatch, inputs: TreeInputs, withheld: str = ""
    ) -> tuple[SamplerOutput, torch.Tensor]:
        """Judge the step's drafts.

        Args:
            logits: [L, vocabulary] the target's, a root row and its nodes' rows for each request.
            batch: the step.
            inputs: its trees.
            withheld: the request that gets the first token of its path alone; the others stand behind it all the same.

        Returns:
            vLLM's sampler output, sampled tokens [R, width]; and [R, width] int32, the rows (counted from the request's
            root row) of which those tokens were sampled.
        """
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        verdict, processed = self._judge(logits, batch, inputs)
        if withheld in batch.req_ids:
            verdict.num_sampled[batch.req_ids.index(withheld)].clamp_(max=1)
        is_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        logprobs = self._logprobs(processed if is_processed else logits, verdict, batch)
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

    def _judge(self, logits: torch.Tensor, batch: InputBatch, inputs: TreeInputs) -> tuple[TreeVerdict, torch.Tensor]:
        """The verdict, and the logits after the requests' processors."""
        assert inputs.parents is not None
        sampler, states = self.sampler, self.sampler.sampling_states
        pos = batch.positions[batch.logits_indices]
        draft_ids = batch.input_ids[batch.logits_indices]
        more = (batch.seq_lens_cpu_upper_bound.numpy(),) if features.installed().processors_know_lengths else ()
        processed = sampler.apply_sampling_params(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            pos,
            draft_ids,
            batch.expanded_local_pos,
            *more,
        )
        verdict = tree_verify(
            processed,
            batch.expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            draft_ids,
            inputs.parents,
            batch.cu_num_logits,
            width=self.width,
            use_fp64=sampler.use_fp64_gumbel,
            is_philox=self.is_philox,
        )
        return verdict, processed

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
            batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=most_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _masks(
        self, processed: torch.Tensor, verdict: TreeVerdict, num_sampled: torch.Tensor, batch: InputBatch
    ) -> SamplingMaskTensors | None:
        """What each token of the accepted paths was sampled from, where `--return-sampling-mask` asks for it."""
        if not self.sampler.return_sampling_mask:
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
