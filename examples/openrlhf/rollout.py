"""OpenRLHF's own vLLM actor under Ray, on CPU: rollouts, a pause amid them, new weights; with drafts and without.

    python examples/openrlhf/rollout.py

`stock` has no spec rollout, `ours` is switched on by `VLLM_SPEC_ROLLOUT`. All answers must be those of `stock`. Then
`ours` gets other weights, one call per parameter as OpenRLHF does it, and at last the first ones again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_specrollout.bench.policy import CHECKPOINT

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # the worker loads its extension by name
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
}
LENGTH, MAX_MODEL_LEN = 160, 512
DTYPE = "bfloat16"

Answers = list[list[int]]


def start(model: Path, variables: dict[str, str]) -> Any:
    """The actor, with the arguments that OpenRLHF gives it."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    options = {"num_cpus": 1, "num_gpus": 0, "runtime_env": {"env_vars": {**ENVIRONMENT, **variables}}}
    return RolloutRayActor.options(**options).remote(
        model=str(model),
        enforce_eager=True,
        worker_extension_cls="cpu_worker.CpuWorkerWrap",
        tensor_parallel_size=1,
        seed=42,
        distributed_executor_backend="uni",
        max_model_len=MAX_MODEL_LEN,
        # all prompts fit: on CPU, stock vLLM fails on a seeded request whose prompt it computes in pieces
        max_num_batched_tokens=16384,
        enable_prefix_caching=True,
        dtype=DTYPE,
        trust_remote_code=True,
        full_determinism=False,
        gpu_memory_utilization=0.1,
        bundle_indices=None,
        num_gpus=0,
        enable_sleep_mode=False,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
    )


def roll_out(actor: Any, prompts: list[list[int]], samples: int, *, is_paused: bool = False) -> Answers:
    """Answers by prompt and sample; all are asked for at once."""
    import ray
    from vllm import SamplingParams

    asked = [prompt for prompt in prompts for _ in range(samples)]
    pending = [
        actor.generate.remote(prompt, SamplingParams(temperature=1.0, seed=number, max_tokens=LENGTH, logprobs=1))
        for number, prompt in enumerate(asked)
    ]
    if is_paused:
        ray.get(actor.pause_generation.remote())
        running = ray.get(actor.get_num_unfinished_requests.remote())
        ray.get(actor.reset_prefix_cache.remote())
        ray.get(actor.resume_generation.remote())
        print(f"paused with {running} requests running")
    return [list(output.outputs[0].token_ids) for output in ray.get(pending)]


def push(actor: Any, path: Path) -> None:
    """Weights of a file, as OpenRLHF's trainer sends them."""
    import ray
    from safetensors.torch import load_file

    ray.get(actor.pause_generation.remote())
    ray.get(actor.init_process_group.remote(str(path), 0, 0, 1, "openrlhf", "gloo", False))
    for name, weight in load_file(path).items():
        ray.get(actor.update_weight.remote(name, weight.dtype, weight.shape))
    ray.get(actor.reset_prefix_cache.remote())
    ray.get(actor.resume_generation.remote())


def other_weights(model: Path, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    path = folder / "other.safetensors"
    save_file({name: one * 1.5 if "down_proj" in name else one for name, one in weights.items()}, path)
    return path


def check_weights(actor: Any, model: Path, prompts: list[list[int]], wanted: Answers) -> bool:
    """Whether answers follow the weights, there and back."""
    samples = len(wanted) // len(prompts)
    with tempfile.TemporaryDirectory() as folder:
        push(actor, other_weights(model, Path(folder)))
    changed = sum(one != other for one, other in zip(roll_out(actor, prompts, samples), wanted, strict=True))
    push(actor, model / "model.safetensors")
    back = sum(one == other for one, other in zip(roll_out(actor, prompts, samples), wanted, strict=True))
    print(
        f"ours, other weights: {changed} of {len(wanted)} answers change; the first weights again: {back} are as before"
    )
    return bool(changed) and back == len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="OpenRLHF's vLLM actor on CPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--samples", type=int, default=4)
    given = parser.parse_args()

    import ray
    from transformers import AutoTokenizer
    from vllm_specrollout.bench.policy.reward import problems
    from vllm_specrollout.bench.policy.tokenizer import prompt_text

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [prompt_text(problem.prompt) for problem in problems(given.problems, seed=0)]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    memory = 200 << 20
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=memory)
    stock = start(given.model, {})
    wanted = roll_out(stock, prompts, given.samples)
    ray.kill(stock)
    ours = start(given.model, {"VLLM_SPEC_ROLLOUT": "1"})
    is_right = True
    for is_paused in (True, False):
        answers = roll_out(ours, prompts, given.samples, is_paused=is_paused)
        equal = sum(one == other for one, other in zip(answers, wanted, strict=True))
        print(f"ours: {equal} of {len(wanted)} answers are those of stock")
        is_right &= equal == len(wanted)
    is_right &= check_weights(ours, given.model, prompts, wanted)
    ray.shutdown()
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
