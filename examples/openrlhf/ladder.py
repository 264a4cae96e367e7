"""Two of OpenRLHF's own vLLM actors under Ray, on CPU: the idle one's drafter drafts for the other one's stragglers.

    python examples/openrlhf/ladder.py

Each actor begins a small model as a warm drafter. Short answers are asked of both, and long ones of the first alone.
All answers must be those of a stock actor, and tokens of the lent drafter must have been accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import rollout
from vllm_specrollout.bench.policy import CHECKPOINT, DRAFT

SPEC_ROLLOUT = {"placement": "decoupled", "drafters": [], "budget": "fixed"}
"""An actor needs the placement alone. Here nothing drafts but what is lent, so that its help can be seen."""
SHORT, LONG = 16, 1200
START_S = 1200.0
# a rounded logit may resolve a tie otherwise
rollout.DTYPE, rollout.MAX_MODEL_LEN = "float32", 2048


def roll_out(actors: list[Any], prompts: list[list[int]]) -> list[list[int]]:
    """Half of the prompts get long answers, all of them from the first actor."""
    import ray
    from vllm import SamplingParams

    pending = []
    for i, prompt in enumerate(prompts):
        is_long = 2 * i < len(prompts)
        given = {"max_tokens": LONG if is_long else SHORT, "ignore_eos": True, "temperature": 1.0, "seed": i}
        actor = actors[0 if is_long else i % len(actors)]
        pending.append(actor.generate.remote(prompt, SamplingParams(**given)))
    return [list(output.outputs[0].token_ids) for output in ray.get(pending)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Drafters lent between OpenRLHF's vLLM actors, on CPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--drafter", type=Path, default=DRAFT)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    import ray
    from transformers import AutoTokenizer
    from vllm_specrollout.bench.policy.reward import problems
    from vllm_specrollout.bench.policy.tokenizer import prompt_text

    from vllm_specrollout.cluster import lend

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [prompt_text(problem.prompt) for problem in problems(given.problems, seed=0)]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    memory = 200 << 20
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=memory)
    stock = rollout.start(given.model, {})
    wanted = roll_out([stock], prompts)
    ray.kill(stock)

    variables = {"VLLM_SPEC_ROLLOUT": json.dumps(SPEC_ROLLOUT)}
    actors = [rollout.start(given.model, variables) for _ in range(2)]
    lending = lend(actors, drafter=str(given.drafter))
    end = time.monotonic() + START_S
    while not all(one["drafter"] for one in lending.status()["engines"].values()):
        if time.monotonic() > end:
            raise SystemExit(f"the drafters did not start: {lending.status()}")
        time.sleep(1.0)
    is_right = True
    for _ in range(given.rounds):
        answers = roll_out(actors, prompts)
        equal = sum(one == other for one, other in zip(answers, wanted, strict=True))
        is_right &= equal == len(wanted)
        print(f"ours: {equal} of {len(wanted)} answers are those of stock", flush=True)
    status = lending.status()
    nodes = f"{status['verified_nodes']} tokens verified, {status['accepted_nodes']} accepted"
    print(f"drafters lent {status['lent']} times: {nodes}")
    lending.close()
    ray.shutdown()
    return int(not (is_right and status["accepted_nodes"]))


if __name__ == "__main__":
    sys.exit(main())
