"""Moving accepted keys and values: as the specification says, every other bit left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.kv_commit import kernel, naive

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
LAYOUTS = ["HND", "NHD", "one buffer for all layers"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern there is, infinities and all kinds of NaN included."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def make_caches(
    layout: str, layers: int, blocks: int, heads: int, block_size: int, width: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """Layers' caches [blocks, heads, block size, width] in one of three physical orders."""
    if layout == "HND":
        return [random_bits((blocks, heads, block_size, width), dtype, seed + i) for i in range(layers)]
    if layout == "NHD":
        kept = [random_bits((blocks, block_size, heads, width), dtype, seed + i) for i in range(layers)]
        return [cache.transpose(1, 2) for cache in kept]
    return list(random_bits((blocks, layers, heads, block_size, width), dtype, seed).unbind(1))


def raw(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8).cpu()


def assert_commits(caches: list[torch.Tensor], device: torch.device, *arguments: torch.Tensor) -> int:
    """Run the kernel and the specification on the same caches; returns how many slots moved."""
    expected = [cache.clone() for cache in caches]
    naive.kv_commit(expected, *arguments)
    there = [cache.to(device) for cache in caches] if device.type == "cuda" else caches
    kernel.kv_commit(kernel.CacheTable.of(there), *(argument.to(device) for argument in arguments))
    for ours, theirs in zip(there, expected, strict=True):
        assert torch.equal(raw(ours), raw(theirs))
    return len(naive.moves(*(argument.tolist() for argument in arguments)))


def arguments_of(slots: list[int], starts: list[int], paths: list[list[int]], width: int) -> tuple[torch.Tensor, ...]:
    # behind a path anything may stand: here, a row that is not there
    rows = [path + [10**6] * (width - len(path)) for path in paths]
    return (
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32).view(-1, width),
        torch.tensor([len(path) for path in paths], dtype=torch.int32),
    )


