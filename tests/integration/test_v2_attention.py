"""Which attention a layer's rows go through: vLLM's own, or a context's and the nodes'."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm_specrollout.kernels.tree_rows.naive import lay_out

from tests.trees import chain
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import EMPTY_TREE, DraftMode, DraftTree
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.v2 import attention as module
from vllm_specrollout.worker.v2 import inputs as inputs_module
from vllm_specrollout.worker.v2.attention import TreeAttention
from vllm_specrollout.worker.v2.graphs import TREES_UP_TO
from vllm_specrollout.worker.v2.host import StepState
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.lane import Lane

MOST = 8
FORK = DraftTree(np.int32([5, 6]), np.int32([-1, -1]), np.zeros(2, np.float32), np.zeros(2, np.int32))


class Inner:
    """vLLM's implementation of a layer."""

    scale, head_size, logits_soft_cap, vllm_flash_attn_version = 0.125, 4, 30.0, 3

    def __init__(self):
        self.calls = []

    def forward(self, *args):
        self.calls.append(args)
        return "vLLM's"


@pytest.fixture
def layer(monkeypatch):
    made = TreeAttention(Inner(), TreeInputs(4, 16, "cpu"), MOST)
    made.launches = []
    # no kernel runs here
    monkeypatch.setattr(inputs_module, "lay_out", lay_out)
    made.contexts = []

    def flash(**options):
        made.contexts.append(options)
        return options["out"], "its sums"

    monkeypatch.setattr(module.fa_utils, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(module, "attend_to_nodes", lambda *args, **options: made.launches.append((args, options)))
    return made


def batch_of(rows: list[int]):
    """What vLLM's runner makes of a step: one request per entry, each with so many rows, all of them drafts but one."""
    starts = torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32)
    return SimpleNamespace(
        num_tokens=sum(rows),
        idx_mapping=torch.arange(len(rows)),
        query_start_loc=starts,
        cu_num_logits=starts,
        logits_indices=torch.arange(sum(rows)),
        seq_lens=torch.tensor(rows, dtype=torch.int32) + 40,
        input_ids=torch.zeros(sum(rows), dtype=torch.int32),
    )


def drafted(trees):
    """[R, 3, MOST] as the device has them."""
    made = torch.full((len(trees), 3, MOST), -1, dtype=torch.int32)
    for own, tree in zip(made, trees, strict=True):
        own[0, : tree.size], own[1, : tree.size] = torch.tensor(tree.token_ids), torch.tensor(tree.parents)
    return made


def step(layer, trees, **scales):
    both = [trees.get(str(i), EMPTY_TREE) for i in range(2)]
    rows = [1 + tree.size for tree in both]
    layer.inputs.clear()
    layer.inputs.has_branches = any((tree.parents != np.arange(-1, tree.size - 1)).any() for tree in both)
    layer.inputs.set_drafted(batch_of(rows), drafted(both))
    query = torch.zeros(sum(rows), 2, 4)
    metadata = SimpleNamespace(
        num_actual_tokens=sum(rows),
        seq_lens=torch.tensor(rows) + 40,
        query_start_loc=None,
        block_table=None,
        max_query_len=max(rows),
        max_seq_len=50,
        max_num_splits=32,
    )
    cache = torch.zeros(2, 1, 16, 8)
    output = torch.zeros(sum(rows), 2, 4)
    return layer.forward(None, query, query, query, cache, metadata, output, **scales)


def schedule_of(rows):
    schedule = SchedulerOutput.make_empty()
    schedule.num_scheduled_tokens, schedule.total_num_scheduled_tokens = rows, sum(rows.values())
    schedule.scheduled_spec_decode_tokens = {"a": [-1] * 8}
    return schedule


def lane_of(shape=DraftMode.TREE, levels=0):
    """A lane at the beginning of a step."""
    runner, nothing = object.__new__(Lane), lambda *args: None
    runner.shape, runner._levels, runner.max_draft_tokens, runner._withheld = (shape, ""), levels, 8, {}
    runner._has_trees = not levels
    runner._next_withheld, runner.spec_config = "", SimpleNamespace(max_depth=8)
    runner.step, runner.inputs, runner._during = StepState(num_running=2), TreeInputs(4, 16, "cpu"), ExitStack()
    runner.times, runner.drafts = SimpleNamespace(begin_step=nothing), SimpleNamespace()
    runner.draft_graphs = SimpleNamespace(chosen_from=lambda runner: nullcontext())
    runner.verifier, runner.adaptive_verification = SimpleNamespace(), "vLLM's"
    runner.host = SimpleNamespace(drafting=Drafting(Speculator([], FixedBudget(8, 8), listeners=[Metrics(())])))
    runner._bound_rows = nothing
    return runner


