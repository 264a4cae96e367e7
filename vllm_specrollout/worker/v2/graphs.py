"""CUDA graphs for steps with drafts, beside vLLM's own for steps without.

vLLM captures its decode graphs for one token per request, and those stay as they are: a step without drafts is stock
vLLM's. A step with drafts looks for a bucket of `policies.graphs` that holds it; none: it runs piecewise, through
vLLM's own graphs for any number of tokens. Inside a bucket attention always goes by ancestors, chains included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook

from vllm_specrollout.policies.graphs import GraphPlan, plan_graphs

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2

logger = init_logger(__name__)


def draft_sizes(max_draft_tokens: int) -> list[int]:
    """The sizes that buckets are laid out for: the configured most, and what halving it gives."""
    sizes = [max_draft_tokens]
    while sizes[-1] > 3:
        sizes.append(sizes[-1] // 2)
    return sizes


def plan_for(runner: SpecRolloutV2) -> GraphPlan | None:
    """The buckets to capture, or None: graphs are off, or no step with drafts is small enough."""
    config = runner.compilation_config
    sizes = config.cudagraph_capture_sizes
    if (
        not runner.spec_config.max_graphs
        or runner.cudagraph_manager is None
        or not config.cudagraph_mode.has_full_cudagraphs()
        or not sizes
    ):
        return None
    most = int(config.max_cudagraph_capture_size or max(sizes))
    if most < 1 + draft_sizes(runner.max_draft_tokens)[-1]:
        return None
    return plan_graphs(
        draft_sizes(runner.max_draft_tokens),
        sizes,
        min(runner.max_num_reqs, most),
        most,
        limit=runner.spec_config.max_graphs,
    )


class DraftGraphs(ModelCudaGraphManager):
    """Holds the buckets; what fits none is vLLM's to run."""

    def __init__(self, runner: SpecRolloutV2, plan: GraphPlan) -> None:
        self.plan = plan
        self.stock = runner.cudagraph_manager
        super().__init__(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL,
            decode_query_len=1,
            lora_capture_cases=runner.lora_capture_cases,
        )

    def _init_candidates(self) -> None:
        for loras in self.lora_capture_cases:
            descs = [
                BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=bucket.num_tokens,
                    num_reqs=bucket.num_reqs,
                    max_query_len=bucket.max_query_len,
                    num_active_loras=loras,
                )
                for bucket in self.plan.target
            ]
            self._capture_descs.setdefault(CUDAGraphMode.FULL, []).extend(descs)
            for num_tokens in range(1, descs[-1].num_tokens + 1):
                self._candidates[num_tokens, loras] = [desc for desc in descs if desc.num_tokens >= num_tokens]
        # the largest first: the others find their memory in the pool that it made
        self._capture_descs[CUDAGraphMode.FULL].sort(key=lambda desc: desc.num_tokens, reverse=True)

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        found = super().dispatch(*args, **kwargs)
        return found if found.cg_mode == CUDAGraphMode.FULL else self.stock.dispatch(*args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        return super().run_fullgraph(desc) if desc in self.graphs else self.stock.run_fullgraph(desc)

    def run_pw_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock.run_pw_graph(*args, **kwargs)


def capture(runner: SpecRolloutV2, graphs: DraftGraphs) -> None:
    """Capture every bucket. Rows go by ancestors meanwhile, with no nodes in them: any tree may stand there later."""
    runner.inputs.by_ancestors = True
    try:
        graphs.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            has_lora=runner.lora_config is not None,
            lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
            progress_bar_desc="Capturing CUDA graphs for drafts",
        )
    finally:
        runner.inputs.by_ancestors = False
