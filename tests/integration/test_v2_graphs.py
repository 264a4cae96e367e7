"""Which captured graph a step with branches is given, and which are captured; the capture itself needs a GPU."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_specrollout.observe.self_check import TREE_GRAPHS
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2 import graphs as module
from vllm_specrollout.worker.v2.graphs import TREES_UP_TO, DraftGraphs, TreeGraphs, most_requests, profiled_graphs
from vllm_specrollout.worker.v2.lane import Lane

FULL = CUDAGraphMode.FULL
PIECEWISE = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=512, num_reqs=None)
# of the mode FULL: causal, for any batch
MIXED = BatchExecutionDescriptor(cg_mode=FULL, num_tokens=512, num_reqs=256)
ROWS = 25


class Stock:
    """Stands in for vLLM's own manager, which chooses among these."""

    def __init__(self, *descs: BatchExecutionDescriptor) -> None:
        self.own = _managed(CudaGraphManager)
        self.own._candidates = {(rows, 0): list(descs) for rows in range(1, 513)}

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        return self.own.dispatch(*args, **kwargs)


def _managed(kind: type) -> Any:
    made = kind.__new__(kind)
    made.lora_capture_cases, made._lora_dispatch_map = [0], {}
    made._candidates, made._capture_descs, made._graphs_captured, made.graphs = {}, {}, True, {}
    return made


def tree_graphs(most: int = TREES_UP_TO) -> TreeGraphs:
    made = _managed(TreeGraphs)
    made._most, made.decode_query_len = most, ROWS
    made._init_candidates()
    made.graphs = dict.fromkeys(made._capture_descs[FULL])
    return made


def graphs_over(*descs: BatchExecutionDescriptor, trees: TreeGraphs | None) -> DraftGraphs:
    made = DraftGraphs()
    made.stock, made.trees = Stock(*descs), trees
    return made


def dispatch(graphs: Any, reqs: int, tokens: int, longest: int | None) -> BatchExecutionDescriptor:
    """As vLLM asks."""
    uniform = longest if longest and tokens == reqs * longest else None
    return graphs.dispatch(reqs, tokens, uniform, num_active_loras=0, max_query_len=longest)


@pytest.mark.parametrize("reqs", range(1, TREES_UP_TO + 1))
def test_a_step_gets_the_graph_of_its_number_of_requests(reqs: int) -> None:
    graphs = graphs_over(PIECEWISE, trees=tree_graphs())
    for tokens, longest in ((reqs * ROWS, ROWS), (reqs + 1, 2), (reqs * 4, 4)):
        found = dispatch(graphs, reqs, tokens, longest)
        assert (found.cg_mode, found.num_reqs, found.num_tokens, found.max_query_len) == (FULL, reqs, reqs * ROWS, ROWS)


@pytest.mark.parametrize("reqs, tokens, longest", [(5, 60, 13), (2, 80, 40), (4, 52, None)])
def test_what_no_graph_holds_is_left_to_vllms_piecewise_graphs(reqs: int, tokens: int, longest: int | None) -> None:
    """Too many requests; too long a query; a prompt among them (vLLM then gives no longest query)."""
    assert dispatch(graphs_over(PIECEWISE, trees=tree_graphs(4)), reqs, tokens, longest) is PIECEWISE


@pytest.mark.parametrize(
    "causal",
    [
        BatchExecutionDescriptor(cg_mode=FULL, num_tokens=200, num_reqs=8, uniform_token_count=ROWS),
        BatchExecutionDescriptor(cg_mode=FULL, num_tokens=200, num_reqs=200, max_query_len=ROWS),
    ],
    ids=["uniform", "of any lengths"],
)
def test_without_a_graph_of_ours_a_step_runs_piecewise_though_a_decode_graph_of_vllms_holds_it(
    causal: BatchExecutionDescriptor,
) -> None:
    graphs = graphs_over(causal, PIECEWISE, trees=None)
    assert dispatch(graphs.stock, 4, 4 * ROWS, ROWS) is causal
    assert dispatch(graphs, 4, 4 * ROWS, ROWS) is PIECEWISE


