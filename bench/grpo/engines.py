"""The loop's engines: all alive at once, one at work; new weights go to all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

from ..common.engine_process import EngineProcess, wait_until_quiet
from ..common.runs import Run, first_difference
from .plan import Arm, Plan, Request
from .rows import EngineRun

_WARM_UP_TOKENS = 16
_FIRST_BYTE = 5
"""Id of the tokenizer's first byte; the 256 bytes follow the special tokens, and the tasks are written without them."""
LIMIT = 1e-4
"""Largest difference of inflated logits, relative to the largest logit, both computed in float32."""


class LoopFailed(SpecRolloutError):
    """The loop cannot go on."""


class Engines:
    """The engine processes of a loop, in the order of its arms; a context manager."""

    def __init__(self, plan: Plan, arms: Sequence[Arm], model: Path, *, kv_gib: int, is_verbose: bool) -> None:
        self._plan, self._model, self._kv_gib, self._is_verbose = plan, model, kv_gib, is_verbose
        self.arms = tuple(arms)
        self._specs = [
            arm.engine_spec(plan.engine_arguments(model), kv_gib=kv_gib, is_verbose=is_verbose) for arm in arms
        ]
        self._stack = ExitStack()
        self._processes: dict[str, EngineProcess] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines."""
        self._stack.close()
        self._processes.clear()

    def alone(self, arm: Arm) -> Engines:
        """Another arm's engine, set up as these; not started."""
        return Engines(self._plan, [arm], self._model, kv_gib=self._kv_gib, is_verbose=self._is_verbose)

    def start(self, index: int) -> None:
        """Start the engine of one arm, and let it set its kernels up on prompts that are like no task."""
        arm, plan = self.arms[index], self._plan
        process = self._stack.enter_context(EngineProcess(self._specs[index]))
        self._processes[arm.name] = process
        prompts = [[_FIRST_BYTE + (17 * i + j * j) % 256 for j in range(32)] for i in range(plan.batch)]
        params: list[dict[str, Any]] = []
        for i in range(plan.batch):
            params.append({"temperature": 1.0, "seed": i, "max_tokens": min(_WARM_UP_TOKENS, plan.max_tokens)})
            if arm.is_ours:
                params[-1]["extra_args"] = {"spec_rollout": {"problem_id": "warm-up"}}
        process.ask("generate", prompts=prompts, params=params)

    def roll_out(self, arm: Arm, requests: Sequence[Request]) -> tuple[Run, float]:
        """Run all requests in one engine; also how many cores the other engines' processes kept busy meanwhile."""
        process = self._processes[arm.name]
        others = [other for other in self._processes.values() if other is not process]
        wait_until_quiet(list(self._processes.values()), process)
        before = sum(other.cpu_s() for other in others)
        reply = process.ask(
            "generate",
            prompts=[list(request.prompt_ids) for request in requests],
            params=[request.params(self._plan, is_ours=arm.is_ours) for request in requests],
            ids=[request.request_id for request in requests],
            stats=arm.is_ours,
        )
        run = Run.from_child(reply)
        return run, (sum(other.cpu_s() for other in others) - before) / run.wall_s

    def begin_epoch(self) -> None:
        """Tell our engines that every problem will be asked again."""
        for arm in self.arms:
            if arm.is_ours:
                self._processes[arm.name].ask("begin_epoch")

    def report_rewards(self, arm: Arm, requests: Sequence[Request], rewards: Sequence[float]) -> dict[str, int] | None:
        """Tell one of our engines what its answers earned; how many of them it knew, None if it takes no rewards."""
        earned = {request.request_id: value for request, value in zip(requests, rewards, strict=True)}
        return self._processes[arm.name].ask("report_rewards", rewards=earned)

    def push(self, folder: Path) -> None:
        """Load new weights into every engine, and empty its prefix cache."""
        for process in self._processes.values():
            process.ask("reload", folder=str(folder))


def engine_run(arm: Arm, run: Run, stock: Run, idle_cores: float, rewards: Sequence[float]) -> EngineRun:
    """The figures of one rollout, compared with stock's of the same step token by token."""
    difference = first_difference(stock, run)
    return EngineRun(
        engine=arm.name,
        wall_s=run.wall_s,
        steps=len(run.step_s),
        num_tokens=run.num_tokens,
        reward=sum(rewards) / len(rewards),
        num_differing=difference.num_requests if difference is not None else 0,
        identical=(difference is None) if arm.is_ours else None,
        difference=difference.as_text() if arm.is_ours and difference is not None else None,
        idle_cores=idle_cores,
        drafted=run.totals.drafted if run.totals is not None else None,
        accepted=run.totals.accepted if run.totals is not None else None,
    )


def suffix_problem(import_path: str) -> str | None:
    """Why vLLM's suffix decoding cannot run in an engine with this import path; None if it can."""
    code = "import arctic_inference.suffix_decoding"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **({"PYTHONPATH": import_path} if import_path else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else None


def inflation_error(small: Path, large: Path, prompts: Sequence[Sequence[int]]) -> float:
    """Largest difference of two policies' logits relative to the largest logit, both computed in float32.

    Raises:
        LoopFailed: they are not the same function.
    """
    import torch
    from transformers import AutoModelForCausalLM

    results = []
    for folder in (small, large):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            results.append([model(torch.tensor([list(ids)])).logits for ids in prompts])
        del model
    worst = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
    error = worst / max(float(one.abs().max()) for one in results[0])
    if error > LIMIT:
        raise LoopFailed(
            f"the inflated policy's logits differ by {error:.1e} of the largest one, above {LIMIT:g}",
            "run without `--size`, and report the checkpoint",
        )
    return error
