"""The loop itself: roll out in every engine, compare, reward, update from stock's answers, push the weights; again."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_specrollout.bench.policy.grpo import AnswerGroup, GrpoTrainer
from vllm_specrollout.bench.policy.inflate import inflate
from vllm_specrollout.bench.policy.reward import reward
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from ..runner.engines import PROMPT_LEN, STOCK
from ..runner.fields import Row
from ..runner.rows import Run
from .fleet import Fleet, Request, engine_run
from .rows import step_row
from .trace import write_rollout


class Loop:
    """One run of the loop. `run` does it all.

    Args:
        policy: the small one that is trained.
        size: what the engines run, by a name of packages/policy/random_model.py; None: the policy as it is.
    """

    def __init__(self, plan: Any, policy: Path, size: str | None, fleet: Fleet) -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        # its bars would cut through ours
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        torch.set_num_threads(plan.threads)
        self._plan, self._size, self._fleet = plan, size, fleet
        self._tokenizer = AutoTokenizer.from_pretrained(policy)
        self._trainer = GrpoTrainer(policy, plan.grpo)
        self._problems = plan.problem_set()
        texts = [prompt_text(problem.prompt) for problem in self._problems]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._prompts = {one.problem_id: own[:PROMPT_LEN] for one, own in zip(self._problems, ids, strict=True)}
        # what our engines answered to the rewards of each rollout
        self._reports: list[dict[str, int] | None] = []

    def run(self) -> tuple[list[Row], list[str]]:
        """All epochs, and lines for the reader; the trained policy goes where the scenario says."""
        with tempfile.TemporaryDirectory(prefix="specrollout-grpo-") as folder:
            rows = [self._step(step, Path(folder)) for step in range(self._plan.num_steps)]
        if self._plan.save is not None:
            self._trainer.save(self._plan.save, self._plan.dtype)
        return rows, reward_notes(self._reports)

    def _step(self, step: int, scratch: Path) -> Row:
        plan, fleet = self._plan, self._fleet
        epoch = step // plan.steps_per_epoch
        if step % plan.steps_per_epoch == 0:
            fleet.begin_epoch()
        requests = plan.requests_of_step(self._problems, self._prompts, step)
        results = self._roll_out(step, requests)
        stock, rewards = results[STOCK]
        if plan.trace is not None:
            write_rollout(plan.trace, step, self._trace_lines(step, epoch, requests, stock, rewards))
        with fleet.doing("updating the policy"):
            begin = time.perf_counter()
            groups = self._groups(requests, stock, rewards)
            update = self._trainer.update(groups)
            train_s = time.perf_counter() - begin
        push_s = self._push(step + 1, scratch) if step + 1 < plan.num_steps else 0.0
        return step_row(
            [engine_run(arm, *results[arm.name], stock) for arm in fleet.arms],
            step=step,
            epoch=epoch,
            weights_version=step,
            reward=sum(rewards) / len(rewards),
            solved=sum(max(group.rewards) > 0.0 for group in groups) / len(groups),
            mean_tokens=stock.num_tokens / len(requests),
            cut_share=sum(not self._is_finished(ids) for ids in stock.token_ids) / len(requests),
            update=asdict(update),
            train_s=train_s,
            push_s=push_s,
        )

    def _roll_out(self, step: int, requests: Sequence[Request]) -> dict[str, tuple[Run, list[float]]]:
        """Engine -> its answers, and their rewards. Another engine begins every step."""
        results, fleet = {}, self._fleet
        for i in range(len(fleet.arms)):
            arm = fleet.arms[(i + step) % len(fleet.arms)]
            with fleet.doing(f"step {step + 1} of {self._plan.num_steps}: {arm.name}"):
                run = fleet.roll_out(arm, requests)
                rewards = self._rewards(requests, run)
                if arm.is_ours:
                    earned = {one.request_id: value for one, value in zip(requests, rewards, strict=True)}
                    self._reports.append(fleet.report_rewards(arm, earned))
                results[arm.name] = (run, rewards)
        return results

    def _rewards(self, requests: Sequence[Request], run: Run) -> list[float]:
        texts = self._tokenizer.batch_decode([list(ids) for ids in run.token_ids], skip_special_tokens=True)
        return [reward(request.problem, text) for request, text in zip(requests, texts, strict=True)]

    def _groups(self, requests: Sequence[Request], run: Run, rewards: Sequence[float]) -> list[AnswerGroup]:
        parts = [slice(i, i + self._plan.samples) for i in range(0, len(requests), self._plan.samples)]
        return [
            AnswerGroup(
                prompt_ids=requests[part.start].prompt_ids, answers=run.token_ids[part], rewards=tuple(rewards[part])
            )
            for part in parts
        ]

    def _push(self, version: int, scratch: Path) -> float:
        """New weights into every engine, inflated anew; the seconds that it took.

        Each version has a folder of its own, as an engine may still map the file that it loaded last.
        """
        with self._fleet.doing("pushing the weights"):
            begin = time.perf_counter()
            folder = self._trainer.save(scratch / f"policy-{version}", self._plan.dtype)
            if self._size is not None:
                folder = inflate(folder, scratch / f"served-{version}", self._size)
            self._fleet.push(folder)
            # the one before frees its disk: no engine reads it any more
            shutil.rmtree(scratch / f"served-{version - 1}", ignore_errors=True)
            return time.perf_counter() - begin

    def _is_finished(self, ids: Sequence[int]) -> bool:
        return ids[-1:] == (self._tokenizer.eos_token_id,)

    def _trace_lines(
        self, step: int, epoch: int, requests: Sequence[Request], run: Run, rewards: Sequence[float]
    ) -> list[dict[str, Any]]:
        """As described in trace.py."""
        return [
            {
                "step": step,
                "epoch": epoch,
                "weights_version": step,
                "problem_id": request.problem.problem_id,
                "family": request.problem.family,
                "sample": request.sample,
                "request_id": request.request_id,
                "seed": request.seed,
                "prompt_token_ids": list(request.prompt_ids),
                "token_ids": list(ids),
                "num_tokens": len(ids),
                "finish": "stop" if self._is_finished(ids) else "length",
                "finish_s": round(finish_s, 4),
                "reward": value,
            }
            for request, ids, finish_s, value in zip(requests, run.token_ids, run.finish_s, rewards, strict=True)
        ]


def reward_notes(reports: Sequence[Mapping[str, int] | None]) -> list[str]:
    """What became of the rewards reported; nothing is said without an engine of ours."""
    if not reports:
        return []
    if None in reports:
        return ["our engine keeps no history in this configuration: it takes no rewards"]
    matched, unknown = (sum(report.get(name, 0) for report in reports) for name in ("matched", "unknown"))
    return [f"rewards reported to ours: {matched} met their answer, {unknown} met none"]
