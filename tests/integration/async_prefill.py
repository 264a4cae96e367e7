"""Run by test_prefill.py: an engine that is awaited, on two ranks, is asked for hidden states amid requests; prints
what came."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_specrollout.server.prefill import aprefill
from vllm_specrollout.training.rows import Rows, RowSource

PROMPTS = ["12+34=", "7*8+5=", "99-45=", "3+4*5="]
STEP, ALL = 16, 1 << 16


async def ask(engine: AsyncLLM, name: str, number: int) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=number, max_tokens=48)
    last: Any = None
    async for output in engine.generate(PROMPTS[number], params, request_id=f"{name}-{number}"):
        last = output
    return [*last.prompt_token_ids, *last.outputs[0].token_ids]


async def rollout(engine: AsyncLLM, name: str) -> list[list[int]]:
    return await asyncio.gather(*(ask(engine, name, i) for i in range(len(PROMPTS))))


async def turns(
    engine: AsyncLLM, address: str, source: RowSource, most: int
) -> tuple[list[dict[str, int]], list[Rows]]:
    """Until an answer of each was computed whole."""
    done, found = [], list[Rows]()
    for _ in range(200):
        done.append(await aprefill(engine, address, most))
        found += source.arrived(0.1)
        if len({tuple(rows.token_ids.tolist()) for rows in found}) == len(PROMPTS):
            break
        await asyncio.sleep(0.05)
    return done, found


async def main(folder: str, model: str, head: str) -> dict[str, Any]:
    given = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    own = {"drafters": ["history"], "train": {"prefill_tokens": STEP}, "speculative_config": given}
    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True,
        tensor_parallel_size=2, additional_config={"spec_rollout": own},
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    address = f"ipc://{folder}/rows"
    source = RowSource(address)
    await aprefill(engine, address, 1)  # answers are kept from now on
    first = await rollout(engine, "first")
    # users come while a turn is under way: each ends it, and nobody hangs
    both = await asyncio.wait_for(asyncio.gather(aprefill(engine, address, ALL), rollout(engine, "second")), 120)
    done, found = await turns(engine, address, source, 64)
    engine.shutdown()
    import torch

    torch.save([(rows.token_ids, rows.hidden) for rows in found], Path(folder) / "rows.pt")
    return {"first": first, "second": both[1], "done": done, "amid": both[0]}


if __name__ == "__main__":
    print("RESULT" + json.dumps(asyncio.run(main(*sys.argv[1:]))))
