"""The noise that verification samples with is that of vLLM's sampler to the bit, and so are the tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from vllm_specrollout.kernels.tree_verify import kernel, naive  # noqa: E402

SEEDS = [0, 1, 42, -1, -(2**40) - 17, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
POSITIONS = [0, 1, 2, 511, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """A third of the tokens is masked out."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    logits[torch.rand(rows, vocab, generator=generator) < 1 / 3] = float("-inf")
    return logits.to(dtype)


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampled_tokens_are_those_of_vllms_sampler(device, stock_gumbel, dtype: torch.dtype, use_fp64: bool) -> None:
    check_tokens(device, stock_gumbel, dtype, use_fp64=use_fp64)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_before_vllm_0_31_sampled_tokens_are_those_of_its_streams(device, stock_philox, dtype: torch.dtype) -> None:
    check_tokens(device, stock_philox, dtype, is_philox=True)


def check_tokens(device, stock_gumbel, dtype: torch.dtype, *, use_fp64: bool = False, is_philox: bool = False) -> None:
    cases = [(seed, pos) for seed in SEEDS for pos in POSITIONS]
    rows, temperatures = len(cases), [0.0, 0.5, 1.0, 1.3]
    for vocab in (37, 1500):
        shared = (
            random_logits(rows, vocab, dtype).to(device),
            torch.arange(rows, device=device).flip(0),
            torch.tensor([temperatures[i % 4] for i in range(rows)], device=device),
            torch.tensor([seed for seed, _ in cases], device=device).flip(0),
            torch.tensor([pos for _, pos in cases], device=device),
        )
        verdict = kernel.tree_verify(
            *shared,
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            width=1,
            use_fp64=use_fp64,
            is_philox=is_philox,
        )
        stock = stock_gumbel.gumbel_sample(*shared, apply_temperature=False, is_drafting=False, use_fp64=use_fp64)
        assert verdict.token_ids[:, 0].tolist() == stock.tolist()


@pytest.mark.parametrize("noise", ["noise32", "noise64", "philox_noise32"])
def test_the_noise_of_any_tokens_is_that_of_the_whole_vocabulary(device, noise: str) -> None:
    rows, count = 6, 1100
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 5000, (rows, count), generator=generator)
    request = torch.tensor([2, 0, 1, -1, 2, 3])
    seeds, positions = torch.tensor([-1, 42, 2**40, 7]), torch.tensor([5, 9, 2**31, 3, 6, 1])
    temperature = torch.tensor([1.0, 0.5, 1.5, 0.0])
    found = kernel.noise_of(
        *(each.to(device) for each in (tokens, request, temperature, seeds, positions)),
        use_fp64=noise == "noise64", is_philox=noise == "philox_noise32",
    )  # fmt: skip
    for r in range(rows):
        if request[r] < 0 or temperature[request[r]] == 0:
            assert not found[r].any(), "greedy requests and padding have none"
            continue
        whole = getattr(naive, noise)(int(seeds[request[r]]), int(positions[r]), 5000)
        np.testing.assert_allclose(found[r].cpu().numpy(), whole[tokens[r].numpy()], rtol=1e-5, atol=1e-5)


@triton.jit
def _both_noises(
    ours,
    stocks,
    seeds,
    positions,
    first,
    BLOCK: tl.constexpr,
    OURS: tl.constexpr,
    STOCK_UNIFORM: tl.constexpr,
    STOCK_LOG: tl.constexpr,
    FP64: tl.constexpr,
):
    case = tl.program_id(0)
    tokens = first + tl.arange(0, BLOCK)
    seed, pos = tl.load(seeds + case), tl.load(positions + case)
    if FP64:
        stock = -tl.log(-tl.log(STOCK_UNIFORM(seed, pos, tokens)))
    else:
        stock = -tl.log(-STOCK_LOG(STOCK_UNIFORM(seed, pos, tokens)))
    tl.store(stocks + case * BLOCK + tl.arange(0, BLOCK), stock)
    tl.store(ours + case * BLOCK + tl.arange(0, BLOCK), OURS(seed, pos, tokens, FP64))


