"""Which captured graph a step with drafts is given, and which are captured; the capture itself needs a GPU."""

from __future__ import annotations

import weakref
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm_specrollout.kernels.tree_attention.launch import default_tile, plan_launch

from tests.trees import batch_of, chain
from vllm_specrollout.scheduling.cudagraphs import GraphBucket, plan_graphs
from vllm_specrollout.types import DraftMode, DraftTree
from vllm_specrollout.worker.v2 import graphs as module
from vllm_specrollout.worker.v2.graphs import Buckets, DraftGraphs, draft_sizes, plans_for, profiled_graphs
from vllm_specrollout.worker.v2.host import StepState
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.runner import SpecRolloutV2

PIECEWISE = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=512, num_reqs=None)
# of the mode FULL: causal, for any batch
MIXED = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=512, num_reqs=256)
SIZES = [1, 2, 4, *range(8, 257, 8)]
# a node with two children
FORK = DraftTree(np.int32([5, 6, 7]), np.int32([-1, 0, 0]), np.zeros(3, np.float32), np.zeros(3, np.int32))


class Stock:
    """Stands in for vLLM's own manager."""

    def __init__(self, answer=PIECEWISE):
        self.answer, self.replayed = answer, []

    def dispatch(self, *args, **kwargs):
        return self.answer

    def run_fullgraph(self, desc):
        self.replayed.append(desc)


def buckets(longest: int) -> Buckets:
    made = Buckets.__new__(Buckets)
    made.plan = plan_graphs(draft_sizes(longest), SIZES, 256, 256)
    made.lora_capture_cases = [0]
    made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
    made._lora_dispatch_map = {}
    made.graphs = {}
    made._init_candidates()
    return made


def graphs_over(stock: Stock, *, trees: bool = True, chains: bool = True) -> DraftGraphs:
    made = DraftGraphs(SimpleNamespace(has_branches=False))
    made.stock, made.chains, made.trees = stock, buckets(16) if chains else None, buckets(24) if trees else None
    return made


@pytest.fixture
def graphs() -> DraftGraphs:
    return graphs_over(Stock())


def dispatch(graphs, reqs, tokens, longest, *, branches=False):
    graphs.inputs.has_branches = branches
    return graphs.dispatch(reqs, tokens, None, num_active_loras=0, max_query_len=longest)


@pytest.mark.parametrize("branches", [False, True], ids=["chains", "trees"])
def test_a_step_gets_the_cheapest_bucket_that_holds_it(graphs, branches):
    plan = (graphs.trees if branches else graphs.chains).plan
    for reqs, tokens, longest in ((1, 4, 4), (2, 26, 13), (4, 52, 13), (16, 64, 4), (40, 200, 13)):
        found = dispatch(graphs, reqs, tokens, longest, branches=branches)
        assert found.cg_mode == CUDAGraphMode.FULL
        bucket = GraphBucket(found.num_tokens, found.num_reqs, found.max_query_len)
        fitting = [b for b in plan.target if b.holds(reqs, tokens, longest)]
        assert bucket in fitting and bucket.cost == min(b.cost for b in fitting)


def test_vllm_makes_a_batch_to_capture_of_every_bucket(graphs):
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    buffers = InputBuffers(max_num_reqs=256, max_num_tokens=256, device=torch.device("cpu"))
    for bucket in (*graphs.chains.plan.target, *graphs.trees.plan.target):
        rows, reqs, longest = astuple(bucket)
        batch = InputBatch.make_dummy(reqs, rows, buffers, max_query_len=longest)
        assert (batch.num_reqs, batch.num_tokens) == (reqs, rows)
        assert int(np.diff(batch.query_start_loc_np[: reqs + 1]).max()) <= longest


def _programs(bucket: GraphBucket, heads: int, kv_heads: int) -> tuple[int, int]:
    """Programs that a layer's attention launches at a context of 40,960: of the kernel, and of its reduction."""
    rows, reqs, longest = astuple(bucket)
    group, tile = heads // kv_heads, default_tile(torch.bfloat16, 128)
    launch = plan_launch(tile, rows, reqs, kv_heads, group, 128, longest, 40_960)
    tiles = launch.tiles if launch.search else launch.tiles * reqs
    return tiles * kv_heads * launch.num_programs, longest * reqs * kv_heads if launch.is_split else 0


