"""The V1 model runner on CUDA: chains only, vLLM's own attention, noise from each request's generator.

A chain's rows are a query of several tokens, which every attention backend of vLLM's takes as it takes a piece of a
prompt; branches would need a mask. This runner is a fallback: see docs/gpu.md for what has been run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_specrollout.types import DraftMode, RequestBatch, TreeBatch
from vllm_specrollout.worker.v1.kv import why_off
from vllm_specrollout.worker.v1.runner import SpecRolloutV1
from vllm_specrollout.worker.v1.sampler import ExponentialNoise, fewer

BUFFERS_PER_ROW = 4
"""Arrays of that size that sampling holds at once: float32 logits, probabilities, noise, and noise kept for later."""

_Base = SpecRolloutV1 if TYPE_CHECKING else object


class ChainMixin(_Base):
    """What the runner adds to the shared part; apart from the runner, so that it is tested where there is no GPU."""

    def _make_noise(self) -> ExponentialNoise:
        return ExponentialNoise(self.sampler.logprobs_mode, self.model_config.get_vocab_size(), self.device)

    @property
    def most_nodes(self) -> int:
        """Drafts of one step, all requests together."""
        assert self.noise.most_nodes is not None
        return self.noise.most_nodes

    @property
    def sampling_bytes(self) -> int:
        """What sampling at the nodes takes beyond what vLLM's own profiling saw."""
        return BUFFERS_PER_ROW * 4 * self.model_config.get_vocab_size() * self.most_nodes

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if not is_profiling:
            self._set_up_drafting()

    def _fit(self, trees: TreeBatch, batch: RequestBatch) -> TreeBatch:
        return fewer(trees, self.most_nodes)

    def _kv_shape(self) -> tuple[DraftMode, str]:
        if reason := why_off(self.kv_cache_config):
            return DraftMode.OFF, reason
        return DraftMode.CHAIN, "vLLM's V1 runner on CUDA has no tree attention"

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._bookkeeping_sync(*args, **kwargs)
        # only now has the device done what the step asked for
        self.step.verify_ms = (time.perf_counter() - self.step.begin) * 1e3
        return result


class SpecRolloutCUDARunner(ChainMixin, SpecRolloutV1, GPUModelRunner):
    """Stock V1 GPU runner, drafting chains."""
