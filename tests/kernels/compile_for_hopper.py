"""Compile tree attention for compute capability 9.0 and print, per launch, what its rounding depends on.

A program of its own, since the tests' process interprets kernels. Needs no GPU.
"""

from __future__ import annotations

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_specrollout.kernels.tree_attention.kernel import _attend
from vllm_specrollout.kernels.tree_attention.launch import default_tile

MAX_SHARED_MEMORY = 227 << 10
TYPES = {
    **dict.fromkeys(("query", "out", "key_cache", "value_cache"), "*bf16"),
    **dict.fromkeys(("parts", "sums"), "*fp32"),
    **dict.fromkeys(("query_start_loc", "seq_lens", "block_table", "num_nodes"), "*i32"),
    "ancestors": "*i64",
    **dict.fromkeys(("exponent_scale", "softened", "v_scale"), "fp32"),
}


def arithmetic(block_m: int, is_split: bool) -> str:
    """Matrix instructions of bfloat16 attention with heads of 128, and the layouts in which rows are reduced."""
    tile = default_tile(torch.bfloat16, 128)
    constants = {
        "HEAD_SIZE": 128, "PADDED": 128, "GROUP": 4, "SPLIT_SIZE": 512, "BLOCK_M": block_m, "BLOCK_N": tile.block_n,
        "BLOCK_SIZE": 16, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "IS_SPLIT": is_split, "SEARCH": False,
        "IS_INTERPRETED": False,
    }  # fmt: skip
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in _attend.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(_attend.arg_names)
        if signature[name].startswith("*") or name.startswith("stride")
    }
    options = {
        "num_warps": block_m // tile.rows_per_warp,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }
    source = ASTSource(_attend, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= MAX_SHARED_MEMORY
    matrix = re.findall(r"(?:wgmma\.mma_async|mma)\.sync\S*", compiled.asm["ptx"])
    reduced = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", compiled.asm["ttgir"])
    return " ".join(sorted({*matrix, *reduced}))


if __name__ == "__main__":
    for is_split in (False, True):
        for block_m in (64, 128):
            print(arithmetic(block_m, is_split))