@pytest.mark.parametrize(
    "reqs, nodes, longest, programs",
    # where buckets had R = T and Q = 25: 6912 + 6400, 8064 + 11,200, 8192 + 51,200
    [(1, 24, 25, (432, 400)), (4, 12, 25, (864, 800)), (32, 7, 8, (8192, 4096)), (32, 7, 25, (6912, 6400))],
)
def test_a_step_launches_few_programs_that_find_nothing_to_do(reqs, nodes, longest, programs):
    """With the most requests that vLLM runs on an H100 by default; 32 query heads and 8 KV heads."""
    runner = _runner(sizes=[*SIZES, *range(272, 513, 16)])
    runner.max_num_reqs = 1024
    _, trees = plans_for(runner)
    fitting = [bucket for bucket in trees.target if bucket.holds(reqs, reqs * (1 + nodes), longest)]
    assert _programs(min(fitting, key=lambda bucket: bucket.cost), 32, 8) == programs


@pytest.mark.parametrize("branches", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("reqs, tokens, longest", [(64, 64 * 8, 8), (2, 80, 40), (4, 52, None)])
def test_what_no_bucket_holds_is_left_to_vllms_own_graphs(graphs, reqs, tokens, longest, branches):
    """Too many tokens; too long a query; a prompt among them (vLLM then gives no longest query)."""
    assert dispatch(graphs, reqs, tokens, longest, branches=branches) is PIECEWISE


def test_chains_and_trees_are_never_given_each_others_buckets(graphs):
    # longer than a chain may be
    assert dispatch(graphs, 4, 4 * 20, 20) is PIECEWISE
    assert dispatch(graphs, 4, 4 * 20, 20, branches=True).max_query_len == 25
    without = graphs_over(Stock(), trees=False)
    assert dispatch(without, 4, 52, 13).cg_mode == CUDAGraphMode.FULL
    assert dispatch(without, 4, 52, 13, branches=True) is PIECEWISE


@pytest.mark.parametrize("trees, chains", [(True, True), (False, False)], ids=["buckets", "no buckets"])
def test_branches_never_replay_a_causal_graph(trees, chains):
    """With `cudagraph_mode=FULL`, vLLM has a graph for every batch; with `max_graphs=0` we have none."""
    graphs = graphs_over(Stock(MIXED), trees=trees, chains=chains)
    step = (64, 64 * 8, 8)
    found = dispatch(graphs, *step, branches=True)
    assert (found.cg_mode, found.num_tokens, found.num_reqs) == (CUDAGraphMode.NONE, 512, 64)
    assert dispatch(graphs, *step) is MIXED
    with pytest.raises(AssertionError, match="causal"):
        graphs.inputs.has_branches = True
        graphs.run_fullgraph(MIXED)


def test_a_graph_is_replayed_by_whoever_captured_it(graphs):
    played = []
    for name in ("chains", "trees"):
        made = getattr(graphs, name)
        made.graphs = dict.fromkeys(made._capture_descs[CUDAGraphMode.FULL])
        made.run_fullgraph = lambda desc, name=name: played.append((name, desc))
    for branches in (False, True):
        desc = dispatch(graphs, 4, 52, 13, branches=branches)
        graphs.run_fullgraph(desc)
    assert [name for name, _ in played] == ["chains", "trees"]
    graphs.inputs.has_branches = False
    graphs.run_fullgraph(MIXED)
    assert graphs.stock.replayed == [MIXED]


def test_the_largest_graph_is_captured_first(graphs):
    for made in (graphs.chains, graphs.trees):
        captured = [desc.num_tokens for desc in made._capture_descs[CUDAGraphMode.FULL]]
        assert captured == sorted(captured, reverse=True) and len(captured) == len(made.plan.target)


def test_what_is_expected_of_a_step_decides_before_its_inputs_are_made():
    inputs = TreeInputs(4, 64, 8, "cpu")
    for trees, branches in ([chain([1, 2])], False), ([chain([1]), FORK], True), ([], False):
        inputs.clear()
        inputs.expect(batch_of(trees))
        assert inputs.has_branches is branches


def _runner(
    mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    max_graphs=64,
    sizes=SIZES,
    shape=DraftMode.TREE,
    support=AttentionCGSupport.ALWAYS,
    ranks=1,
    **config,
):
    builder = SimpleNamespace(
        get_cudagraph_support=lambda *args: support, get_varlen_cudagraph_max_query_len=lambda *args: None
    )
    group = SimpleNamespace(
        get_metadata_builder=lambda index: builder, kv_cache_spec=None, backend=Stock, layer_names=["layer"]
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, cudagraph_mode=mode),
        cudagraph_manager=Stock(),
        spec_config=SimpleNamespace(max_graphs=max_graphs, max_depth=16),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        shape=(shape, ""),
        max_num_reqs=256,
        max_draft_tokens=24,
        attn_groups=[[group]],
        vllm_config=None,
        **config,
    )