@pytest.mark.parametrize("trees", [tree_graphs(4), None], ids=["graphs", "no graphs"])
def test_branches_never_replay_a_causal_graph(trees: TreeGraphs | None) -> None:
    """With `cudagraph_mode=FULL`, vLLM has a graph for every batch."""
    graphs = graphs_over(MIXED, trees=trees)
    found = dispatch(graphs, 6, 48, 8)
    assert (found.cg_mode, found.num_tokens, found.num_reqs) == (CUDAGraphMode.NONE, 48, 6)
    with pytest.raises(AssertionError, match="causal"):
        graphs.run_fullgraph(MIXED)


def test_a_graph_is_replayed_by_whoever_captured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, played = graphs_over(PIECEWISE, trees=tree_graphs()), []
    monkeypatch.setattr(graphs.trees, "run_fullgraph", played.append)
    desc = dispatch(graphs, 4, 52, 13)
    graphs.run_fullgraph(desc)
    assert played == [desc]


def test_the_largest_graph_is_captured_first_and_vllm_makes_a_batch_of_each() -> None:
    buffers = InputBuffers(max_num_reqs=8, max_num_tokens=8 * ROWS, device=torch.device("cpu"))
    descs = tree_graphs()._capture_descs[FULL]
    assert [desc.num_reqs for desc in descs] == list(range(TREES_UP_TO, 0, -1))
    for desc in descs:
        batch = InputBatch.make_dummy(desc.num_reqs, desc.num_tokens, buffers, max_query_len=desc.max_query_len)
        assert np.diff(batch.query_start_loc_np[: desc.num_reqs + 1]).tolist() == [ROWS] * desc.num_reqs


def test_every_number_of_adapters_has_its_graphs() -> None:
    made = _managed(TreeGraphs)
    made.lora_capture_cases, made._most, made.decode_query_len = [0, 2], 3, ROWS
    made._init_candidates()
    assert [(desc.num_reqs, desc.num_active_loras) for desc in made._capture_descs[FULL]] == [
        (reqs, loras) for reqs in (3, 2, 1) for loras in (0, 2)
    ]
    assert made._candidates[30, 2][0].num_active_loras == 2


def _runner(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, reqs: int = 256, rows: int = 8192, ranks: int = 1
) -> Any:
    # what is handed on to vLLM's capture
    names = "model model_state input_buffers intermediate_tensors block_tables attn_groups kv_cache_config"
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        max_num_reqs=reqs,
        max_num_tokens=rows,
        max_draft_tokens=ROWS - 1,
        inputs=SimpleNamespace(by_ancestors=False),
        maybe_setup_dummy_loras=lambda config: nullcontext(),
        lora_config=None,
        use_aux_hidden_state_outputs=False,
        **dict.fromkeys(names.split()),
    )


@pytest.mark.parametrize(
    "runner, most",
    [
        ({}, TREES_UP_TO),
        ({"reqs": 3}, 3),
        # no step has more rows than that
        ({"rows": 60}, 2),
        ({"mode": CUDAGraphMode.NONE}, 0),
        ({"mode": CUDAGraphMode.PIECEWISE}, 0),
        ({"ranks": 2}, 0),
    ],
)
def test_there_is_a_graph_for_as_many_requests_as_trees_are_drafted_for(runner: dict[str, Any], most: int) -> None:
    assert most_requests(_runner(**runner)) == most


def test_the_oldest_version_captures_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.features, "installed", lambda: module.features.TABLE["0.29.0"])
    graphs = DraftGraphs()
    # nothing else of a runner is asked for
    graphs.capture(SimpleNamespace())
    assert graphs.trees is None and not graphs.failed