@pytest.mark.parametrize(
    "rows, is_alone",
    [({"a": 9, "b": 1}, True), ({"a": 9, "b": 2}, False), ({"a": 9, "new": 300}, False), ({"a": 10}, False)],
    ids=["decodes alone", "two rows of a prompt", "a new one", "a prompt's last piece, with room behind it"],
)
def test_nothing_branches_beside_a_piece_of_a_prompt(rows, is_alone):
    runner = lane_of()
    with runner._during:
        runner._begun(schedule_of(rows))
        # a tree is verified as it is, a chain as far as it pays
        assert runner.inputs.has_branches is is_alone and runner.adaptive_verification == (
            None if is_alone else "vLLM's"
        )
    assert runner.adaptive_verification == "vLLM's"


@pytest.mark.parametrize(
    "shape, levels, running, may_branch",
    [
        (DraftMode.TREE, 0, TREES_UP_TO, True),
        (DraftMode.TREE, 0, TREES_UP_TO + 1, False),
        (DraftMode.CHAIN, 0, 2, False),
        # what vLLM's speculators read of a step's rows is what is accepted only if those come first
        (DraftMode.TREE, 3, 2, False),
    ],
    ids=["trees", "too many requests", "chains alone", "a model drafts"],
)
def test_what_is_drafted_and_verified_branches_where_it_may(shape, levels, running, may_branch):
    runner = lane_of(shape, levels)
    runner.step.num_running = running
    with runner._during:
        runner._begun(schedule_of({"a": 9}))
        assert (runner.inputs.has_branches, runner.drafts.may_branch) == (may_branch, may_branch)


def test_a_model_for_which_nothing_is_drafted_gets_no_row_of_the_room():
    runner = lane_of(DraftMode.OFF)
    assert runner._begun(schedule_of({"a": 9, "b": 1})).num_scheduled_tokens == {"a": 1, "b": 1}
    assert runner.drafts.is_paused and not runner.step.has_drafts


def test_chains_go_through_vllms_own_attention_and_branches_through_two_launches(layer):
    assert step(layer, {"0": chain([1, 2, 3])}) == "vLLM's"
    assert (len(layer.inner.calls), len(layer.launches)) == (1, 0)
    step(layer, {"0": chain([1, 2, 3]), "1": FORK})
    assert (len(layer.inner.calls), len(layer.contexts), len(layer.launches)) == (1, 1, 1)


def test_flash_attention_is_told_of_contexts_and_the_kernel_of_nodes(layer):
    step(layer, {"0": FORK})
    context, (_, options) = layer.contexts[0], layer.launches[0]
    # the second request has no nodes: its row is of its context
    assert context["seqused_k"].tolist() == [41, 41] and not context["causal"] and context["return_softmax_lse"]
    assert (context["num_splits"], context["fa_version"], context["softcap"]) == (32, 3, 30.0)
    assert [tuple(context[name].shape) for name in ("k", "v")] == [(2, 16, 1, 4)] * 2
    assert options == {"scale": 0.125, "softcap": 30.0, "most_nodes": MOST}


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_a_scale_of_the_output_is_handed_on_or_refused_but_never_dropped(layer, name):
    scale = torch.ones(1)
    step(layer, {"0": chain([1])}, **{name: scale})
    assert any(given is scale for given in layer.inner.calls[0])
    with pytest.raises(UnsupportedError, match="fuse_attn_quant"):
        step(layer, {"0": FORK}, **{name: scale})
    assert not layer.launches


def test_a_step_of_chains_leaves_no_tree_in_the_buffers_that_graphs_read(layer):
    step(layer, {"0": chain([1, 2]), "1": FORK})
    assert layer.inputs.num_nodes.tolist() == [2, 2, 0, 0]
    assert layer.inputs.draft_ids.tolist() == [0, 1, 2, 0, 5, 6]
    assert layer.inputs.parents.tolist() == [-1, 0, 1, -1, 0, 0] and layer.inputs.parents.dtype == torch.int32
    assert layer.inputs.ancestors[:6].tolist()[1:3] == [1, 3] and layer.inputs.ancestors[4:6].tolist() == [1, 2]
    step(layer, {"0": chain([1, 2])})
    assert not layer.inputs.by_ancestors and len(layer.launches) == 1
    # a graph of a step with branches, padded to more requests than it has
    layer.inputs.num_nodes[:] = layer.inputs.context_lens[:] = 7
    step(layer, {"0": FORK})
    assert layer.inputs.num_nodes.tolist() == [2, 0, 0, 0] and layer.inputs.context_lens.tolist() == [41, 41, 0, 0]


def test_rows_of_branches_stand_at_their_depth_and_those_of_chains_at_their_place(layer):
    for trees, shifts in ({"1": FORK}, [0, 0, 0, -1]), ({"1": chain([1, 2])}, [0, 0, 0, 0]):
        step(layer, trees)
        positions = torch.zeros(3, 6, dtype=torch.int64)
        layer.inputs.shift_positions(positions)
        assert positions.tolist() == [[*shifts, 0, 0]] * 3
