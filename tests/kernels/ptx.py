"""Compiles kernels for a GPU that need not be there: `python ptx.py VLLM_GUMBEL_FILE murmur|philox` prints, as JSON,
the floating-point arithmetic of our sampling kernel and of vLLM's. Not to be run under TRITON_INTERPRET."""

import importlib.util
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice
from vllm_specrollout.kernels.tree_verify import kernel

HOPPER = GPUTarget("cuda", 90, 32)
ARITHMETIC = re.compile(r"^\s*((?:add|sub|mul|fma|neg|max|lg2|ex2|div|rcp|cvt)[.\w]*\.f(?:32|64)\b.*);", re.MULTILINE)


def compiled(function: Any, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """A kernel's PTX; arguments are given by type or by value."""
    types = {name: "constexpr" if name in constants else signature[name] for name in function.arg_names}
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(function, types, values), target=HOPPER).asm["ptx"]


def arithmetic(ptx: str) -> list[str]:
    """Its floating-point operations with their constants, registers left out, sorted."""
    return sorted(re.sub(r"%\w+", "_", line) for line in ARITHMETIC.findall(ptx))


def ours(logits: str, use_fp64: bool, is_philox: bool) -> str:
    signature = {
        "logits_ptr": logits,
        "logits_stride": "i64",
        "request_index_ptr": "*i64",
        "temperature_ptr": "*fp32",
        "seeds_ptr": "*i64",
        "pos_ptr": "*i64",
        "best_token_ptr": "*i32",
        "best_score_ptr": "*fp64" if use_fp64 else "*fp32",
        "vocab_size": "i32",
    }
    constants = {"BLOCK": 1024, "USE_FP64": use_fp64, "IS_PHILOX": is_philox}
    return compiled(kernel._sample_blocks, signature, constants)


def stocks(gumbel: Any, logits: str, use_fp64: bool) -> str:
    signature = {
        "local_argmax_ptr": "*i64",
        "local_argmax_stride": "i64",
        "local_max_ptr": "*fp64" if use_fp64 else "*fp32",
        "local_max_stride": "i64",
        "logits_cache_stride_0": "i64",
        "logits_cache_stride_1": "i64",
        "logits_cache_source_stride": "i64",
        "logits_ptr": logits,
        "logits_stride": "i64",
        "expanded_idx_mapping_ptr": "*i64",
        "seeds_ptr": "*i64",
        "pos_ptr": "*i64",
        "temp_ptr": "*fp32",
        "vocab_size": "i32",
    }
    constants = dict.fromkeys(("logits_cache_ptr", "logits_cache_col_ptr", "logits_cache_source_ptr"))
    flags = dict.fromkeys(("IS_DRAFTING", "APPLY_TEMPERATURE", "PER_TOKEN_COL"), False)
    given = {**constants, **flags, "BLOCK_SIZE": 1024, "USE_FP64": use_fp64}
    stock = gumbel._gumbel_sample_kernel
    # some versions have fewer arguments
    return compiled(stock, signature, {name: one for name, one in given.items() if name in stock.arg_names})


def main(path: str, noise: str) -> None:
    spec = importlib.util.spec_from_file_location("stock_gumbel", path)
    assert spec is not None and spec.loader is not None
    gumbel = importlib.util.module_from_spec(spec)
    sys.modules["vllm.triton_utils"] = SimpleNamespace(  # type: ignore[assignment]
        triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True
    )
    spec.loader.exec_module(gumbel)
    found = {
        f"{logits} {'float64' if use_fp64 else 'float32'}": (
            arithmetic(ours(logits, use_fp64, noise == "philox")),
            arithmetic(stocks(gumbel, logits, use_fp64)),
        )
        for logits, use_fp64 in (("*fp32", False), ("*bf16", False), ("*fp32", True))
        if not (use_fp64 and noise == "philox")
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
