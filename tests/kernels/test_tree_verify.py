"""The verification kernel: its samples and walks are the specification's, on any tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.tree_verify import kernel, naive

CHAIN, STAR = list(range(-1, 64)), [-1] + [0] * 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int, masked: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    logits[torch.rand(rows, vocab, generator=generator) < masked] = float("-inf")
    return logits.to(dtype)


def batch(
    trees: list[list[int]], logits: torch.Tensor, device: torch.device, *, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """tree_verify's tensors, one request per tree; tokens are still to be drafted."""
    sizes = [len(parents) for parents in trees]
    request = torch.arange(len(trees)).repeat_interleave(torch.tensor(sizes))
    return {
        "logits": logits.to(device),
        "request_index": request.to(device),
        "temperature": torch.full((len(trees),), temperature, device=device),
        "seeds": torch.arange(1000, 1000 + len(trees), device=device),
        "pos": torch.arange(sum(sizes), device=device) + 2**31 - 20,
        "draft_ids": torch.full((sum(sizes),), -1, dtype=torch.int32, device=device),
        "parents": torch.tensor(sum(trees, []), dtype=torch.int32, device=device),
        "cu_rows": torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device=device),
    }


def sampled_at(inputs: dict[str, torch.Tensor], use_fp64: bool = False) -> list[int]:
    """The target's own tokens, from the kernel alone: every row as a request of its own."""
    rows = len(inputs["logits"])
    lone = inputs | {
        "parents": torch.full_like(inputs["parents"], -1),
        "cu_rows": torch.arange(rows + 1, dtype=torch.int32, device=inputs["logits"].device),
    }
    return kernel.tree_verify(**lone, width=1, use_fp64=use_fp64).token_ids[:, 0].tolist()


def specified_at(inputs: dict[str, torch.Tensor], use_fp64: bool = False) -> list[int]:
    """The same from the specification, where floats agree to the bit; a GPU's are compared with vLLM's elsewhere."""
    if inputs["logits"].is_cuda:
        return sampled_at(inputs, use_fp64)
    names = ("request_index", "temperature", "seeds", "pos")
    return naive.sample_rows(inputs["logits"], *(inputs[name].tolist() for name in names), use_fp64=use_fp64)


def as_lists(verdict: kernel.TreeVerdict) -> tuple[list[list[int]], list[int], list[list[int]]]:
    assert (verdict.token_ids.dtype, verdict.num_sampled.dtype, verdict.path.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )
    return verdict.token_ids.tolist(), verdict.num_sampled.tolist(), verdict.path.tolist()


@st.composite
def rooted_trees(draw: st.DrawFn, most_rows: int) -> list[int]:
    rows = draw(st.integers(1, most_rows))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, rows)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_verdicts_on_random_trees_are_the_specifications(device: torch.device, data: st.DataObject) -> None:
    trees = data.draw(st.lists(rooted_trees(9), min_size=1, max_size=4))
    rows = sum(map(len, trees))
    vocab = data.draw(st.sampled_from([1, 2, 5, 37, 1024, 1500, 3000]))
    dtype = data.draw(st.sampled_from(DTYPES))
    use_fp64 = data.draw(st.booleans())
    inputs = batch(trees, random_logits(rows, vocab, dtype, data.draw(st.integers(0, 99)), masked=0.2), device)
    # requests are numbered in any order
    order = data.draw(st.permutations(range(len(trees))))
    inputs["request_index"] = torch.tensor(order, device=device)[inputs["request_index"]]
    inputs["temperature"] = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.6, 1.0]), min_size=len(trees), max_size=len(trees))), device=device
    )
    inputs["seeds"] = torch.tensor(
        data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(trees), max_size=len(trees))), device=device
    )
    sampled = specified_at(inputs, use_fp64)
    # two of three nodes carry what their parent samples, so that walks get somewhere
    drafts = []
    for row, parent in enumerate(sum(trees, [])):
        root = row - sum(trees, [])[: row + 1][::-1].index(-1)
        is_hit = parent >= 0 and data.draw(st.integers(0, 2)) > 0
        drafts.append(sampled[root + parent] if is_hit else data.draw(st.integers(0, vocab - 1)))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    inputs["draft_ids"] = torch.tensor(drafts, dtype=kind, device=device)
    width = data.draw(st.integers(max(map(len, trees)), 12))

    verdict = kernel.tree_verify(**inputs, width=width, use_fp64=use_fp64)

    flat, starts = sum(trees, []), inputs["cu_rows"].tolist()
    assert as_lists(verdict) == naive.judge(sampled, drafts, flat, starts, width)


