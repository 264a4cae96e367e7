"""TRL's GRPO with drafts and without: are tokens and rewards the same, and how long did vLLM generate?

    python examples/trl/compare.py --steps 3
    python examples/trl/compare.py --steps 30 --size 150M --problems 4 --problems-per-step 2 --max-tokens 128

Four runs of train.py's trainer, one after the other and each in a process of its own:

- `stock` and `ours`: stock vLLM and spec rollout, with a seed for every request, so that both sample alike. TRL itself
  gives no seeds, or one for all. On CPU, stock vLLM takes weights by the repair of ours.
- `drafts on` and `drafts off`: TRL as it is, under spec rollout. Seeds are the engine's own, by arrival.

All compute in float32: in bfloat16, near ties may fall either way. With `--size`, TRL trains the policy as it is, and
vLLM serves it inflated: the same function at the cost of a larger model, which two cores could not train.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
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


def run(arm: str, given: argparse.Namespace) -> Result:
    """One run from the first policy on, in this process."""
    os.environ["VLLM_SPEC_ROLLOUT"] = "0" if arm == "stock" else "1"
    given.generation_kwargs = OFF if arm == "drafts off" else None
    given.record.unlink(missing_ok=True)
    result = Result()
    compute_in_float32()
    trainer = train.make_trainer(given, policy(given) if given.size else None)
    llm = trainer.vllm_generation.llm
    if arm == "stock":
        take_weights_on_cpu(llm)
    if given.size:
        inflate_what_is_pushed(llm, given)
    watch(llm, result, is_seeded=arm in PAIRS[0])
    trainer.train()
    result.rollouts = [json.loads(line) for line in given.record.read_text().splitlines()]
    result.stats = train.stats(trainer)
    llm.llm_engine.engine_core.shutdown()
    del trainer, llm
    gc.collect()
    return result


def compute_in_float32() -> None:
    """TRL leaves the dtype to vLLM, which makes it bfloat16, whatever a model's folder says."""
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    generation.LLM = functools.partial(LLM, dtype="float32")


def policy(given: argparse.Namespace) -> Any:
    """What TRL trains, under the name of what vLLM is to serve."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="float32")
    model.name_or_path = str(served(given))
    return model


def served(given: argparse.Namespace) -> Path:
    """The folder of what vLLM serves first."""
    return given.record.parent / f"policy-{given.size}"


def inflate_what_is_pushed(llm: Any, given: argparse.Namespace) -> None:
    """TRL pushes the small policy's weights one by one; the engine gets the inflated ones once all are there."""
    from vllm_specrollout.bench.policy.inflate import grown, read_shape

    small, large = read_shape(given.model), read_shape(served(given))
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    load_weights, pushed = model.load_weights, {}
    names = set(weight_names(given.model))

    def load_inflated(weights: Any) -> Any:
        pushed.update((name, weight.detach()) for name, weight in weights)
        if pushed.keys() == names:
            load_weights(list(grown(pushed, small, large, small.num_layers).items()))
            pushed.clear()

    model.load_weights = load_inflated


def weight_names(folder: Path) -> list[str]:
    """The weights of a checkpoint in one file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        return list(weights.keys())


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


def run_apart(arm: str, given: argparse.Namespace) -> Result:
    """One run in a process of its own, so that none has what another left in memory."""
    record = given.record.with_suffix(f".{arm.replace(' ', '-')}{given.record.suffix}")
    answer = record.with_suffix(".result")
    answer.unlink(missing_ok=True)
    flags = [*sys.argv[1:], "--record", str(record), "--arm", arm]
    print(f"{arm}: runs", flush=True)
    subprocess.run([sys.executable, __file__, *flags], stdout=sys.stderr, check=True)
    return Result(**json.loads(answer.read_text()))


def report(results: dict[str, Result], steps: int) -> bool:
    """Whether all was equal. Where it was not, times say nothing, and no ratio is printed."""
    equal = {}
    pairs = [pair for pair in PAIRS if pair[0] in results]
    for one, other in pairs:
        equal[one] = results[one].rollouts == results[other].rollouts and len(results[one].rollouts) == steps
        print(f"{one} and {other}: tokens and rewards {'equal' if equal[one] else 'DIFFER'} in {steps} steps")
    for arm, result in results.items():
        late = sum(result.seconds[FIRST - 1 :])
        tokens = sum(len(answer) for rollout in result.rollouts[FIRST - 1 :] for answer in rollout["tokens"])
        counts = result.stats and f"{result.stats['accepted']} of {result.stats['drafted']} drafted tokens accepted"
        print(f"{arm}: {late:.2f} s for {tokens} tokens from step {FIRST} on; {counts or 'no drafts'}")
    for one, other in pairs if steps >= FIRST else ():
        slow, fast = (one, other) if one == "stock" else (other, one)
        if equal[one]:
            ratio = sum(results[fast].seconds[FIRST - 1 :]) / sum(results[slow].seconds[FIRST - 1 :])
            print(f"generation time, {fast} to {slow} from step {FIRST} on: {ratio:.2f}")
    return all(equal.values())


def main() -> int:
    parser = train.options()
    parser.add_argument("--size", help="serve the policy inflated to this size: its function at a cost such as 150M")
    parser.add_argument(
        "--one-process", action="store_true", help="all runs in this one: begins sooner, times less fairly"
    )
    parser.add_argument("--seeded", action="store_true", help="the first two runs alone: ours beside stock vLLM")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.record = given.record or Path("out/trl.jsonl")
    given.record.parent.mkdir(parents=True, exist_ok=True)
    if given.arm:
        result = run(given.arm, given)
        given.record.with_suffix(".result").write_text(json.dumps(asdict(result)))
        return 0
    if given.size:
        from vllm_specrollout.bench.policy.inflate import inflate

        inflate(given.model, served(given), given.size)
    run_one = run if given.one_process else run_apart
    return 0 if report({arm: run_one(arm, given) for arm in (PAIRS[0] if given.seeded else ARMS)}, given.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
