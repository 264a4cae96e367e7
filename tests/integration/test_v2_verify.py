"""How a step's rows are judged: in which parts, and from where they read; what is sampled is the matter of tests/v2."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm_specrollout.kernels.tree_verify.naive import judge as naive_judge

from vllm_specrollout.worker.v2 import verify as module
from vllm_specrollout.worker.v2.verify import (
    MOST_COPIED_MIB,
    MOST_SPLIT_ROWS,
    TreeVerdict,
    TreeVerifier,
    chain_verdict,
    part_bounds,
)


@given(st.lists(st.integers(1, 25), min_size=1, max_size=80), st.integers(1, 200), st.integers(1, 40))
def test_parts_hold_whole_requests_in_order_and_few_rows(rows, most, least) -> None:
    starts = np.cumsum([0, *rows]).astype(np.int32)
    bounds = part_bounds(starts, most, least)
    assert bounds[0] == 0 and bounds[-1] == len(rows) and bounds == sorted(set(bounds))
    sizes = np.diff(starts[bounds]).tolist()
    alone = [end - begin == 1 for begin, end in zip(bounds, bounds[1:], strict=False)]
    assert all(size <= most or is_alone for size, is_alone in zip(sizes[:-1], alone[:-1], strict=True))
    # the last one may have taken in what was too little, and is never that itself
    assert sizes[-1] < max(most, *rows, 1) + least
    assert len(sizes) == 1 or sizes[-1] >= least


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), min_size=1, max_size=6), st.data()
)
def test_without_our_kernel_chains_are_walked_as_its_specification_walks_them(requests, data) -> None:
    """Rows as (sampled, drafted); a request of no rows is padding."""
    width = data.draw(st.integers(1, 7))
    sampled, drafted = ([row[i] for own in requests for row in own] for i in (0, 1))
    parents = [i - 1 for own in requests for i in range(len(own))]
    starts = np.cumsum([0, *map(len, requests)]).tolist()
    assume(sampled)
    found = chain_verdict(
        torch.tensor(sampled), torch.tensor(drafted, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), width
    )
    tokens, counts, paths = naive_judge(sampled, drafted, parents, starts, width)
    assert found.token_ids.tolist() == tokens and found.num_sampled.tolist() == counts
    assert found.path.tolist() == paths


class Sampler:
    """Stands in for vLLM's: notes how many rows it processes at once, and makes nothing of them."""

    use_fp64_gumbel, return_sampling_mask, logprobs_mode = False, False, "raw_logprobs"

    def __init__(self, num_reqs: int, top_p: float) -> None:
        self.rows: list[int] = []
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=torch.ones(num_reqs)),
            seeds=SimpleNamespace(gpu=torch.arange(num_reqs)),
            top_p=SimpleNamespace(np=np.full(num_reqs, top_p, dtype=np.float32)),
        )

    def apply_sampling_params(self, logits, requests, index, index_np, pos, draft_ids, place, most_tokens):
        assert len(logits) == len(requests) == len(pos) == len(draft_ids) == len(place)
        assert len(index) == len(index_np) == len(most_tokens)
        # a part is a batch of its own, of whole requests
        assert requests.unique().tolist() == index.tolist() == index_np.tolist() and place[0] == 0
        self.rows.append(len(logits))
        return logits


def judged(monkeypatch, num_reqs: int, width: int, top_p: float, vocab: int = 32):
    """The rows of each part, and what the verdict's kernel was given for it, of a step of equal requests."""
    launches = []

    def tree_verify(logits, requests, temperature, seeds, pos, draft_ids, parents, starts, **options):
        assert starts[0] == 0 and starts[-1] == len(logits) == len(parents)
        launches.append((temperature, seeds))
        count = len(starts) - 1
        first = requests[starts[:-1].long()]
        return TreeVerdict(first[:, None].repeat(1, width), torch.ones(count), torch.zeros(count, width))

    monkeypatch.setattr(module, "tree_verify", tree_verify)
    rows, each = num_reqs * width, torch.arange(num_reqs)
    starts = np.arange(num_reqs + 1, dtype=np.int32) * width
    batch = SimpleNamespace(
        num_reqs=num_reqs,
        expanded_idx_mapping=each.repeat_interleave(width),
        expanded_local_pos=torch.arange(width).repeat(num_reqs),
        logits_indices=torch.arange(rows),
        positions=torch.arange(rows),
        input_ids=torch.arange(rows),
        idx_mapping=each,
        idx_mapping_np=each.numpy(),
        cu_num_logits=torch.from_numpy(starts),
        cu_num_logits_np=starts,
        seq_lens_cpu_upper_bound=torch.ones(num_reqs),
    )
    verifier = TreeVerifier(Sampler(num_reqs, top_p), width - 1)
    logits = torch.zeros(1, vocab).expand(rows, vocab)  # as if there were so many
    verdict, _ = verifier._judge(logits, batch, SimpleNamespace(parents=torch.zeros(rows), draft_ids=torch.zeros(rows)))
    assert verdict.token_ids[:, 0].tolist() == list(range(num_reqs))
    return verifier.sampler, launches


