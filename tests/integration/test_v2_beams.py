"""Beams read their request's own tokens and their own path, over blocks that hold anything; nothing else is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from tests.reference import beams as reference
from vllm_specrollout.drafters.beams import BeamTrees
from vllm_specrollout.worker.v2.beams import Beams, blocks_each

VOCAB, CHILDREN, SIZE = 30, 8, 4
BLOCKS, MOST = 40, 16


def children_of(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    """By all tokens before."""
    generator = torch.Generator().manual_seed(hash(tokens) % (1 << 40))
    best, order = (torch.randn(VOCAB, generator=generator) * 2).log_softmax(-1).topk(CHILDREN)
    return list(zip(order.tolist(), best.tolist(), strict=True))


class Speculator:
    """As vLLM's, over a cache of tokens: what a row reads there, through its row of the block table, it goes on from.

    Args:
        contexts: tokens of each request, of which the last one is fed to the first pass.
    """

    device, max_model_len = torch.device("cpu"), 60

    def __init__(self, contexts: list[tuple[int, ...]], levels: int, scratch: int) -> None:
        count = len(contexts)
        self.cache = torch.randint(0, VOCAB, (BLOCKS + scratch, SIZE))
        taken = iter(torch.randperm(BLOCKS).tolist())
        table = torch.zeros(MOST, 15, dtype=torch.int32)
        for r, context in enumerate(contexts):
            needed = -(-(len(context) + levels) // SIZE)
            table[r, :needed] = torch.tensor([next(taken) for _ in range(needed)])
            for at, token in enumerate(context):
                self.cache[table[r, at // SIZE], at % SIZE] = token
        self.table = table.clone()
        self.block_tables = SimpleNamespace(
            input_block_tables=[table], slot_mappings=torch.zeros(1, 64, dtype=torch.int64)
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["head"])])
        lengths = torch.zeros(MOST, dtype=torch.int32)
        lengths[:count] = torch.tensor([len(context) for context in contexts])
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(MOST, dtype=torch.int32), positions=lengths.long(), seq_lens=lengths + 1,
            query_start_loc=torch.zeros(MOST + 1, dtype=torch.int32),
        )  # fmt: skip
        self.idx_mapping, self.sample_src_positions = torch.arange(MOST), lengths.long()
        self.current_draft_step = torch.tensor(0)
        # a hidden state is the number of what its row had read
        self.read: list[tuple[int, ...]] = list(contexts)
        self.hidden_states = torch.arange(MOST, dtype=torch.float32)[:, None].repeat(1, 3)

    def _multi_step_decode(self, *args: Any) -> None:
        raise AssertionError("there are beams")

    def _build_uniform_attn_metadata(self, *, num_reqs: int, step: int, **others: Any) -> torch.Tensor:
        assert self.current_draft_step == step
        assert self.input_buffers.query_start_loc[: num_reqs + 1].tolist() == list(range(num_reqs + 1))
        return self.block_tables.input_block_tables[0][:num_reqs].clone()

    def _run_model(
        self, rows: int, metadata: torch.Tensor, slots: dict[str, torch.Tensor], none: None, mode: CUDAGraphMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat, found = self.cache.view(-1), []
        flat[slots["head"]] = self.input_buffers.input_ids[:rows].long()
        for row in range(rows):
            places = torch.arange(int(self.input_buffers.seq_lens[row]))
            read = self.cache[metadata[row, places // SIZE].long(), places % SIZE]
            self.read.append(tuple(read.tolist()))
            assert self.read[-1][:-1] == self.read[int(self.hidden_states[row, 0])], "its parent's hidden state"
            found.append(len(self.read) - 1)
        hidden = torch.tensor(found, dtype=torch.float32)[:, None].repeat(1, 3)
        return hidden, hidden

    def expand(self, hidden: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        level = [children_of(self.read[int(own)]) for own in hidden[:, 0]]
        assert keys.tolist() == [len(self.read[int(own)]) - 1 for own in hidden[:, 0]]
        return tuple(torch.tensor([[one[i] for one in own] for own in level]) for i in (0, 1))  # type: ignore[return-value]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    beam=st.sampled_from([2, 4]),
    levels=st.integers(2, 7),
    seed=st.integers(0, 1000),
)
def test_trees_are_those_of_the_specification_and_blocks_of_requests_stay(
    lengths: list[int], beam: int, levels: int, seed: int
) -> None:
    torch.manual_seed(seed)
    contexts = [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in lengths]
    count = MOST * blocks_each(levels, SIZE)
    spec = Speculator(contexts, levels, count)
    before = spec.cache[:BLOCKS].clone()
    scratch = range(BLOCKS, BLOCKS + count)
    beams = Beams(spec, [spec.cache], SIZE, levels, scratch, spec.expand)
    ends = torch.full((len(contexts), 1), 3)
    beams.trees = trees = BeamTrees(ends, torch.zeros(len(contexts), dtype=torch.bool), beam)
    first = [children_of(context) for context in contexts]
    beams.drafted = tuple(torch.tensor([[one[i] for one in own] for own in first]) for i in (0, 1))  # type: ignore[assignment]
    desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, len(contexts), len(contexts))
    bounds = torch.tensor([len(context) + 1 for context in contexts])
    spec._multi_step_decode(len(contexts), False, desc, None, bounds, levels)
    tokens, parents, _ = trees.best(torch.full((len(contexts),), 24), 24)
    for r, context in enumerate(contexts):
        nodes = reference.grown(lambda path, own=context: children_of((*own, *path)), levels, beam, {3})
        wanted = reference.best(nodes, 24)
        assert tokens[r, : len(wanted)].tolist() == [one.token for one in wanted]
        assert parents[r, : len(wanted)].tolist() == [one.parent for one in wanted]
    assert torch.equal(spec.cache[:BLOCKS], before)


def test_a_step_without_beams_is_vllms_own() -> None:
    spec, seen = Speculator([(1, 2)], 3, 32), []
    spec._multi_step_decode = lambda *args: seen.append(args)  # type: ignore[method-assign]
    Beams(spec, [spec.cache], SIZE, 3, range(BLOCKS, BLOCKS + 32), spec.expand)
    spec._multi_step_decode(1, False, None, None, None, 3)
    assert seen == [(1, False, None, None, None, 3)]