@st.composite
def paths(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A request's rows, and the path accepted in it: empty for padding, the root alone, or more."""
    rows = draw(st.integers(1, 12))
    if draw(st.integers(0, 5)) == 0:
        return rows, []
    chosen = draw(st.sets(st.integers(1, rows - 1))) if rows > 1 else set()
    return rows, [0, *sorted(chosen)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_paths_move_as_specified_and_nothing_else_changes(device: torch.device, data: st.DataObject) -> None:
    requests = data.draw(st.lists(paths(), min_size=1, max_size=4))
    block_size = data.draw(st.sampled_from([1, 3, 8, 16]))
    rows = sum(count for count, _ in requests)
    blocks = -(-rows // block_size) + 2
    # any slots at all, as long as no two rows share one; some rows have none
    slots = data.draw(st.permutations(range(blocks * block_size)))[:rows]
    slots = [-1 if data.draw(st.integers(0, 9)) == 0 else slot for slot in slots]
    starts = [0]
    for count, _ in requests:
        starts.append(starts[-1] + count)
    # vLLM pads the row starts
    starts += [rows] * data.draw(st.integers(0, 2))
    caches = make_caches(
        data.draw(st.sampled_from(LAYOUTS)),
        data.draw(st.integers(1, 3)),
        blocks,
        data.draw(st.sampled_from([1, 2, 3, 8])),
        block_size,
        data.draw(st.sampled_from([1, 2, 6, 32, 256])),
        data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 99)),
    )
    assert_commits(caches, device, *arguments_of(slots, starts, [path for _, path in requests], 14))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlapping_moves_in_place_keep_every_bit(device: torch.device, layout: str, dtype: torch.dtype) -> None:
    caches = make_caches(layout, 2, 4, 2, 4, 16, dtype)
    arguments = arguments_of([6, 7, 8, 9, 10, 11, 2], [0, 6, 7], [[0, 2, 3, 5], [0]], 6)
    before = [cache.clone() for cache in caches]
    assert assert_commits(caches, device, *arguments) == 3
    if device.type == "cpu":
        for now, old in zip(caches, before, strict=True):
            for source, target in ((8, 7), (9, 8), (11, 9), (10, 10), (11, 11), (2, 2), (6, 6)):
                moved, kept = now[target // 4, :, target % 4], old[source // 4, :, source % 4]
                assert torch.equal(raw(moved), raw(kept))


def test_nan_payloads_survive(device: torch.device) -> None:
    bits = torch.tensor([0x7F81, 0x7FC1, 0xFF80 - 65536, 0xFFFF - 65536], dtype=torch.int16)
    cache = torch.full((1, 1, 4, 4), float("nan"), dtype=torch.bfloat16, device=device)
    cache[0, 0, 3] = bits.to(device).view(torch.bfloat16)
    slots, starts, path, count = (x.to(device) for x in arguments_of([0, 1, 2, 3], [0, 4], [[0, 3]], 2))
    kernel.kv_commit(kernel.CacheTable.of([cache]), slots, starts, path, count)
    assert torch.equal(cache[0, 0, 1].view(torch.int16).cpu(), bits)


def test_layers_may_differ_in_heads_and_head_size(device: torch.device) -> None:
    caches = [
        *make_caches("HND", 1, 3, 8, 4, 256, torch.bfloat16),
        *make_caches("NHD", 1, 3, 1, 4, 24, torch.float32),
        *make_caches("HND", 1, 3, 5, 4, 6, torch.uint8),
    ]
    assert assert_commits(caches, device, *arguments_of([4, 5, 6, 7, 0, 1], [0, 6], [[0, 4, 5]], 65)) == 2


def test_heads_beyond_one_program_are_moved_too(device: torch.device) -> None:
    caches = make_caches("NHD", 1, 2, 33, 4, 512, torch.float32)
    assert assert_commits(caches, device, *arguments_of([4, 5, 6, 1], [0, 4], [[0, 2, 3]], 4)) == 2


def test_an_accepted_chain_stays_where_it_is(device: torch.device) -> None:
    caches = make_caches("HND", 1, 2, 1, 4, 8, torch.bfloat16)
    assert assert_commits(caches, device, *arguments_of([1, 2, 3, 4], [0, 4], [[0, 1, 2, 3]], 4)) == 0


def test_a_path_of_65_rows_moves(device: torch.device) -> None:
    caches = make_caches("HND", 1, 10, 1, 16, 8, torch.bfloat16)
    path = [0, *range(2, 66)]
    assert assert_commits(caches, device, *arguments_of(list(range(90, 156)), [0, 66], [path], 65)) == 64


def test_a_prompt_that_is_still_being_read_is_left_alone(device: torch.device) -> None:
    caches = make_caches("HND", 1, 4, 1, 4, 8, torch.bfloat16)
    slots, starts, path, count = arguments_of(list(range(9)), [0, 5, 9], [[0, 3], [0, 2]], 3)
    for unfinished in (0, 1):
        count[0] = unfinished
        assert assert_commits(caches, device, slots, starts, path, count) == 1


def test_layers_that_share_a_cache_move_it_once(device: torch.device) -> None:
    [cache] = make_caches("HND", 1, 3, 2, 4, 8, torch.bfloat16)
    assert kernel.CacheTable.of([cache, cache]).layers.shape[0] == 1
    arguments = arguments_of([0, 1, 2, 3, 4], [0, 5], [[0, 2, 3, 4]], 4)
    expected = [cache.clone()]
    naive.kv_commit(expected, *arguments)
    shared = cache.to(device)
    kernel.kv_commit(kernel.CacheTable.of([shared, shared]), *(x.to(device) for x in arguments))
    assert torch.equal(raw(shared), raw(expected[0]))


@pytest.mark.parametrize(("width", "offset", "unit"), [(32, 0, 8), (6, 0, 4), (32, 1, 2), (32, 2, 4)])
def test_data_moves_in_the_widest_integers_that_fit(width: int, offset: int, unit: int) -> None:
    storage = torch.zeros(2 * 4 * width + 8, dtype=torch.bfloat16)
    start = -(storage.data_ptr() // 2) % 4 + offset
    cache = storage[start : start + 2 * 4 * width].view(2, 1, 4, width)
    assert kernel.CacheTable.of([cache]).unit == unit


WRONG: dict[str, tuple[Callable[[], list[torch.Tensor]], str]] = {
    "none": (lambda: [], "there are no KV caches"),
    "rank": (lambda: [torch.zeros(2, 3, 4)], r"layer 0 has shape \(2, 3, 4\)"),
    "stride": (lambda: [torch.zeros(2, 3, 8, 4).transpose(2, 3)], "layer 0 is not contiguous: its last stride is 4"),
    "block size": (lambda: [torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 8, 8)], "layer 1 has 8 slots per block"),
    "element": (lambda: [torch.zeros(2, 1, 4, 8, dtype=torch.complex128)], "elements of 16 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_caches_that_cannot_be_moved_are_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        kernel.CacheTable.of(make())


def test_counts_of_other_requests_are_refused() -> None:
    table = kernel.CacheTable.of([torch.zeros(1, 1, 4, 4)])
    slots, starts, path, count = arguments_of([0, 1], [0, 2], [[0, 1]], 2)
    with pytest.raises(ValueError, match="paths of 1 requests, but 2 counts"):
        kernel.kv_commit(table, slots, starts, path, count.repeat(2))
    with pytest.raises(ValueError, match="1 row starts"):
        kernel.kv_commit(table, slots, starts[:1], path, count)
