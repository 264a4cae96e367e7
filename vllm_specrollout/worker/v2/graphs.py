"""CUDA graphs for steps with branches, beside vLLM's own for all others.

A graph keeps the attention that it was captured with. vLLM's decode graphs attend causally, as chains do, so steps of
chains replay those. Branches need tree attention, for all rows of their step. Few requests share such a step, and each
may have the most nodes: so one graph for every number of requests is all, and no size has to be chosen.

A step that none of them holds is vLLM's to run, piecewise or without graphs, but in no full graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

from vllm_specrollout.errors import logger
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.observe.self_check import TREE_GRAPHS, in_words
from vllm_specrollout.patches import features
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2.attention import attending_by_trees
from vllm_specrollout.worker.v2.shape import model_shape

TREES_UP_TO = 8
"""Requests of a step, at most, that trees are drafted for: among more, rows cost more than branches bring."""


def most_requests(runner: Any) -> int:
    """Requests of the largest step that gets a graph; 0: none gets any."""
    if (
        not features.installed().captures_drafts
        or not runner.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # ranks that pad to different sizes would wait for each other forever
        or runner.parallel_config.data_parallel_size > 1
    ):
        return 0
    return min(TREES_UP_TO, runner.max_num_reqs, runner.max_num_tokens // (1 + runner.max_draft_tokens))


class TreeGraphs(ModelCudaGraphManager):
    """One graph for each number of requests.

    Args:
        most: the largest of them.
        samples: the bytes that the largest few take are added to it, and no others are captured.
    """

    def __init__(self, runner: Any, most: int, samples: list[int] | None = None) -> None:
        self._most = most
        super().__init__(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL,
            decode_query_len=1 + runner.max_draft_tokens,
            lora_capture_cases=runner.lora_capture_cases,
        )
        if samples is not None:
            self._max_full_descs_to_capture, self._capture_mem_samples = _FULL_GRAPH_PROFILING_SAMPLES, samples

    def _init_candidates(self) -> None:
        for loras in self.lora_capture_cases:
            # vLLM takes the first that holds the step
            descs = [
                BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=requests * self.decode_query_len,
                    num_reqs=requests,
                    max_query_len=self.decode_query_len,
                    num_active_loras=loras,
                )
                for requests in range(1, self._most + 1)
            ]
            self._capture_descs.setdefault(CUDAGraphMode.FULL, []).extend(descs)
            for num_tokens in range(1, descs[-1].num_tokens + 1):
                self._candidates[num_tokens, loras] = [desc for desc in descs if desc.num_tokens >= num_tokens]
        # the largest first: the others find their memory in the pool that it made
        self._capture_descs[CUDAGraphMode.FULL].sort(key=lambda desc: desc.num_tokens, reverse=True)


class DraftGraphs:
    """Takes the place of vLLM's manager in steps with branches; without a graph it still keeps them out of causal
    ones."""

    def __init__(self) -> None:
        self.stock: Any = None
        self.trees: TreeGraphs | None = None
        self.num_replayed = 0
        # part of the self-check -> why its graphs could not be captured
        self.failed: dict[str, str] = {}

    def capture(self, runner: Any) -> None:
        """Capture them all; a capture that fails costs graphs, never the server."""
        most = most_requests(runner)
        if not most:
            return
        try:
            self.trees = _captured(runner, most)
        except CONTAINED as error:
            logger.warning("Spec rollout: no CUDA graphs for trees: %s: %s", type(error).__name__, error)
            self.failed[TREE_GRAPHS] = in_words(error)

    @contextmanager
    def chosen_from(self, runner: Any) -> Iterator[None]:
        """Meanwhile, in a step with branches, they stand in the place of the runner's own."""
        self.stock, runner.cudagraph_manager = runner.cudagraph_manager, self
        try:
            yield
        finally:
            runner.cudagraph_manager = self.stock

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> BatchExecutionDescriptor:
        """What runs the step: one of ours, or else what vLLM would choose."""
        graphs = self.trees
        if graphs is not None:
            found = graphs.dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            if found.cg_mode == CUDAGraphMode.FULL:
                return found
        # a step of unknown lengths fits none of its decode graphs, so it looks for a piecewise one
        found = self.stock.dispatch(num_reqs, num_tokens, None, *args, **{**kwargs, "max_query_len": None})
        if found.cg_mode != CUDAGraphMode.FULL:
            return found
        # captured with causal attention, in which nodes would see their siblings
        none = CUDAGraphMode.NONE
        return replace(
            found, cg_mode=none, num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=None, max_query_len=None
        )

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        graphs = self.trees
        assert graphs is not None and desc in graphs.graphs, f"a step with branches, and a causal graph: {desc}"
        self.num_replayed += 1
        return graphs.run_fullgraph(desc)

    def run_pw_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock.run_pw_graph(*args, **kwargs)


def profiled_graphs(runner: Any) -> int:
    """Bytes that the graphs will take, while vLLM measures what its own will: it sizes the KV cache by that.

    They are measured and reckoned as vLLM's: around the captures of the largest alone, since what is computed before
    one takes memory as well, and gives it back. Nothing of the engine is set up yet, and what is now is thrown away. No
    estimate is better than no engine.
    """
    samples: list[int] = []
    try:
        most = most_requests(runner) if model_shape(runner)[0] is DraftMode.TREE else 0
        if not most:
            return 0
        with attending_by_trees(runner):
            graphs = _captured(runner, most, samples)
        return int(_extrapolate_full_graph_memory(samples, len(graphs._capture_descs[CUDAGraphMode.FULL])))
    except Exception as error:
        logger.warning("Spec rollout: graphs of steps with branches are not in the memory profile: %r", error)
        return 0


def _captured(runner: Any, most: int, samples: list[int] | None = None) -> TreeGraphs:
    """Those of steps of up to so many requests, with no nodes in them: any may stand there later."""
    # versions that capture no drafts lack it
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    graphs = TreeGraphs(runner, most, samples)
    runner.inputs.by_ancestors = True
    try:
        with freeze_gc_for_cudagraph_capture(), runner.maybe_setup_dummy_loras(runner.lora_config):
            graphs.capture(
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
                progress_bar_desc="Capturing CUDA graphs for trees",
            )
    finally:
        runner.inputs.by_ancestors = False
    return graphs
