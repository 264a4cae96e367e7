"""verl's own vLLM server under Ray, on CPU: rollouts that are cut and go on, with drafts and without.

    python examples/verl/rollout.py

`stock` has no spec rollout. `variable` is switched on by `VLLM_SPEC_ROLLOUT`, and `config` by verl's configuration
alone. verl's client asks for all answers; for the last two, the server aborts what runs several times, as it does
before new weights, and the client goes on with each answer. All must end up with the tokens of `stock`. At last one
server gets other weights by verl's own transfer, and then the first ones again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from vllm_specrollout.bench.policy import CHECKPOINT

SERVERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "stock": ({}, []),
    "variable": ({"VLLM_SPEC_ROLLOUT": "1"}, []),
    "config": ({}, ["+actor_rollout_ref.rollout.engine_kwargs.vllm.spec_rollout={max_draft_tokens: 16}"]),
}
"""For each server, variables and overrides of verl's configuration."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    # cpu_platform.py is beside this file
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
}
os.environ.update(ENVIRONMENT)
LENGTH = 160
DTYPE = "bfloat16"

Answers = list[list[int]]


def configuration(model: Path, overrides: list[str]) -> Any:
    import verl.trainer
    from hydra import compose, initialize_config_dir

    rollout = {
        "name": "vllm",
        "dtype": DTYPE,
        "load_format": "auto",
        "tensor_model_parallel_size": 1,
        "prompt_length": 96,
        "response_length": LENGTH,
        "max_model_len": 512,
        # all prompts fit: on CPU, stock vLLM fails on a seeded request whose prompt it computes in pieces
        "max_num_batched_tokens": 16384,
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
        "free_cache_engine": False,
        "disable_log_stats": True,
    }
    given = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    given += [f"actor_rollout_ref.model.path={model}", "+actor_rollout_ref.rollout.enable_sleep_mode=False"]
    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        return compose("ppo_trainer", [*given, *overrides])


def start(config: Any, variables: dict[str, str], rank: int = 0) -> Any:
    """verl's server as an actor."""
    import ray
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    server = (
        ray.remote(vLLMHttpServer)
        .options(num_cpus=1, runtime_env={"env_vars": {**ENVIRONMENT, **variables}}, max_concurrency=1000)
        .remote(
            config=config.actor_rollout_ref.rollout,
            model_config=config.actor_rollout_ref.model,
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=rank,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
    )
    ray.get(server.launch_server.remote())
    return server


async def roll_out(config: Any, server: Any, prompts: list[list[int]], samples: int, cuts: int) -> tuple[Answers, int]:
    """Answers by prompt and sample, and how many requests were aborted on the way."""
    import ray
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"0": server})
    client = FullyAsyncLLMServerClient(config, balancer)

    def params(prompt: list[int], number: int) -> dict[str, Any]:
        given: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "seed": number, "max_tokens": LENGTH}
        if cuts:
            # said from the first: verl sends the same parameters again, with the answer so far behind the prompt
            given["extra_args"] = {"spec_rollout": {"resume": {"prompt_tokens": len(prompt)}}}
        return given

    asked = [prompt for prompt in prompts for _ in range(samples)]
    tasks = [
        asyncio.create_task(client.generate(str(number), prompt_ids=prompt, sampling_params=params(prompt, number)))
        for number, prompt in enumerate(asked)
    ]
    aborted = 0
    while cuts and not all(task.done() for task in tasks):
        await asyncio.sleep(0.1)
        count = (await server.abort_all_requests.remote())["aborted_count"]
        await server.resume_generation.remote()
        if count:
            aborted, cuts = aborted + count, cuts - 1
            await asyncio.sleep(1.0)  # verl's client waits as long before it goes on
    return [list((await task).token_ids) for task in tasks], aborted


async def push(server: Any, weights: dict[str, Any]) -> None:
    """As verl's trainer does it, in buckets smaller than a layer."""
    import ray
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    address = f"ipc:///tmp/rl-colocate-zmq-{ray.get_runtime_context().get_job_id()}-replica-0-rank-0.sock"
    await server.abort_all_requests.remote()
    received = server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True})
    await BucketedWeightSender(address, bucket_size_mb=1, use_shm=True).async_send_weights(iter(weights.items()))
    await received
    await server.clear_kv_cache.remote()
    await server.resume_generation.remote()


def check_weights(config: Any, server: Any, model: Path, prompts: list[list[int]], wanted: Answers) -> bool:
    """Whether answers follow the weights, there and back."""
    from safetensors.torch import load_file

    first = load_file(model / "model.safetensors")
    other = {name: one * 1.5 if "down_proj" in name else one for name, one in first.items()}
    samples = len(wanted) // len(prompts)
    asyncio.run(push(server, other))
    pushed, _ = asyncio.run(roll_out(config, server, prompts, samples, 0))
    changed = sum(one != two for one, two in zip(pushed, wanted, strict=True))
    asyncio.run(push(server, first))
    again, _ = asyncio.run(roll_out(config, server, prompts, samples, 0))
    back = sum(one == two for one, two in zip(again, wanted, strict=True))
    print(f"other weights: {changed} of {len(wanted)} answers change; the first weights again: {back} are as before")
    return bool(changed) and back == len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="verl's vLLM server on CPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--cuts", type=int, default=3, help="how often everything is aborted")
    given = parser.parse_args()

    import ray
    from transformers import AutoTokenizer
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
        runtime_env={"env_vars": ENVIRONMENT},
    )
    first: Answers | None = None
    failed = False
    for name in given.servers:
        variables, overrides = SERVERS[name]
        config = configuration(given.model, overrides)
        server = start(config, variables)
        # at first nothing is known of the problems, so answers take longer
        for cuts in (0,) if name == "stock" else (given.cuts, 0):
            answers, aborted = asyncio.run(roll_out(config, server, prompts, given.samples, cuts))
            first = first or answers
            equal = sum(one == other for one, other in zip(answers, first, strict=True))
            failed |= equal < len(first) or bool(cuts) > bool(aborted)
            print(
                f"{name}, {aborted} requests aborted: {equal} of {len(first)} answers are those of {given.servers[0]}"
            )
        if name != "stock" and name == given.servers[-1]:
            failed |= not check_weights(config, server, given.model, prompts, first)
        ray.kill(server)
    ray.shutdown()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
