"""Exact-match verification of draft trees on the device, in two launches and without waiting for the host.

The first launch samples: one program per (row, 1024 tokens of the vocabulary) adds vLLM's Gumbel noise to the logits
and keeps its best token. The second walks: one program per request settles the blocks of the rows it visits, and of no
others. `naive.py` is the specification and cites the algorithms.

The order of all floating-point operations, the block size included where it could matter, is that of vLLM's own
`vllm/v1/worker/gpu/sample/gumbel.py`: compiled by the same compiler, the noise has the same bits. That file drew from
Philox streams before vLLM 0.31, and hashes since.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm_specrollout.kernels.tree_verify.naive import TreeVerdict

__all__ = ["TreeVerdict", "gumbel_noise", "noise_of", "tree_verify", "walk"]

_BLOCK = 1024

_HIGH_DOMAIN = tl.constexpr(0x9E3779B9)


@triton.jit
def _absorb(state, word):
    """One round of MurmurHash3_x86_32; both uint32."""
    word = word * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    state = state ^ (word * 0x1B873593)
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _hash(seed, pos, tokens, START: tl.constexpr):
    """[tokens] uint32 hashes of 16 bytes: the seed, the position's low half, the token."""
    state = tl.full([], START, tl.uint32)
    # of one seed and position: a scalar until the token comes in
    state = _absorb(state, seed.to(tl.uint32))
    state = _absorb(state, (seed >> 32).to(tl.uint32))
    state = _absorb(state, pos.to(tl.uint32))
    state = _absorb(state, tokens.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def _noise32(seed, pos, tokens):
    random = _hash(seed, pos, tokens, 0)
    # halves, because each converts exactly, and not every target converts uint32
    high = (random >> 16).to(tl.int32).to(tl.float32)
    low = (random & 0xFFFF).to(tl.int32).to(tl.float32)
    uniform = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    # log(1 - u): its Taylor series below 1/4, where 1 - u would lose the bits that decide who wins
    series = uniform * (1.0 / 8.0) + 1.0 / 7.0
    for denominator in tl.static_range(6, 0, -1):
        series = 1.0 / denominator + uniform * series
    near = -uniform * series
    far = tl.log(tl.maximum(1.0 - uniform, 5.960464477539063e-08))
    return -tl.log(-tl.where(uniform < 0.25, near, far))


@triton.jit
def _noise64(seed, pos, tokens):
    low = _hash(seed, pos, tokens, 0).to(tl.uint64)
    high = _hash(seed, pos, tokens, _HIGH_DOMAIN).to(tl.uint64)
    bits = ((high << 32) | low) >> 11
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    uniform = tl.where(uniform == 1.0, uniform - 1.1102230246251565e-16, uniform)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _philox32(seed, pos, tokens):
    """A stream of the position's own, begun by the position's place in the request's stream."""
    uniform = tl.maximum(tl.rand(tl.randint(seed, pos), tokens), 4.6566127342e-10)
    return -tl.log(-libdevice.log1p(-uniform))


@triton.jit
def gumbel_noise(seed, pos, tokens, USE_FP64: tl.constexpr, IS_PHILOX: tl.constexpr = False):
    """The noise of `tokens` (any integers below 2**32) at one seed and position (int64 scalars).

    Returns float32, or float64 if USE_FP64, in the shape of `tokens`. IS_PHILOX: that of vLLM before 0.31, in float32.
    """
    if IS_PHILOX:
        tl.static_assert(not USE_FP64)
        noise = _philox32(seed, pos, tokens)
    else:
        noise = _noise64(seed, pos, tokens) if USE_FP64 else _noise32(seed, pos, tokens)
    return noise


@triton.jit
def _noise_of(
    noise_ptr, tokens_ptr, request_index_ptr, temperature_ptr, seeds_ptr, pos_ptr, count,
    BLOCK: tl.constexpr, USE_FP64: tl.constexpr, IS_PHILOX: tl.constexpr,
):  # fmt: skip
    """One row's; grid (rows, blocks of its tokens)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(request_index_ptr + row)
    is_there = request >= 0
    temperature = tl.load(temperature_ptr + request, mask=is_there, other=0.0)
    seed = tl.load(seeds_ptr + request, mask=is_there, other=0)
    tokens = tl.load(tokens_ptr + row * count + place, mask=place < count, other=0)
    noise = gumbel_noise(seed, tl.load(pos_ptr + row), tokens, USE_FP64, IS_PHILOX).to(tl.float32)
    tl.store(noise_ptr + row * count + place, tl.where(temperature != 0.0, noise, 0.0), mask=place < count)


def noise_of(
    tokens: torch.Tensor, request_index: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
    pos: torch.Tensor, *, use_fp64: bool = False, is_philox: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[rows, M] float32 the noise with which these tokens are met; of greedy requests and of padding 0.

    Args:
        tokens: [rows, M] int64.
        request_index, temperature, seeds, pos: of each row, as in `tree_verify`.
        use_fp64, is_philox: as in `tree_verify`.
    """
    rows, count = tokens.shape
    noise = torch.empty(rows, count, dtype=torch.float32, device=tokens.device)
    if noise.numel():
        _noise_of[(rows, triton.cdiv(count, _BLOCK))](
            noise, tokens.contiguous(), request_index.contiguous(), temperature, seeds, pos.contiguous(), count,
            BLOCK=_BLOCK, USE_FP64=use_fp64, IS_PHILOX=is_philox,
        )  # fmt: skip
    return noise


@triton.jit
def _sample_blocks(
    logits_ptr,
    logits_stride,
    request_index_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    best_token_ptr,
    best_score_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    USE_FP64: tl.constexpr,
    IS_PHILOX: tl.constexpr,
):
    """Best token and score of one row's block; grid (rows, blocks), which is also the shape of what is written."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    scores = tl.load(logits_ptr + row * logits_stride + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if USE_FP64:
        scores = scores.to(tl.float64)
    # -1 marks a row of no request
    request = tl.load(request_index_ptr + row).to(tl.int64)
    is_real = request >= 0
    temperature = tl.load(temperature_ptr + request, mask=is_real, other=0.0)
    if temperature != 0.0:
        seed = tl.load(seeds_ptr + request, mask=is_real, other=0).to(tl.int64)
        pos = tl.load(pos_ptr + row).to(tl.int64)
        scores = scores + gumbel_noise(seed, pos, tokens, USE_FP64, IS_PHILOX)
    # a NaN compares with nothing, so a reduction could end up anywhere: it never wins here
    scores = tl.where(is_token & (scores == scores), scores, float("-inf"))
    score, index = tl.max(scores, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + block
    tl.store(best_token_ptr + out, block * BLOCK + index)
    tl.store(best_score_ptr + out, score)


@triton.jit(do_not_specialize=["num_blocks", "width"])
def _walk_trees(
    best_token_ptr,
    best_score_ptr,
    num_blocks,
    draft_ids_ptr,
    parents_ptr,
    cu_rows_ptr,
    token_ids_ptr,
    num_sampled_ptr,
    path_ptr,
    width,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One request's walk. BLOCKS and ROWS are powers of two no less than num_blocks and width."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_rows_ptr + request).to(tl.int64)
    num_rows = tl.minimum(tl.load(cu_rows_ptr + request + 1) - first, width)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    parents = tl.load(parents_ptr + first + rows, mask=is_row, other=-1)
    drafts = tl.load(draft_ids_ptr + first + rows, mask=is_row, other=-1).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks

    # results stay in registers and are written once: two writes to one place would need a barrier between them
    token_ids = tl.full([ROWS], -1, tl.int64)
    path = tl.zeros([ROWS], tl.int32)
    row = tl.where(num_rows > 0, 0, -1).to(tl.int32)
    count = tl.zeros([], tl.int32)
    # the second condition only binds if the parents are no tree
    while (row >= 0) & (count < width):
        base = (first + row) * num_blocks
        scores = tl.load(best_score_ptr + base + blocks, mask=is_block, other=float("-inf"))
        token = tl.load(best_token_ptr + base + tl.argmax(scores, axis=0)).to(tl.int64)
        token_ids = tl.where(rows == count, token, token_ids)
        path = tl.where(rows == count, row, path)
        count += 1
        child = tl.min(tl.where((parents == row) & (drafts == token), rows, ROWS), axis=0)
        row = tl.where(child < ROWS, child, -1).to(tl.int32)

    out = request * width + rows
    tl.store(token_ids_ptr + out, token_ids, mask=rows < width)
    tl.store(path_ptr + out, path, mask=rows < width)
    tl.store(num_sampled_ptr + request, count)


def tree_verify(
    logits: torch.Tensor,
    request_index: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    draft_ids: torch.Tensor,
    parents: torch.Tensor,
    cu_rows: torch.Tensor,
    *,
    width: int,
    use_fp64: bool = False,
    is_philox: bool = False,
) -> TreeVerdict:
    """Sample the target's own token at every row, and walk each request's tree down to the first that nobody drafted.

    All tensors are on one device. Nothing is copied to the host, grids follow from shapes.

    Args:
        logits: [L, V] float32, bfloat16 or float16, temperature and masks already applied; summed in float32, or in
            float64 with `use_fp64`. Rows without NaN give vLLM's tokens; a NaN never wins.
        request_index: [L] integers, each row's index into the next two; negative for padding, sampled greedily.
        temperature: [requests] float32; only whether it is 0 (greedy, no noise) counts.
        seeds: [requests] int64.
        pos: [L] int64, the position of each row's token in its request's sequence.
        draft_ids: [L] int32 or int64, the token that each row was computed for.
        parents: [L] int32, each row's parent counted from its request's first row, and before it; -1 for the first
            row, the root. Of siblings that carry the same token the first is taken.
        cu_rows: [R + 1] int32, the first row of each request, then L.
        width: most tokens a request may yield; its rows beyond the first `width` are not looked at.
        use_fp64: noise and sums in float64, as vLLM's sampler with the same flag.
        is_philox: the noise of vLLM before 0.31, which is replayed in float32 alone.

    Returns:
        the verdict on the R requests.

    Raises:
        ValueError: shapes do not fit each other, or there is no such noise.
    """
    num_rows, vocab_size = logits.shape
    num_reqs = cu_rows.shape[0] - 1
    for name, tensor in {
        "request_index": request_index,
        "pos": pos,
        "draft_ids": draft_ids,
        "parents": parents,
    }.items():
        if tensor.shape[0] < num_rows:
            raise ValueError(f"{name} has {tensor.shape[0]} entries for {num_rows} rows of logits")
    if width < 1 or vocab_size < 1 or num_reqs < 0:
        raise ValueError(f"nothing to walk: width {width}, {vocab_size} tokens, {num_reqs} requests")
    if use_fp64 and is_philox:
        raise ValueError("Philox noise is replayed in float32 alone")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    best_token = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    best_score = torch.empty(
        num_rows, num_blocks, dtype=torch.float64 if use_fp64 else torch.float32, device=logits.device
    )
    if num_rows:
        _sample_blocks[(num_rows, num_blocks)](
            logits,
            logits.stride(0),
            request_index.contiguous(),
            temperature.contiguous(),
            seeds.contiguous(),
            pos.contiguous(),
            best_token,
            best_score,
            vocab_size,
            BLOCK=_BLOCK,
            USE_FP64=use_fp64,
            IS_PHILOX=is_philox,
        )
    return walk(best_token, best_score, draft_ids, parents, cu_rows, width=width)


def walk(
    best_token: torch.Tensor, best_score: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor,
    cu_rows: torch.Tensor, *, width: int,
) -> TreeVerdict:  # fmt: skip
    """Walk each request's tree by tokens that are known.

    Args:
        best_token, best_score: [L, blocks] of each row, a token of each block of the vocabulary and how it scored.
        draft_ids, parents, cu_rows, width: as of `tree_verify`.

    Returns:
        the verdict on the R requests.
    """
    num_reqs, num_blocks = cu_rows.shape[0] - 1, best_token.shape[1]
    verdict = TreeVerdict(
        torch.empty(num_reqs, width, dtype=torch.int64, device=best_token.device),
        torch.empty(num_reqs, dtype=torch.int32, device=best_token.device),
        torch.empty(num_reqs, width, dtype=torch.int32, device=best_token.device),
    )
    if num_reqs:
        _walk_trees[(num_reqs,)](
            best_token,
            best_score,
            num_blocks,
            draft_ids.contiguous(),
            parents.contiguous(),
            cu_rows.contiguous(),
            verdict.token_ids,
            verdict.num_sampled,
            verdict.path,
            width,
            BLOCKS=triton.next_power_of_2(num_blocks),
            ROWS=triton.next_power_of_2(width),
            # the reductions then stay within a warp
            num_warps=1,
        )
    return verdict