@pytest.mark.parametrize("parents", [CHAIN, STAR], ids=["chain", "star"])
def test_a_tree_of_64_nodes_is_walked_to_its_end(device: torch.device, parents: list[int]) -> None:
    inputs = batch([parents, [-1], parents], random_logits(131, 7, torch.float32, 3), device)
    sampled = specified_at(inputs)
    # of each star's leaves only the last carries the root's token
    drafts = [-1] + [sampled[p] for p in parents[1:]] if parents is CHAIN else [-1] * 64 + [sampled[0]]
    again = [-1] + [sampled[66 + p] for p in parents[1:]] if parents is CHAIN else [-1] * 64 + [sampled[66]]
    inputs["draft_ids"] = torch.tensor([*drafts, -1, *again], device=device)
    verdict = kernel.tree_verify(**inputs, width=65)
    depth = 65 if parents is CHAIN else 2
    assert verdict.num_sampled.tolist() == [depth, 1, depth]
    assert verdict.path[2, :depth].tolist() == (list(range(65)) if parents is CHAIN else [0, 64])
    assert as_lists(verdict) == naive.judge(
        sampled, [*drafts, -1, *again], [*parents, -1, *parents], [0, 65, 66, 131], 65
    )


def test_the_specifications_own_entry_point_agrees(device: torch.device) -> None:
    inputs = batch([[-1, 0, 0, 1], [-1]], random_logits(5, 3, torch.float32, 8), device, temperature=0.0)
    inputs["draft_ids"] = torch.tensor([0, 0, 1, 2, 0], device=device)
    assert as_lists(kernel.tree_verify(**inputs, width=6)) == as_lists(naive.tree_verify(**inputs, width=6))


def test_the_first_of_two_siblings_with_one_token_is_taken(device: torch.device) -> None:
    logits = torch.zeros(4, 5)
    logits[:, 3] = 1
    inputs = batch([[-1, 0, 0, 2]], logits, device, temperature=0.0)
    inputs["draft_ids"] = torch.tensor([0, 3, 3, 3], device=device)
    verdict = kernel.tree_verify(**inputs, width=4)
    assert as_lists(verdict) == ([[3, 3, -1, -1]], [2], [[0, 1, 0, 0]])


def test_rows_beyond_the_width_and_requests_without_rows_yield_nothing(device: torch.device) -> None:
    logits = torch.zeros(6, 2)
    inputs = batch([list(range(-1, 5))], logits, device, temperature=0.0)
    inputs["draft_ids"] = torch.zeros(6, dtype=torch.int32, device=device)
    inputs["cu_rows"] = torch.tensor([0, 6, 6], dtype=torch.int32, device=device)
    verdict = kernel.tree_verify(**inputs, width=3)
    assert as_lists(verdict) == ([[0, 0, 0], [-1, -1, -1]], [3, 0], [[0, 1, 2], [0, 0, 0]])
    # a star whose one matching leaf is the fourth row
    inputs["parents"] = torch.tensor([-1, 0, 0, 0, 0, 0], dtype=torch.int32, device=device)
    inputs["draft_ids"] = torch.tensor([0, 1, 1, 0, 1, 1], device=device)
    assert kernel.tree_verify(**inputs, width=3).num_sampled.tolist() == [1, 0]
    assert kernel.tree_verify(**inputs, width=4).num_sampled.tolist() == [2, 0]


