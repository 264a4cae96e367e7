"""CUDA graphs for steps with drafts, beside vLLM's own for steps without.

vLLM captures its decode graphs for one token per request, and those stay as they are: a step without drafts is stock
vLLM's. A step with drafts looks for a bucket of `scheduling.cudagraphs` that holds it. There are two sets of them,
because a graph keeps the attention that it was captured with:

- chains only in the step: vLLM's own attention, as in the steps without drafts. A chain is decoded by the kernel that
  decodes plainly, so nothing but the number of rows tells them apart.
- branches in the step: the tree kernel, for all of its rows, plain ones and chains included.

What fits no bucket is vLLM's to run, piecewise or without graphs, with the same two kinds of attention. vLLM's own
full graphs are captured with causal attention and never replayed for a step with branches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    _FULL_GRAPH_PROFILING_SAMPLES,
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
    _extrapolate_full_graph_memory,
)
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook

from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.observe.self_check import CHAIN_GRAPHS, TREE_GRAPHS, in_words
from vllm_specrollout.patches import features
from vllm_specrollout.scheduling.cudagraphs import MOST_DRAFTED, GraphPlan, plan_graphs
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2.attention import attending_by_trees
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.shape import model_shape

logger = logging.getLogger("vllm.specrollout")


def draft_sizes(max_draft_tokens: int) -> list[int]:
    """The sizes that buckets are laid out for: the configured most, and what halving it gives."""
    sizes = [max_draft_tokens]
    while sizes[-1] > 3:
        sizes.append(sizes[-1] // 2)
    return sizes


def plans_for(runner: Any) -> tuple[GraphPlan | None, GraphPlan | None]:
    """The buckets to capture for chains and for trees; None: those steps get none.

    Trees get the larger half of `max_graphs`: without a bucket their attention costs most. A chain is no longer than a
    tree is deep, so its buckets promise less.
    """
    if not features.installed().captures_drafts:
        return None, None
    # here and below: versions that capture no drafts lack what is imported
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    most = runner.spec_config.max_graphs
    longest = min(runner.max_draft_tokens, runner.spec_config.max_depth)
    for_trees = most if runner.shape[0] is DraftMode.TREE else 0
    unable = get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, 1 + longest)
    if unable is not None:
        logger.info("Spec rollout: %s replays no chains of different lengths: they get no graphs", unable[0])
        return None, _plan(runner, runner.max_draft_tokens, for_trees)
    for_trees = (for_trees + 1) // 2
    return _plan(runner, longest, most - for_trees), _plan(runner, runner.max_draft_tokens, for_trees)


def _plan(runner: Any, most_drafted: int, limit: int) -> GraphPlan | None:
    config = runner.compilation_config
    # no step with drafts has a single row
    sizes = [size for size in config.cudagraph_capture_sizes or () if size > 1]
    if (
        not limit
        or not sizes
        or not config.cudagraph_mode.has_full_cudagraphs()
        # ranks that pad to different sizes would wait for each other forever
        or runner.parallel_config.data_parallel_size > 1
    ):
        return None
    most = min(max(sizes), MOST_DRAFTED)
    if most < 1 + draft_sizes(most_drafted)[-1]:
        return None
    return plan_graphs(draft_sizes(most_drafted), sizes, runner.max_num_reqs, most, limit=limit)


class Buckets(ModelCudaGraphManager):
    """One set of buckets.

    Args:
        samples: the bytes that the largest few take are added to it, and no others are captured.
    """

    def __init__(self, runner: Any, plan: GraphPlan, samples: list[int] | None = None) -> None:
        self.plan = plan
        super().__init__(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL,
            decode_query_len=1,
            lora_capture_cases=runner.lora_capture_cases,
        )
        if samples is not None:
            self._max_full_descs_to_capture, self._capture_mem_samples = _FULL_GRAPH_PROFILING_SAMPLES, samples

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
                # vLLM takes the first that holds the step
                for bucket in sorted(self.plan.target, key=lambda bucket: bucket.cost)
            ]
            self._capture_descs.setdefault(CUDAGraphMode.FULL, []).extend(descs)
            for num_tokens in range(1, max(desc.num_tokens for desc in descs) + 1):
                self._candidates[num_tokens, loras] = [desc for desc in descs if desc.num_tokens >= num_tokens]
        # the largest first: the others find their memory in the pool that it made
        self._capture_descs[CUDAGraphMode.FULL].sort(key=lambda desc: desc.num_tokens, reverse=True)


class DraftGraphs:
    """Takes the place of vLLM's manager in steps with drafts; without any bucket it still keeps branches out of causal
    graphs."""

    def __init__(self, inputs: TreeInputs) -> None:
        self.inputs = inputs
        self.stock: Any = None
        self.chains: Buckets | None = None
        self.trees: Buckets | None = None
        # set of graphs -> why it could not be captured
        self.failed: dict[str, str] = {}

    def capture(self, runner: Any) -> None:
        """Capture every bucket."""
        chains, trees = plans_for(runner)
        if chains is None and trees is None:
            return
        from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

        with freeze_gc_for_cudagraph_capture(), runner.maybe_setup_dummy_loras(runner.lora_config):
            self.trees = self._guarded(runner, trees, TREE_GRAPHS)
            self.chains = self._guarded(runner, chains, CHAIN_GRAPHS)

    def _guarded(self, runner: Any, plan: GraphPlan | None, what: str) -> Buckets | None:
        """One set of buckets; a capture that fails costs graphs, never the server."""
        if plan is None:
            return None
        try:
            buckets = Buckets(runner, plan)
            _capture(runner, buckets, what.partition(" ")[0] + "s")
            return buckets
        except CONTAINED as error:
            logger.warning("Spec rollout: no CUDA graphs for %s: %s: %s", what, type(error).__name__, error)
            self.failed[what] = in_words(error)
            return None

    @contextmanager
    def chosen_from(self, runner: Any) -> Iterator[None]:
        """Meanwhile they stand in the place of the runner's own."""
        self.stock, runner.cudagraph_manager = runner.cudagraph_manager, self
        try:
            yield
        finally:
            runner.cudagraph_manager = self.stock

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """What runs the step: a bucket of its kind, or else what vLLM would choose."""
        buckets = self._buckets()
        found = buckets.dispatch(*args, **kwargs) if buckets is not None else None
        if found is not None and found.cg_mode == CUDAGraphMode.FULL:
            return found
        found = self.stock.dispatch(*args, **kwargs)
        if self.inputs.has_branches and found.cg_mode == CUDAGraphMode.FULL:
            # captured with causal attention, in which nodes would see their siblings
            return _uncaptured(found, *args, **kwargs)
        return found

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        buckets = self._buckets()
        is_ours = buckets is not None and desc in buckets.graphs
        assert is_ours or not self.inputs.has_branches, f"a step with branches, and a causal graph: {desc}"
        return buckets.run_fullgraph(desc) if is_ours else self.stock.run_fullgraph(desc)

    def run_pw_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock.run_pw_graph(*args, **kwargs)

    def _buckets(self) -> Buckets | None:
        return self.trees if self.inputs.has_branches else self.chains


