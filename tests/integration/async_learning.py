"""Run by test_learning.py: an engine that is awaited gets its first head while lone requests come; prints what came."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from vllm_specrollout import aread_drafters
from vllm_specrollout.training import parent, spot

PROMPTS, LIMIT_S = [prompt_text(one.prompt) for one in problems(96, seed=3, split="train")], 240.0
# a head that a few seconds make is good enough here
spot.WORTH = 0.02  # type: ignore[misc]
parent.Duty = functools.partial(parent.Duty, judge_rows=2048)  # type: ignore[misc, assignment]


async def ask(engine: AsyncLLM, name: str, number: int) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=number, max_tokens=100)
    last: Any = None
    async for output in engine.generate(PROMPTS[number % len(PROMPTS)], params, request_id=f"{name}-{number}"):
        last = output
    return list(last.outputs[0].token_ids)


async def rollout(engine: AsyncLLM, name: str) -> tuple[list[list[int]], int]:
    """Tokens, and how many drafts were accepted."""
    found = await asyncio.gather(*(ask(engine, name, i) for i in range(len(PROMPTS))))
    (stats,) = await engine.collective_rpc("spec_rollout_stats", args=(True,))
    return found, stats["accepted"]


async def main(folder: str, model: str, devices: list[str]) -> dict[str, Any]:
    train = {"mode": "auto", "dir": f"{folder}/heads", "devices": devices}
    own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 4, "train": train}
    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=False,
        additional_config={"spec_rollout": own},
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    first = await rollout(engine, "first")
    learning, lone, end = engine.spec_rollout_learning, 0, time.monotonic() + LIMIT_S
    while learning.number == 0 and time.monotonic() < end:
        # longer than a turn and a step, or the trainer is never let go on
        await asyncio.sleep(6.0)
        # whoever comes halts a trainer that has the engine's cores; on a slow host, some are enough
        if lone < 4 and learning._trainer is not None and learning._trainer.said.steps:
            await ask(engine, "lone", lone)
            lone += 1
    said = learning._trainer.hear()
    await engine.collective_rpc("spec_rollout_stats", args=(True,))
    second = await rollout(engine, "second")
    (health,) = (await aread_drafters(engine))["engines"]
    pid, task = learning._trainer.pid, engine.spec_rollout_attending
    engine.shutdown()
    await asyncio.wait_for(task, 30)
    return {
        "first": first, "second": second, "number": learning.number, "halts": said.halts,
        "error": f"{learning.as_dict()} {said}",
        "lone": lone, "learning": health["learning"], "is_trainer_there": Path(f"/proc/{pid}").exists(),
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT" + json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))))