def test_no_result_rests_on_what_memory_held_before(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch([[-1, 0, 1, 0], [-1]], random_logits(5, 1500, torch.float32, 5), device)
    drafts = [0] + [sampled_at(inputs)[p] for p in (0, 1, 0)] + [0]
    inputs["draft_ids"] = torch.tensor(drafts, device=device)
    clean = kernel.tree_verify(**inputs, width=7)
    empty = torch.empty
    for garbage in (float("nan"), float("inf")):

        def dirty(*shape: int, dtype: torch.dtype, device: torch.device, garbage: float = garbage) -> torch.Tensor:
            return empty(*shape, dtype=dtype, device=device).fill_(garbage if dtype.is_floating_point else 77)

        monkeypatch.setattr(torch, "empty", dirty)
        assert as_lists(kernel.tree_verify(**inputs, width=7)) == as_lists(clean)
        monkeypatch.undo()


def test_the_lowest_token_wins_a_tie_across_blocks_too(device: torch.device) -> None:
    logits = torch.zeros(4, 3000)
    logits[1, [1023, 1024, 2999]] = 1
    logits[2, [1024, 2048]] = 1
    logits[3] = float("-inf")
    inputs = batch([[-1]] * 4, logits, device, temperature=0.0)
    assert sampled_at(inputs) == [0, 1023, 1024, 0]


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_never_wins_and_never_crashes(device: torch.device, temperature: float, use_fp64: bool) -> None:
    logits = torch.full((3, 1100), float("nan"))
    logits[1, 1050] = -3
    logits[2] = float("-inf")
    logits[2, 5] = float("nan")
    inputs = batch([[-1]] * 3, logits, device, temperature=temperature)
    assert sampled_at(inputs, use_fp64) == [0, 1050, 0]


def test_a_row_of_no_request_is_sampled_greedily(device: torch.device) -> None:
    inputs = batch([[-1]] * 2, random_logits(2, 200, torch.float32, 1), device)
    inputs["request_index"] = torch.tensor([-1, 1], device=device)
    assert sampled_at(inputs)[0] == inputs["logits"][0].argmax().item()


def test_logits_may_be_a_view_with_any_strides(device: torch.device) -> None:
    logits = random_logits(4, 300, torch.float32, 2)
    inputs = batch([[-1]] * 4, logits, device)
    wider = torch.full((4, 301), 99.0, device=device)
    wider[:, :300] = logits
    for view in (wider[:, :300], logits.T.contiguous().T.to(device)):
        assert sampled_at(inputs | {"logits": view}) == sampled_at(inputs)


def test_arguments_of_other_lengths_are_refused(device: torch.device) -> None:
    inputs = batch([[-1]] * 2, torch.zeros(2, 3), device)
    with pytest.raises(ValueError, match="pos has 1 entries for 2 rows"):
        kernel.tree_verify(**inputs | {"pos": inputs["pos"][:1]}, width=1)
    with pytest.raises(ValueError, match="width 0"):
        kernel.tree_verify(**inputs, width=0)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_trees_are_walked_by_tokens_that_are_known(device: torch.device, data: st.DataObject) -> None:
    """Of each block of the vocabulary there is a token, and the best of them is the row's."""
    trees = data.draw(st.lists(rooted_trees(9), min_size=1, max_size=4))
    parents, starts = sum(trees, []), np.cumsum([0, *map(len, trees)]).tolist()
    rows, blocks = len(parents), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tokens, drafts = (torch.from_numpy(rng.integers(0, 3, size)).int() for size in ((rows, blocks), rows))
    scores = torch.from_numpy(rng.permuted(np.tile(np.arange(blocks), (rows, 1)), axis=1)).float()
    width = data.draw(st.integers(1, 12))
    ints = (torch.tensor(values, dtype=torch.int32, device=device) for values in (parents, starts))
    verdict = kernel.walk(tokens.to(device), scores.to(device), drafts.to(device), *ints, width=width)
    own = tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0].tolist()
    assert as_lists(verdict) == naive.judge(own, drafts.tolist(), parents, starts, width)
