"""TRL's GRPO with drafts and without: are tokens and rewards the same, and how long did vLLM generate?

    python examples/trl/compare.py --steps 30

Four runs of train.py's trainer, one after the other in this process:

- `stock` and `ours`: stock vLLM and spec rollout, with a seed for every request, so that both sample alike. TRL itself
  gives no seeds, or one for all. On CPU, stock vLLM takes weights by the repair of ours.
- `drafts on` and `drafts off`: TRL as it is, under spec rollout. Seeds are the engine's own, by arrival.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import train

ARMS = ("stock", "ours", "drafts on", "drafts off")
PAIRS = (("stock", "ours"), ("drafts on", "drafts off"))
FIRST = 3
"""Step that timing begins with, from 1: before, nothing is known of the problems."""
OFF = {"extra_args": {"spec_rollout": {"enabled": False}}}


@dataclass
class Result:
    """Of one run, by step."""

    rollouts: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def run(arm: str, given: Any) -> Result:
    """One run from the first policy on; its engine is gone afterwards."""
    os.environ["VLLM_SPEC_ROLLOUT"] = "0" if arm == "stock" else "1"
    given.generation_kwargs = OFF if arm == "drafts off" else None
    given.record.unlink(missing_ok=True)
    result = Result()
    trainer = train.make_trainer(given)
    llm = trainer.vllm_generation.llm
    if arm == "stock":
        take_weights_on_cpu(llm)
    watch(llm, result, is_seeded=arm in PAIRS[0])
    trainer.train()
    result.rollouts = [json.loads(line) for line in given.record.read_text().splitlines()]
    result.stats = train.stats(trainer)
    llm.llm_engine.engine_core.shutdown()
    del trainer, llm
    gc.collect()
    return result


def take_weights_on_cpu(llm: Any) -> None:
    """What spec rollout does of itself."""
    from vllm_specrollout.worker.packed_weights import PackedWeights

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    packed = PackedWeights(runner.model, runner.vllm_config)
    load_weights, generate = runner.model.load_weights, llm.generate
    runner.model.load_weights = lambda weights: packed.load(load_weights, weights)

    def generate_with_new_weights(*args: Any, **kwargs: Any) -> Any:
        packed.end()
        return generate(*args, **kwargs)

    llm.generate = generate_with_new_weights


def watch(llm: Any, result: Result, is_seeded: bool) -> None:
    """Note how long each call takes, and give seeds to its requests if asked to."""
    generate = llm.generate

    def watched(prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        params = [sampling_params.clone() for _ in prompts]
        if is_seeded:
            for number, one in enumerate(params):
                one.seed = 1000 * len(result.seconds) + number
        begin = time.perf_counter()
        outputs = generate(prompts, params, **kwargs)
        result.seconds.append(time.perf_counter() - begin)
        return outputs

    llm.generate = watched


def main() -> int:
    parser = train.options()
    parser.add_argument("--size", help="inflate the policy to this size: the same function at its cost, such as 150M")
    given = parser.parse_args()
    given.record = given.record or Path("out/trl.jsonl")
    given.record.parent.mkdir(parents=True, exist_ok=True)
    if given.size:
        from vllm_specrollout.bench.policy.inflate import inflate

        given.model = inflate(given.model, Path("out") / f"policy-{given.size}", given.size)
    results = {arm: run(arm, given) for arm in ARMS}
    failed = False
    for one, other in PAIRS:
        same = results[one].rollouts == results[other].rollouts and len(results[one].rollouts) == given.steps
        failed |= not same
        print(f"{one} and {other}: tokens and rewards {'equal' if same else 'DIFFER'} in {given.steps} steps")
    for arm, result in results.items():
        late = sum(result.seconds[FIRST - 1 :])
        tokens = sum(len(answer) for rollout in result.rollouts[FIRST - 1 :] for answer in rollout["tokens"])
        counts = result.stats and f"{result.stats['accepted']} of {result.stats['drafted']} drafted tokens accepted"
        print(f"{arm}: {late:.2f} s for {tokens} tokens from step {FIRST} on; {counts or 'no drafts'}")
    ratio = sum(results["ours"].seconds[FIRST - 1 :]) / sum(results["stock"].seconds[FIRST - 1 :])
    print(f"generation time, ours to stock from step {FIRST} on: {ratio:.2f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