def profiled_graphs(runner: Any) -> int:
    """Bytes that the buckets will take, while vLLM measures what its own will: it sizes the KV cache by that.

    Nothing of the engine is set up yet, and what is now is thrown away. No estimate is better than no engine.
    """
    shape = runner.shape
    try:
        runner.shape = model_shape(runner)
        mode = runner.shape[0]
        if mode is DraftMode.OFF:
            return 0
        with (
            attending_by_trees(runner) if mode is DraftMode.TREE else nullcontext(),
            runner.maybe_setup_dummy_loras(runner.lora_config),
        ):
            chains, trees = plans_for(runner)
            return _profiled(runner, trees, "trees") + _profiled(runner, chains, "chains")
    except Exception as error:
        logger.warning("Spec rollout: graphs of steps with drafts are not in the memory profile: %r", error)
        return 0
    finally:
        runner.shape = shape


def _profiled(runner: Any, plan: GraphPlan | None, what: str) -> int:
    """Bytes of one set, as vLLM measures and reckons them: around the captures of the largest alone.

    What is computed before a capture takes memory as well, and gives it back.
    """
    if plan is None:
        return 0
    samples: list[int] = []
    buckets = Buckets(runner, plan, samples)
    _capture(runner, buckets, what)
    return int(_extrapolate_full_graph_memory(samples, len(buckets._capture_descs[CUDAGraphMode.FULL])))


def _uncaptured(
    desc: BatchExecutionDescriptor, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any
) -> BatchExecutionDescriptor:
    """The descriptor of a step that no graph holds."""
    none = CUDAGraphMode.NONE
    return replace(
        desc, cg_mode=none, num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=None, max_query_len=None
    )


def _capture(runner: Any, buckets: Buckets, what: str) -> None:
    """Those of trees with no nodes in them: any may stand there later."""
    runner.inputs.by_ancestors = what == "trees"
    try:
        buckets.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            has_lora=runner.lora_config is not None,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
            lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
            progress_bar_desc=f"Capturing CUDA graphs for {what}",
        )
    finally:
        runner.inputs.by_ancestors = False
