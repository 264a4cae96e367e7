"""Which attention a layer's rows go through: vLLM's own, or the tree kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.trees import batch_of as flat
from tests.trees import chain
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import EMPTY_TREE, DraftMode, DraftTree
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import NO_DRAFTS
from vllm_specrollout.worker.v2 import attention as module
from vllm_specrollout.worker.v2.attention import TreeAttention
from vllm_specrollout.worker.v2.host import StepState
from vllm_specrollout.worker.v2.inputs import TreeInputs, emptied
from vllm_specrollout.worker.v2.runner import SpecRolloutV2

FORK = DraftTree(np.int32([5, 6]), np.int32([-1, -1]), np.zeros(2, np.float32), np.zeros(2, np.int32))


class Inner:
    """vLLM's implementation of a layer."""

    scale, sliding_window, logits_soft_cap = 0.125, (7, 0), 30.0

    def __init__(self):
        self.calls = []

    def forward(self, *args):
        self.calls.append(args)
        return "vLLM's"


@pytest.fixture
def layer(monkeypatch):
    made = TreeAttention(Inner(), TreeInputs(4, 16, 8, "cpu"))
    made.launches = []
    monkeypatch.setattr(module, "tree_attention", lambda *args, **options: made.launches.append(options))
    return made


def batch_of(rows: list[int]):
    """What vLLM's runner makes of a step: one request per entry, each with so many rows, all of them drafts but one."""
    starts = np.cumsum([0, *rows]).astype(np.int32)
    return SimpleNamespace(
        num_tokens=int(starts[-1]),
        num_reqs_after_padding=len(rows),
        req_ids=[str(i) for i in range(len(rows))],
        query_start_loc_np=starts,
        cu_num_logits_np=starts,
        input_ids=torch.zeros(int(starts[-1]), dtype=torch.int32),
    )


def step(layer, trees, **scales):
    rows = [1 + (trees[str(i)].size if str(i) in trees else 0) for i in range(2)]
    layer.inputs.clear()
    both = flat([trees.get(str(i), EMPTY_TREE) for i in range(2)])
    layer.inputs.expect(both)
    layer.inputs.set_trees(batch_of(rows), both)
    query = torch.zeros(sum(rows), 2, 4)
    metadata = SimpleNamespace(
        num_actual_tokens=sum(rows),
        seq_lens=torch.tensor(rows),
        query_start_loc=None,
        block_table=None,
        max_query_len=max(rows),
        max_seq_len=9,
    )
    cache = torch.zeros(2, 1, 16, 8)
    output = torch.zeros(sum(rows), 2, 4)
    return layer.forward(None, query, query, query, cache, metadata, output, **scales)


@pytest.mark.parametrize(
    "rows, may_branch",
    [({"a": 9, "b": 1}, True), ({"a": 9, "b": 2}, False), ({"a": 9, "new": 300}, False), ({"a": 10}, False)],
    ids=["decodes alone", "two rows of a prompt", "a new one", "a prompt's last piece, with room behind it"],
)
def test_nothing_branches_beside_a_piece_of_a_prompt(rows, may_branch):
    asked = []
    runner = object.__new__(SpecRolloutV2)
    runner.host = SimpleNamespace(
        plan=lambda room, may_branch, *more: asked.append((room, may_branch)) or NO_DRAFTS,
        drafting=SimpleNamespace(planned=None, ms=0.0, withholding=""),
        num_in_flight=0,
    )
    runner.take_in = lambda: None
    runner.step, runner.stats, runner.shape = StepState(), Stats(), (DraftMode.TREE, "")
    schedule = SchedulerOutput.make_empty()
    schedule.num_scheduled_tokens = rows
    schedule.scheduled_spec_decode_tokens = {"a": [-1] * 8}
    runner.step.room = {"a": 8}
    runner._draft_into(emptied(schedule))
    assert asked == [({"a": 8}, may_branch)]


def test_chains_go_through_vllms_own_attention_and_branches_through_the_tree_kernel(layer):
    assert step(layer, {"0": chain([1, 2, 3])}) == "vLLM's"
    assert (len(layer.inner.calls), len(layer.launches)) == (1, 0)
    step(layer, {"0": chain([1, 2, 3]), "1": FORK})
    assert (len(layer.inner.calls), len(layer.launches)) == (1, 1)


def test_the_kernel_is_told_the_layers_scale_window_and_softcap(layer):
    step(layer, {"0": FORK})
    told = layer.launches[0]
    assert (told["scale"], told["sliding_window"], told["softcap"]) == (0.125, 8, 30.0)


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
    assert layer.inputs.parents.tolist() == [-1, 0, 1, -1, 0, 0] and layer.inputs.parents.dtype == torch.int32
    assert layer.inputs.ancestors[:6].tolist()[1:3] == [1, 3] and layer.inputs.ancestors[4:6].tolist() == [1, 2]
    step(layer, {"0": chain([1, 2])})
    assert layer.inputs.num_nodes.tolist() == [0, 0, 0, 0]
