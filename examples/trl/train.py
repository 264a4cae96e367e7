"""The smallest real GRPO run with TRL: the shipped policy learns to add up, on CPU, and vLLM generates in this process.

    VLLM_SPEC_ROLLOUT=1 python examples/trl/train.py

Nothing here is of this project but the policy, its problems and its reward. Without the variable vLLM is stock, and on
CPU stock vLLM takes no new weights.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from vllm_specrollout.bench.policy import CHECKPOINT


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="GRPO with TRL on CPU")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the policy")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--problems", type=int, default=8, help="all of them are one epoch")
    parser.add_argument("--problems-per-step", type=int, default=4)
    parser.add_argument("--group", type=int, default=4, help="answers per problem")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--generation-kwargs", type=json.loads, help="TRL's, as JSON")
    parser.add_argument("--record", type=Path, help="file for every step's tokens and rewards, a JSON object a line")
    return parser


def make_trainer(given: argparse.Namespace, model: Any = None) -> Any:
    """TRL's trainer as it is; its engine runs once this returns.

    Args:
        model: what it trains; None: TRL loads the policy itself.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from vllm_specrollout.bench.policy.reward import problems, reward

    chosen = {problem.problem_id: problem for problem in problems(given.problems, seed=0, split="train")}

    def is_right(
        completions: list[Any], problem: list[str], completion_ids: list[list[int]], **more: Any
    ) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        rewards = [reward(chosen[name], text) for name, text in zip(problem, texts, strict=True)]
        if given.record is not None:
            line = {"step": more["trainer_state"].global_step, "tokens": completion_ids, "rewards": rewards}
            with given.record.open("a") as file:
                print(json.dumps(line), file=file)
        return rewards

    config = GRPOConfig(
        output_dir="out/trl",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=512,
        max_steps=given.steps,
        per_device_train_batch_size=given.problems_per_step * given.group,
        num_generations=given.group,
        max_completion_length=given.max_tokens,
        learning_rate=given.learning_rate,
        generation_kwargs=given.generation_kwargs,
        model_init_kwargs={"dtype": "float32"} if model is None else None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    rows = [
        {"prompt": [{"role": "user", "content": problem.prompt}], "problem": name} for name, problem in chosen.items()
    ]
    return GRPOTrainer(
        model=model or str(given.model),
        processing_class=AutoTokenizer.from_pretrained(given.model),
        reward_funcs=is_right,
        args=config,
        train_dataset=Dataset.from_list(rows),
    )


def stats(trainer: Any) -> dict[str, Any]:
    """What the engine counted of its drafts; empty where it is stock."""
    from vllm_specrollout.config import envs

    if not envs.wants_spec_rollout():
        return {}
    (counts,) = trainer.vllm_generation.llm.collective_rpc("spec_rollout_stats")
    return counts


def main() -> None:
    from vllm_specrollout.config import envs
    from vllm_specrollout.trl import log_drafts

    trainer = make_trainer(options().parse_args())
    if envs.wants_spec_rollout():
        log_drafts(trainer)
    trainer.train()
    if counts := stats(trainer):
        print(f"{counts['accepted']} of {counts['drafted']} drafted tokens were accepted in {counts['steps']} steps")


if __name__ == "__main__":
    main()
