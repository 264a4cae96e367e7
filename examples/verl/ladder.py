"""Two of verl's own vLLM servers under Ray, on CPU: the idle one's drafter drafts for the other one's straggler.

    python examples/verl/ladder.py

verl's client asks for one long answer and many short ones, and verl makes the router that ladder.yaml names: it sends
requests where verl's own would, and lends drafters. All answers must be those of a stock server, and tokens of lent
drafters must have been accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import rollout
from vllm_specrollout.bench.policy import CHECKPOINT, DRAFT

OVERRIDES = [
    # servers need the placement alone; here nothing drafts but what is lent, so that its help can be seen
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.spec_rollout={placement: decoupled, drafters: [], budget: fixed}",
    f"actor_rollout_ref.rollout.router_config_path={Path(__file__).with_name('ladder.yaml')}",
]
LENGTHS = ["actor_rollout_ref.rollout.max_model_len=2048"]
SHORT, LONG = 16, 1200
START_S = 1200.0
# a rounded logit may resolve a tie otherwise
rollout.DTYPE = "float32"


async def roll_out(config: Any, router: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Only the first answer is long."""
    from verl.workers.rollout.llm_server import LLMServerClient

    client = LLMServerClient(config, router)

    async def answer(i: int) -> list[int]:
        params = {"max_tokens": SHORT if i else LONG, "ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "seed": i}
        return list((await client.generate(str(i), prompt_ids=prompts[i], sampling_params=params)).token_ids)

    return list(await asyncio.gather(*map(answer, range(len(prompts)))))


def check(config: Any, router: Any, prompts: list[list[int]], wanted: list[list[int]], rounds: int) -> bool:
    """Whether the answers are those wanted, and lent drafters helped."""
    import ray

    end = time.monotonic() + START_S
    while not all(one["drafter"] for one in ray.get(router.get_status.remote())["lending"]["engines"].values()):
        if time.monotonic() > end:
            raise SystemExit(f"the drafters did not start: {ray.get(router.get_status.remote())}")
        time.sleep(1.0)
    is_right = True
    for _ in range(rounds):
        answers = asyncio.run(roll_out(config, router, prompts))
        equal = sum(one == other for one, other in zip(answers, wanted, strict=True))
        is_right &= equal == len(wanted)
        print(f"ours: {equal} of {len(wanted)} answers are those of stock", flush=True)
    status = ray.get(router.get_status.remote())["lending"]
    nodes = f"{status['verified_nodes']} tokens verified, {status['accepted_nodes']} accepted"
    print(f"drafters lent {status['lent']} times: {nodes}")
    return bool(is_right and status["accepted_nodes"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Drafters lent between verl's vLLM servers, on CPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--drafter", type=Path, default=DRAFT)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ["LADDER_DRAFTER"] = str(given.drafter)

    import ray
    from transformers import AutoTokenizer
    from verl.workers.rollout.router import get_router_handle
    from vllm_specrollout.bench.policy.reward import problems
    from vllm_specrollout.bench.policy.tokenizer import prompt_text

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [prompt_text(problem.prompt) for problem in problems(given.problems, seed=0)]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": rollout.ENVIRONMENT},
    )
    config = rollout.configuration(given.model, LENGTHS)
    stock = rollout.start(config, {})
    wanted = asyncio.run(roll_out(config, get_router_handle({"stock": stock}), prompts))
    ray.kill(stock)
    config = rollout.configuration(given.model, LENGTHS + OVERRIDES)
    servers = {str(rank): rollout.start(config, {}, rank) for rank in range(2)}
    router = get_router_handle(servers, config.actor_rollout_ref.rollout.router_config_path)
    is_right = check(config, router, prompts, wanted, given.rounds)
    ray.shutdown()
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
