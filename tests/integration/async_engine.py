"""Run by test_pausing.py: an asynchronous engine is paused amid answers, as trainers do it; prints what came out."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_specrollout import resumed

PROMPTS = [[3, 87, 261, 308, 18, 4], [3, 90, 120, 7, 4], [3, 87, 61, 30, 18, 4]]
PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.3},
]
COUNT = 160


def params(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=COUNT, ignore_eos=True, **PARAMS[number])


class Client:
    """Asks, and sees how far each answer is."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine, self.count = engine, 0
        self.so_far: dict[int, list[int]] = {}

    async def ask(self, number: int, prompt: list[int], given: SamplingParams) -> tuple[list[int], str | None]:
        self.count += 1
        final: Any = None
        async for final in self.engine.generate({"prompt_token_ids": prompt}, given, request_id=f"r{self.count}"):
            self.so_far[number] = list(final.outputs[0].token_ids)
        return list(final.outputs[0].token_ids), final.outputs[0].finish_reason

    def begin(self) -> list[asyncio.Task[Any]]:
        self.so_far.clear()
        return [asyncio.create_task(self.ask(i, prompt, params(i))) for i, prompt in enumerate(PROMPTS)]

    async def until_all_began(self) -> None:
        """What comes to a paused engine waits until it is resumed, so none may be on its way to it."""
        while len(self.so_far) < len(PROMPTS):
            await asyncio.sleep(0.005)


async def main(model: str) -> dict[str, Any]:
    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=320, enforce_eager=True, disable_log_stats=True,
        additional_config={"spec_rollout": {"drafters": ["ngram", "history"]}},
    )  # fmt: skip
    client = Client(AsyncLLM.from_engine_args(arguments))
    engine = client.engine
    # as verl does before new weights; its client then goes on with each answer
    tasks = client.begin()
    await client.until_all_began()
    await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)  # type: ignore[call-arg]
    cut = await asyncio.gather(*tasks)
    await engine.resume_generation()
    rests = []
    for number, (tokens, reason) in enumerate(cut):
        if reason == "abort":
            prompt, given = resumed(params(number), PROMPTS[number], tokens)
            rests.append(client.ask(number, prompt, given))
        else:
            rests.append(asyncio.sleep(0, ([], reason)))
    resubmitted = [[*one[0], *rest[0]] for one, rest in zip(cut, await asyncio.gather(*rests), strict=True)]
    # as earlier vLLMs drained an engine
    tasks = client.begin()
    await client.until_all_began()
    await engine.pause_generation(wait_for_inflight_requests=True)  # type: ignore[call-arg]
    drained = await asyncio.gather(*tasks)  # nobody has to resume it for that
    await engine.resume_generation()
    # as OpenRLHF does
    tasks = client.begin()
    await client.until_all_began()
    await engine.pause_generation(mode="keep")
    await engine.reset_prefix_cache()
    await engine.resume_generation()
    kept = await asyncio.gather(*tasks)
    whole = await asyncio.gather(*client.begin())
    (stats,) = await engine.collective_rpc("spec_rollout_stats")
    engine.shutdown()
    return {
        "cut": [(len(tokens), reason) for tokens, reason in cut],
        "resubmitted": resubmitted,
        "drained": [tokens for tokens, _ in drained],
        "kept": [tokens for tokens, _ in kept],
        "whole": [tokens for tokens, _ in whole],
        "accepted": stats["accepted"],
    }


if __name__ == "__main__":
    print("RESULT" + json.dumps(asyncio.run(main(sys.argv[1]))))
