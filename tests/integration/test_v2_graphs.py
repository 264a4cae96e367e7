"""Which captured graph a step with drafts is given; the capture itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_specrollout.policies.graphs import plan_graphs
from vllm_specrollout.worker.v2.graphs import DraftGraphs, draft_sizes, plan_for

pytestmark = pytest.mark.vllm

PIECEWISE = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=512, num_reqs=None)
SIZES = [1, 2, 4, *range(8, 257, 8)]


class Stock:
    """Stands in for vLLM's own manager."""

    def dispatch(self, *args, **kwargs):
        return PIECEWISE


@pytest.fixture
def graphs() -> DraftGraphs:
    made = DraftGraphs.__new__(DraftGraphs)
    made.plan = plan_graphs([24, 12, 6, 3], SIZES, 256, 256)
    made.stock = Stock()
    made.lora_capture_cases = [0]
    made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
    made._lora_dispatch_map = {}
    made._init_candidates()
    return made


def dispatch(graphs, reqs, tokens, longest):
    return graphs.dispatch(reqs, tokens, None, 0, max_query_len=longest)


def test_a_step_gets_the_smallest_bucket_that_holds_it(graphs):
    found = dispatch(graphs, 4, 4 * 13, 13)
    assert found.cg_mode == CUDAGraphMode.FULL
    fitting = [b for b in graphs.plan.target if b.holds(4, 52, 13)]
    assert found.num_tokens == min(b.num_tokens for b in fitting) and found.num_reqs >= 4 and found.max_query_len >= 13


@pytest.mark.parametrize("reqs, tokens, longest", [(64, 64 * 8, 8), (2, 80, 40), (4, 52, None)])
def test_what_no_bucket_holds_is_left_to_vllms_own_graphs(graphs, reqs, tokens, longest):
    """Too many tokens; too long a query; a prompt among them (vLLM then gives no longest query)."""
    assert dispatch(graphs, reqs, tokens, longest) is PIECEWISE


def test_the_largest_graph_is_captured_first(graphs):
    captured = [desc.num_tokens for desc in graphs._capture_descs[CUDAGraphMode.FULL]]
    assert captured == sorted(captured, reverse=True) and len(captured) == len(graphs.plan.target)


def _runner(mode, max_graphs=64, sizes=SIZES):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0), cudagraph_mode=mode
        ),
        cudagraph_manager=object(),
        spec_config=SimpleNamespace(max_graphs=max_graphs),
        max_num_reqs=256,
        max_draft_tokens=24,
    )


def test_the_set_limit_holds_and_zero_captures_none():
    assert plan_for(_runner(CUDAGraphMode.FULL_AND_PIECEWISE, max_graphs=10)).num_graphs <= 10
    assert plan_for(_runner(CUDAGraphMode.FULL_AND_PIECEWISE, max_graphs=0)) is None
    assert plan_for(_runner(CUDAGraphMode.NONE)) is None
    assert draft_sizes(24) == [24, 12, 6, 3]