def counts(**runner):
    return tuple(plan.num_graphs if plan is not None else 0 for plan in plans_for(_runner(**runner)))


def test_the_set_limit_holds_for_both_sets_together():
    chains, trees = counts(max_graphs=11)
    assert 0 < chains <= 5 and 0 < trees <= 6
    assert counts(max_graphs=1) == (0, 1)
    assert counts(max_graphs=0) == (0, 0)


def test_chains_have_all_graphs_where_trees_are_not_to_be_had():
    chains, trees = counts(max_graphs=20, shape=DraftMode.CHAIN)
    assert 10 < chains <= 20 and trees == 0


def test_chains_have_no_graphs_beside_a_backend_that_replays_equal_lengths_only():
    assert counts(max_graphs=20, support=AttentionCGSupport.UNIFORM_BATCH)[0] == 0
    assert counts(max_graphs=20, support=AttentionCGSupport.UNIFORM_BATCH)[1] > 10
    assert counts(support=AttentionCGSupport.UNIFORM_BATCH, shape=DraftMode.CHAIN) == (0, 0)


def test_without_full_graphs_or_with_several_data_parallel_ranks_nothing_is_captured():
    assert counts(mode=CUDAGraphMode.NONE) == counts(mode=CUDAGraphMode.PIECEWISE) == (0, 0)
    assert counts(ranks=2) == (0, 0)
    assert counts(sizes=[]) == counts(sizes=[1, 2]) == (0, 0)


def test_a_chains_bucket_promises_no_more_than_a_chain_can_be_long():
    chains, trees = plans_for(_runner(max_graphs=4096))
    assert max(bucket.max_query_len for bucket in chains.target) == 17
    assert max(bucket.max_query_len for bucket in trees.target) == 25
    # as the least drafts have, of 2 and of 3 nodes
    assert min(bucket.num_tokens for bucket in chains.target) == min(bucket.num_tokens for bucket in trees.target) == 4


def test_our_choice_lasts_for_one_step():
    runner, graphs = SimpleNamespace(cudagraph_manager=Stock(MIXED)), DraftGraphs(SimpleNamespace(has_branches=True))
    stock = runner.cudagraph_manager
    with pytest.raises(ZeroDivisionError), graphs.chosen_from(runner):
        # before anything was captured, and if nothing ever is
        assert dispatch(runner.cudagraph_manager, 4, 52, 13, branches=True).cg_mode == CUDAGraphMode.NONE
        raise ZeroDivisionError
    assert runner.cudagraph_manager is stock


class StockRunner:
    """Stands in for vLLM's runner."""

    decode_query_len = 1

    def prepare_inputs(self, *args):
        return SimpleNamespace(cu_num_logits_np=np.array([0, 3]), max_query_len=None, req_ids=["0"])


@pytest.mark.parametrize("desc", [PIECEWISE, replace(MIXED, max_query_len=17)], ids=["piecewise", "bucket"])
def test_attentions_metadata_is_made_for_what_the_bucket_was_captured_for(desc):
    """Not for the step at hand, whose longest request may be shorter: a schedule of FlashAttention 3 depends on it."""
    runner = object.__new__(type("Runner", (SpecRolloutV2, StockRunner), {}))
    runner.inputs = SimpleNamespace(set_trees=lambda *args: None)
    runner.req_states = SimpleNamespace(req_id_to_index={}, draft_tokens=None)
    runner.step, runner.max_draft_tokens = StepState(trees=batch_of([chain([1, 2])])), 24
    batch = runner.prepare_inputs(None, None, desc, 0)
    assert batch.max_query_len == desc.max_query_len and runner.decode_query_len == 1