@pytest.mark.parametrize("use_fp64", [False, True], ids=["fp32", "fp64"])
def test_the_noise_is_vllms_to_the_bit(device, stock_gumbel, use_fp64: bool) -> None:
    cases = [(seed, pos) for seed in SEEDS for pos in POSITIONS[1::2]]
    block, first = 8192, 2**31 - 4000
    dtype = torch.float64 if use_fp64 else torch.float32
    ours, stocks = torch.zeros(2, len(cases), block, dtype=dtype, device=device)
    _both_noises[(len(cases),)](
        ours,
        stocks,
        torch.tensor([seed for seed, _ in cases], device=device),
        torch.tensor([pos for _, pos in cases], device=device),
        first if use_fp64 else 0,
        BLOCK=block,
        OURS=kernel.gumbel_noise,
        STOCK_UNIFORM=stock_gumbel.murmur3_uniform64 if use_fp64 else stock_gumbel.murmur3_uniform32,
        STOCK_LOG=stock_gumbel._log1p_neg_stable,
        FP64=use_fp64,
    )
    assert ours.isfinite().all() and ours.std() > 1
    bits = torch.int64 if use_fp64 else torch.int32
    assert torch.equal(ours.view(bits), stocks.view(bits))
    if not use_fp64:
        specified = np.stack([naive.noise32(seed, pos, block) for seed, pos in cases])
        np.testing.assert_allclose(ours.cpu().numpy(), specified, atol=1e-5 if device.type == "cuda" else 0, rtol=0)


@pytest.mark.parametrize("noise", ["murmur", "philox"])
def test_compiled_for_a_gpu_the_arithmetic_is_vllms(request, noise: str, tmp_path: Path) -> None:
    """Fused multiply-adds and approximate logarithms are the compiler's choice: here it chose the same for both."""
    stock = request.getfixturevalue("stock_philox" if noise == "philox" else "stock_gumbel")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("ptx.py")), stock.__file__, noise]
    run = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    for case, (ours, stocks) in json.loads(run.stdout).items():
        assert len(ours) > 100, case
        assert ours == stocks, case


def test_the_hash_gives_its_published_values() -> None:
    # vectors of MurmurHash3_x86_32 for the empty string and for four bytes "aaaa"
    assert naive.murmur3([], 1) == 0x514E28B7
    assert naive.murmur3([0x61616161], 0x9747B28C) == 0x5A97808A
    assert naive.murmur3([np.array([0x61616161], dtype=np.uint64)], 0x9747B28C)[0] == 0x5A97808A


def test_the_generator_gives_its_published_values() -> None:
    # vectors of philox4x32-10 in Random123's kat_vectors: counter and key of zeros
    assert naive.philox(0, 0) == 0x6627E8D5
    assert naive.philox(np.zeros(1, dtype=np.uint64), 0)[0] == 0x6627E8D5


def test_the_kernels_philox_noise_is_the_specified_one(device) -> None:
    rows, vocab = 3, 3000
    shared = (
        torch.zeros(rows, vocab, device=device),
        torch.arange(rows, device=device),
        torch.ones(rows, device=device),
        torch.tensor([7, -(2**40) - 17, 2**63 - 1], device=device),
        torch.tensor([0, 2**31 + 1, 5], device=device),
    )
    rest = (
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows,), -1, dtype=torch.int32, device=device),
        torch.arange(rows + 1, dtype=torch.int32, device=device),
    )
    tokens = [one.tree_verify(*shared, *rest, width=1, is_philox=True).token_ids.tolist() for one in (kernel, naive)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != kernel.tree_verify(*shared, *rest, width=1).token_ids.tolist()
    with pytest.raises(ValueError, match="float32 alone"):
        kernel.tree_verify(*shared, *rest, width=1, use_fp64=True, is_philox=True)


def test_the_noise_is_gumbel_distributed() -> None:
    for noise in (naive.noise32(7, 3, 2**18), naive.noise64(7, 3, 2**18), naive.philox_noise32(7, 3, 2**18)):
        # mean: Euler's constant; variance: pi**2 / 6; P(noise < x) = exp(-exp(-x))
        assert abs(noise.mean() - 0.5772) < 0.01
        assert abs(noise.var() - np.pi**2 / 6) < 0.03
        for x in (-1.0, 0.0, 2.0, 6.0):
            assert abs((noise < x).mean() - np.exp(-np.exp(-x))) < 0.004
