"""Rows of this host: whether one has the same bits when it is computed alone and among others, and what it costs.

Exactness at level B rests on it (docs/concepts/exactness.md), and nobody promises it: on CPUs with AMX, vLLM's bfloat16
attention rounds by how many rows a query has. So an engine asks once, at its start, of its own shapes; `specrollout
doctor` asks of usual ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from statistics import median

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.platforms import current_platform

_CONTEXT = 70
"""Keys before the first row: more than two blocks, and no multiple of anything."""
_COUNTS = (2, 9, 33)
"""Rows computed together: one draft token, a usual chain, and more than a tile of any instruction set."""
_LONE = 4
"""Rows of a product that are computed alone."""
_FEW_COUNTS, _ALL_COUNTS = (2, 5, 9, 17, 33, 65), range(2, 66)
"""Rows of a product that are computed together. With AMX a product changes its way at 6, 31, 33 or 55 rows, by its
shape: so all numbers are asked, of products small enough to be run so often."""
_SMALL = 1 << 22
"""Weights of a product that is asked at all numbers: it takes some tenths of a second."""
_USUAL_WIDTH = 2048
TIMED = (1, 2, 4, 8, 16, 32, 64)
"""Rows that are timed; and of what, so that weights lie in no cache: 200 MB of them."""
_TIMED_WIDTH, _TIMED_PRODUCTS, _ROUNDS = 4096, 6, 9

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    isa: str
    """Of vLLM's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAlike:
    """What the host answered."""

    attention: bool
    """Rows that follow each other in one sequence have the bits of each row alone."""
    linear_from: int
    """Fewest rows of a product from which on a row's bits are always the same; 0: there is no such number."""

    @property
    def are_alike(self) -> bool:
        """Whether a drafted row has the bits of plain decoding, whatever stands in the step."""
        return self.attention and self.linear_from == 1

    @property
    def promise(self) -> str:
        """What of stock's tokens holds here."""
        if self.are_alike:
            return "stock's tokens"
        return f"stock's tokens, but for ties{' of lone requests' if self.attention and self.linear_from == 2 else ''}"

    def __str__(self) -> str:
        linear = {0: "by their number", 1: "alike", 2: "alike from 2 rows on"}[self.linear_from]
        return f"attention {'alike' if self.attention else 'by their number'}, products {linear}"


@torch.inference_mode()
def attention_alike(shape: HeadShape, dtype: torch.dtype, *, is_apart: bool = False) -> bool:
    """Compare a sequence's last rows, computed together, with each row alone.

    Args:
        is_apart: together in one call, and each row a sequence of its own.
    """
    if shape.isa == "amx":
        # Random rows come out alike there, and answers do not. Nor may its tiles be tried: before vLLM's first product
        # has asked the kernel for them, they end the process.
        return False
    size, longest = shape.block_size, _CONTEXT + max(_COUNTS)
    draw = torch.Generator().manual_seed(0)
    blocks = -(-longest // size)
    cache = torch.zeros(blocks, shape.num_kv_heads, size * 2, shape.head_size, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    shown = torch.randn(2, longest, shape.num_kv_heads, shape.head_size, generator=draw).to(dtype)
    ops.cpu_attn_reshape_and_cache(shown[0], shown[1], keys, values, torch.arange(longest), shape.isa)
    queries = torch.randn(max(_COUNTS), shape.num_heads, shape.head_size, generator=draw).to(dtype)

    def attend(first: int, count: int, sequences: int) -> torch.Tensor:
        """Rows `first` to `first + count`, in this many sequences of equal length."""
        ends = torch.arange(count // sequences, count + 1, count // sequences, dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        lengths = _CONTEXT + first + ends
        found = torch.empty(count, shape.num_heads, shape.head_size, dtype=dtype)
        plan = ops.cpu_attn_get_scheduler_metadata(
            sequences, shape.num_heads, shape.num_kv_heads, shape.head_size, lengths, dtype, starts, True, -1,
            shape.isa, envs.VLLM_CPU_ATTN_SPLIT_KV,
        )  # fmt: skip
        table = torch.arange(blocks, dtype=torch.int32).expand(sequences, blocks).contiguous()
        rows, scale = queries[first : first + count], shape.head_size**-0.5
        ops.cpu_attention_with_kv_cache(
            rows, keys, values, found, starts, lengths, scale, True, None, -1, table, 0.0, plan, None
        )
        return found

    alone = torch.cat([attend(i, 1, 1) for i in range(max(_COUNTS))])
    return all(torch.equal(attend(0, count, count if is_apart else 1), alone[:count]) for count in _COUNTS)


@torch.inference_mode()
def linear_alike_from(products: Iterable[tuple[int, Product]], dtype: torch.dtype) -> int:
    """Fewest rows from which on all these products round a row alike; 0: there is no such number.

    Args:
        products: width of the input, and the product.
    """
    found = 1
    for width, product in products:
        rows = torch.randn(max(_ALL_COUNTS), width, generator=torch.Generator().manual_seed(0)).to(dtype)
        several = product(rows)
        counts = _ALL_COUNTS if width * several.shape[-1] <= _SMALL else _FEW_COUNTS
        if not all(torch.equal(product(rows[:count]), several[:count]) for count in counts):
            return 0
        # a few will do: an output head takes a tenth of a second a row
        if any(not torch.equal(product(rows[i : i + 1])[0], several[i]) for i in range(_LONE)):
            found = 2
    return found


def ask_host(dtype_name: str) -> RowsAlike:
    """Of usual shapes, without an engine: heads of 64, products of 2,048 by 2,048, as vLLM would compute them here.

    Args:
        dtype_name: `bfloat16` or `float32`.
    """
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")  # as every engine with spec rollout has it
    dtype = getattr(torch, dtype_name)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, 32, 64)
    shape = HeadShape(num_heads=8, num_kv_heads=4, head_size=64, block_size=32, isa=isa)
    product = (_USUAL_WIDTH, _product(_USUAL_WIDTH, dtype))
    return RowsAlike(attention=attention_alike(shape, dtype), linear_from=linear_alike_from([product], dtype))


def _product(width: int, dtype: torch.dtype) -> Product:
    """Of a square layer, as vLLM computes it here."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(width, width, bias=False, dtype=dtype, device=current_platform.device_type)
    if not current_platform.is_cpu():
        return layer
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda x: layer.cpu_linear(x, layer.weight, None)


@torch.inference_mode()
def time_rows(clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Rows of a step -> milliseconds of layers' products, in bfloat16: the median of some rounds through all counts.

    Args:
        clock: seconds, from any zero.
    """
    products = [_product(_TIMED_WIDTH, torch.bfloat16) for _ in range(_TIMED_PRODUCTS)]
    times: dict[int, list[float]] = {count: [] for count in TIMED}
    for count in TIMED * _ROUNDS:
        rows = torch.ones(count, _TIMED_WIDTH, dtype=torch.bfloat16, device=current_platform.device_type)
        begin = clock()
        # the sum waits for the device
        reduce(lambda x, product: product(x), products, rows).sum().item()
        times[count].append((clock() - begin) * 1e3)
    return {count: median(own) for count, own in times.items()}
