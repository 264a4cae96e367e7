"""How long other weights for the drafter hold up a running batch, beside a step's own time; tokens compared with stock.

Run: `python -m bench.host.swap_time`. Two heads take turns: the policy's own, and one with its weights turned around.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.policy import CHECKPOINT, HEAD


def _turned(folder: Path) -> Path:
    """A head of the same shapes that says something else."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(HEAD, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _requests(count: int, max_tokens: int) -> list[tuple[dict[str, Any], Any]]:
    from vllm import SamplingParams

    prompts = [[5 + i % 7, 30 + i % 11, 31, 32, 5 + i % 5] for i in range(count)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
    return [({"prompt_token_ids": prompt}, own) for prompt, own in zip(prompts, params, strict=True)]


def _run(
    llm: Any, args: argparse.Namespace, heads: list[Path]
) -> tuple[dict[str, list[int]], list[float], list[float]]:
    """Tokens of all requests; milliseconds of each decode step, and of each swap with the step behind it."""
    from vllm_specrollout import load_drafter

    engine, tokens, steps, swaps = llm.llm_engine, {}, [], []
    for i, (prompt, params) in enumerate(_requests(args.requests, args.max_tokens)):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        is_swap = bool(heads) and len(swaps) < args.swaps and len(steps) >= 10 and (len(steps) + len(swaps)) % 2 == 0
        if is_swap:
            load_drafter(llm, heads[len(swaps) % len(heads)])
        for out in engine.step():
            if out.finished:
                tokens[out.request_id] = list(out.outputs[0].token_ids)
        (swaps if is_swap else steps).append((time.perf_counter() - begin) * 1e3)
    return tokens, steps, swaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="in the batch, all at once")
    parser.add_argument("--max-tokens", type=int, default=900, help="of each answer")
    parser.add_argument("--swaps", type=int, default=100)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_PLUGINS", "spec_rollout")
    from vllm import LLM

    common = {"model": str(CHECKPOINT), "dtype": "float32", "max_model_len": 1024, "seed": 0}
    common |= {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": args.requests, "enforce_eager": True}
    given = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4}
    with tempfile.TemporaryDirectory() as folder:
        stock = LLM(**common)
        expected, _, _ = _run(stock, args, [])
        stock.llm_engine.engine_core.shutdown()
        del stock
        gc.collect()
        # `fixed` asks in every step, so that there is something to be held up
        settings = {"drafters": [], "budget": "fixed", "max_draft_tokens": 4, "max_depth": 4}
        ours = LLM(**common, speculative_config=given, spec_rollout=settings)
        tokens, steps, swaps = _run(ours, args, [_turned(Path(folder) / "turned"), HEAD])
    wrong = [name for name, own in expected.items() if tokens[name] != own]
    print(
        f"{len(expected)} requests, {sum(map(len, expected.values()))} tokens, {len(wrong)} requests differ from stock"
    )
    if wrong:
        raise SystemExit(1)
    step, held = statistics.median(steps), sorted(swaps)
    print(f"{len(swaps)} swaps; a step without one: median {step:.1f} ms, longest {max(steps):.1f} ms")
    print(f"a step with a swap: median {statistics.median(held):.1f} ms, longest {held[-1]:.1f} ms", end="")
    print(f" = {statistics.median(held) / step:.2f} and {held[-1] / step:.2f} times the median step")


if __name__ == "__main__":
    main()