class Noted:
    """Stands in for our graphs: the first makes a pool of 100 MiB, and each takes 3 MiB."""

    made: list[Any] = []
    error: Exception | None = None

    def __init__(self, runner: Any, most: int, samples: list[int] | None) -> None:
        self._capture_descs, self.samples, self.runner = {FULL: [None] * most}, samples, runner
        self.made.append(weakref.ref(self))

    def capture(self, *args: Any, **kwargs: Any) -> None:
        assert self.runner.inputs.by_ancestors
        if self.error is not None:
            raise self.error
        if self.samples is not None:
            self.samples += [103 << 20, 3 << 20]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    monkeypatch.setattr(module, "TreeGraphs", Noted)
    monkeypatch.setattr(module, "create_lora_capture_hook", lambda *args: None)
    monkeypatch.setattr(Noted, "made", [])
    return Noted


def test_graphs_are_captured_with_the_tree_kernel_and_one_that_fails_costs_no_server(
    monkeypatch: pytest.MonkeyPatch, noted: type[Noted]
) -> None:
    runner, graphs = _runner(), DraftGraphs()
    graphs.capture(runner)
    assert isinstance(graphs.trees, Noted) and not runner.inputs.by_ancestors
    graphs = DraftGraphs()
    monkeypatch.setattr(Noted, "error", RuntimeError("no room"))
    graphs.capture(runner)
    assert graphs.trees is None and graphs.failed == {TREE_GRAPHS: "RuntimeError: no room"}
    assert not runner.inputs.by_ancestors


@pytest.mark.parametrize("shape", list(DraftMode))
def test_their_memory_is_reckoned_from_two_of_them(
    monkeypatch: pytest.MonkeyPatch, noted: type[Noted], shape: DraftMode
) -> None:
    installed: list[bool] = []

    @contextmanager
    def installing(runner: Any) -> Any:
        installed.append(True)
        yield
        installed.append(False)

    monkeypatch.setattr(module, "attending_by_trees", installing)
    monkeypatch.setattr(module, "model_shape", lambda runner: (shape, ""))
    is_tree = shape is DraftMode.TREE
    assert profiled_graphs(_runner()) == ((100 + TREES_UP_TO * 3) << 20 if is_tree else 0)
    assert installed == ([True, False] if is_tree else []) and all(made() is None for made in noted.made)
    # whatever fails there, the engine starts
    monkeypatch.setattr(module, "_captured", None)
    assert profiled_graphs(_runner()) == 0


def test_our_choice_lasts_for_one_step() -> None:
    runner, graphs = SimpleNamespace(cudagraph_manager=Stock(MIXED)), DraftGraphs()
    stock = runner.cudagraph_manager
    with pytest.raises(ZeroDivisionError), graphs.chosen_from(runner):
        # before anything was captured, and if nothing ever is
        assert dispatch(runner.cudagraph_manager, 4, 52, 13).cg_mode == CUDAGraphMode.NONE
        raise ZeroDivisionError
    assert runner.cudagraph_manager is stock


class StockRunner:
    """Stands in for vLLM's runner."""

    def capture_model(self, **kwargs: Any) -> int:
        self.told.append("vLLM's")
        return 1000


@pytest.mark.parametrize("shape", list(DraftMode))
@pytest.mark.parametrize("levels", [0, 3], ids=["no model", "a model drafts"])
def test_the_lane_captures_graphs_for_trees_alone_and_before_vllms_own(
    monkeypatch: pytest.MonkeyPatch, shape: DraftMode, levels: int
) -> None:
    monkeypatch.setattr("vllm_specrollout.worker.v2.lane.profiled_graphs", lambda runner: 24)
    runner = object.__new__(type("Runner", (Lane, StockRunner), {}))
    runner.told, runner.shape, runner._levels, runner._has_trees = [], (shape, ""), levels, not levels
    runner.draft_graphs = SimpleNamespace(capture=lambda runner: runner.told.append("ours"))
    assert runner.capture_model() == 1000
    assert runner.told == (["ours", "vLLM's"] if shape is DraftMode.TREE and not levels else ["vLLM's"])
    # the shape is not known yet while vLLM measures
    assert runner.capture_model(profile_only=True) == (1000 if levels else 1024)
    assert "ours" not in runner.told[-1:]