# what is handed on to vLLM's capture
BARE = dict.fromkeys(
    ("lora_config", "model", "model_state", "input_buffers", "intermediate_tensors", "block_tables", "kv_cache_config")
) | {"use_aux_hidden_state_outputs": False}


class Noted:
    """Stands in for a set of buckets: notes what attention would have been captured."""

    captured = []

    def __init__(self, runner, plan):
        self.runner = runner

    def capture(self, *args, progress_bar_desc, **kwargs):
        self.captured.append((progress_bar_desc.split()[-1], self.runner.inputs.by_ancestors))


def test_only_the_graphs_of_trees_are_captured_with_the_tree_kernel(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(module, "Buckets", Noted)
    monkeypatch.setattr(module, "create_lora_capture_hook", lambda *args: None)
    runner = _runner(
        inputs=SimpleNamespace(by_ancestors=False, has_branches=False),
        maybe_setup_dummy_loras=lambda config: nullcontext(),
        **BARE,
    )
    for shape, expected in (
        (DraftMode.TREE, [("trees", True), ("chains", False)]),
        (DraftMode.CHAIN, [("chains", False)]),
    ):
        Noted.captured.clear()
        runner.shape = (shape, "")
        made = DraftGraphs(runner.inputs)
        made.capture(runner)
        assert Noted.captured == expected and not runner.inputs.by_ancestors
        assert (made.trees is None) == (shape is DraftMode.CHAIN)


@pytest.mark.parametrize("shape, sets", [(DraftMode.TREE, 2), (DraftMode.CHAIN, 1), (DraftMode.OFF, 0)])
def test_the_memory_of_all_graphs_is_reckoned_from_two_of_each_kind(monkeypatch, shape, sets):
    from contextlib import contextmanager, nullcontext

    held, wrapped = [], []

    class Sampled:
        """The first makes a pool of 100 MiB, and each takes 3 MiB."""

        def __init__(self, runner, plan, samples):
            self._capture_descs, self.samples = {CUDAGraphMode.FULL: list(plan.target)}, samples
            held.append(weakref.ref(self))

        def capture(self, *args, progress_bar_desc, **kwargs):
            self.samples += [103 << 20, 3 << 20]
            wrapped.append((progress_bar_desc.split()[-1], runner.inputs.by_ancestors, bool(installed)))

    @contextmanager
    def installing(runner):
        installed.append(runner)
        yield
        installed.clear()

    installed = []
    monkeypatch.setattr(module, "Buckets", Sampled)
    monkeypatch.setattr(module, "attending_by_trees", installing)
    monkeypatch.setattr(module, "model_shape", lambda runner: (shape, ""))
    monkeypatch.setattr(module, "create_lora_capture_hook", lambda *args: None)
    runner = _runner(
        inputs=SimpleNamespace(by_ancestors=False), maybe_setup_dummy_loras=lambda config: nullcontext(), **BARE
    )
    runner.shape = before = (DraftMode.OFF, "not set up")
    found = profiled_graphs(runner)
    graphs = 64 if sets else 0
    assert found == (sets * 100 + graphs * 3) << 20
    assert runner.shape == before and not installed and all(made() is None for made in held)
    trees, chains = ("trees", True, True), ("chains", False, shape is DraftMode.TREE)
    assert wrapped == {2: [trees, chains], 1: [chains], 0: []}[sets]
    # whatever fails there, the engine starts
    monkeypatch.setattr(module, "_capture", None)
    assert profiled_graphs(runner) == 0 and runner.shape == before


@pytest.mark.parametrize("version", ["0.29.0", "0.30.0"])
def test_no_drafts_are_captured_where_vllm_cannot_say_what_replays_them(monkeypatch, version):
    monkeypatch.setattr(module.features, "installed", lambda: module.features.TABLE[version])
    assert counts() == (0, 0)
    graphs = DraftGraphs(TreeInputs(4, 64, 8, "cpu"))
    # nothing else of a runner is asked for
    graphs.capture(SimpleNamespace())
    assert graphs.chains is None and graphs.trees is None