@pytest.mark.parametrize("num_reqs, width", [(1, 25), (8, 8), (3, 25), (64, 4), (32, 25)])
def test_the_rows_of_few_requests_find_their_top_p_mask_as_without_drafts(monkeypatch, num_reqs, width):
    sampler, _ = judged(monkeypatch, num_reqs, width, top_p=0.9)
    assert sum(sampler.rows) == num_reqs * width and max(sampler.rows) <= MOST_SPLIT_ROWS


def test_and_so_do_the_rows_of_many(monkeypatch):
    # of 64 rows: too few to be among many
    monkeypatch.setattr(module, "MOST_COPIED_MIB", 1)
    sampler, _ = judged(monkeypatch, 65, 8, top_p=0.9, vocab=4096)
    assert sum(sampler.rows) == 520 and len(sampler.rows) > 1 and min(sampler.rows) > MOST_SPLIT_ROWS


def verifier_that_finds(monkeypatch: pytest.MonkeyPatch, tokens: list[list[int]]) -> TreeVerifier:
    """Whatever the logits are, so many tokens of each request, behind -1."""
    found = torch.tensor(tokens)
    num_reqs, width = found.shape
    sampler = Sampler(num_reqs, 1.0)
    sampler.compute_nans, sampler.sampling_states.max_num_logprobs = False, lambda index: NO_LOGPROBS
    sampler.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda index: 0)
    sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))
    verifier = TreeVerifier(sampler, width - 1)

    def judge(*args):
        return TreeVerdict(found, (found >= 0).sum(dim=1, dtype=torch.int32), torch.zeros(num_reqs, width)), None

    def counted(num_sampled, seq_lens, cu_num_logits, *args):
        return num_sampled, cu_num_logits.diff() - num_sampled

    monkeypatch.setattr(verifier, "_judge", judge)
    monkeypatch.setattr(module, "get_num_sampled_and_rejected", counted)
    return verifier


def test_who_is_withheld_gets_its_first_token_alone_and_the_others_stand_behind_it(monkeypatch):
    tokens = [[4, 5, 6], [7, 8, -1], [4, 5, 6], [9, -1, -1]]
    starts = torch.arange(5, dtype=torch.int32) * 3
    batch = SimpleNamespace(cu_num_logits=starts, seq_lens=None, idx_mapping=None, idx_mapping_np=None)
    withheld = torch.tensor([False, False, True, True])
    output, _ = verifier_that_finds(monkeypatch, tokens)(torch.zeros(12, 1), batch, None, withheld)
    assert output.sampled_token_ids.tolist() == tokens
    assert output.num_sampled.tolist() == [3, 2, 1, 1] and output.num_rejected.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("vocab, parts", [(1 << 17, 1), (1 << 19, 4)])
def test_copies_of_logits_are_bounded(monkeypatch, vocab, parts):
    sampler, _ = judged(monkeypatch, 16, 25, top_p=1.0, vocab=vocab)
    assert len(sampler.rows) == parts and max(sampler.rows) * vocab * 4 <= MOST_COPIED_MIB << 20


def test_rows_read_nothing_from_the_hosts_memory(monkeypatch):
    sampler, launches = judged(monkeypatch, 2, 3, top_p=1.0)
    states = sampler.sampling_states
    for temperature, seeds in launches:
        assert temperature.equal(states.temperature.gpu) and seeds.equal(states.seeds.gpu)
        assert temperature.data_ptr() != states.temperature.gpu.data_ptr()
        assert seeds.data_ptr() != states.seeds.gpu.data_ptr()
