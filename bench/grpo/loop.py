"""The loop itself: roll out in every engine, compare, reward, update from stock's answers, push the weights; again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..common.models import check_length
from ..common.runs import Run
from ..policy.grpo import AnswerGroup, GrpoTrainer
from ..policy.inflate import inflate
from ..policy.reward import reward
from ..policy.tasks import Problem
from ..policy.tokenizer import prompt_text
from .engines import Engines, engine_run, inflation_error
from .plan import PROMPT_LEN, STOCK, Arm, Plan, Request, problem_set, problems_of_step, requests_of_step
from .rows import StepRow
from .trace import write_rollout

Report = Callable[[str, int], None]
_CHECKED_PROMPTS = 2
"""Prompts on which the inflated policy is compared with the small one after every update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Where the policy is."""

    # the small policy that is trained
    policy: Path
    # what the engines start from; the policy itself if it is not inflated
    served: Path
    # a name of bench/policy/shapes.py; None: not inflated
    size: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a loop found."""

    steps: tuple[StepRow, ...]
    # plain lines for the reader
    notes: tuple[str, ...]


class Loop:
    """One run of the loop. `run` does it all."""

    def __init__(self, plan: Plan, models: Models, engines: Engines, report: Report, trace: Path | None) -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        # its bars would cut through ours
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        check_length(models.served, plan.max_model_len())
        torch.set_num_threads(plan.threads)
        self._plan, self._models, self._engines, self._report, self._trace = plan, models, engines, report, trace
        self._tokenizer = AutoTokenizer.from_pretrained(models.policy)
        self._trainer = GrpoTrainer(models.policy, plan.grpo)
        self._problems = problem_set(plan)
        self._prompts = {problem.problem_id: self._encode(problem) for problem in self._problems}
        # one answer of `Engines.report_rewards` per rollout of ours
        self._reports: list[dict[str, int] | None] = []
        # per step, what a variant needs to meet the same
        self._done: list[tuple[list[Request], Run]] = []

    def run(self, save: Path | None = None, variants: Sequence[Arm] = ()) -> Outcome:
        """All epochs; with `save`, the trained policy goes into that folder.

        Args:
            variants: run afterwards, one engine at a time, as all at once take too much memory: each answers the same
                requests with the same weights, and is compared with the same answers of stock.
        """
        for index, arm in enumerate(self._engines.arms):
            self._report(f"starting the {arm.name} engine", 0)
            self._engines.start(index)
            self._report("", 1)
        rows = []
        with tempfile.TemporaryDirectory(prefix="specrollout-grpo-") as scratch:
            for step in range(self._plan.num_steps):
                rows.append(self._step(step, Path(scratch)))
            self._engines.close()
            for arm in variants:
                rows = self._replay(arm, rows, Path(scratch))
        if save is not None:
            self._trainer.save(save, self._plan.dtype)
        return Outcome(steps=tuple(rows), notes=reward_notes(self._reports))

    def _encode(self, problem: Problem) -> list[int]:
        ids = self._tokenizer(prompt_text(problem.prompt), add_special_tokens=False)["input_ids"]
        return list(ids)[:PROMPT_LEN]

    def _step(self, step: int, scratch: Path) -> StepRow:
        plan = self._plan
        epoch = step // plan.steps_per_epoch
        if step % plan.steps_per_epoch == 0:
            self._engines.begin_epoch()
        chosen = problems_of_step(plan, self._problems, step)
        requests = requests_of_step(plan, self._problems, self._prompts, step)
        results = self._roll_out(step, requests)
        stock, _, rewards = results[STOCK]
        self._done.append((requests, stock))
        runs = tuple(
            engine_run(arm, run, stock, idle, own)
            for arm, (run, idle, own) in ((arm, results[arm.name]) for arm in self._engines.arms)
        )
        if self._trace is not None:
            write_rollout(self._trace, step, self._trace_lines(step, epoch, requests, stock, rewards))
        self._report("updating the policy", 0)
        begin = time.perf_counter()
        update = self._trainer.update(self._groups(chosen, stock, rewards))
        train_s = time.perf_counter() - begin
        self._report("", 1)
        push_s, error = self._push(step + 1, scratch) if step + 1 < plan.num_steps else (0.0, None)
        by_group = [rewards[i : i + plan.samples] for i in range(0, len(rewards), plan.samples)]
        return StepRow(
            step=step,
            epoch=epoch,
            weights_version=step,
            reward=sum(rewards) / len(rewards),
            solved=sum(max(group) > 0.0 for group in by_group) / len(by_group),
            mean_tokens=stock.num_tokens / len(requests),
            cut_share=sum(not self._is_finished(ids) for ids in stock.token_ids) / len(requests),
            runs=runs,
            update=asdict(update),
            train_s=train_s,
            push_s=push_s,
            inflation_error=error,
        )

    def _replay(self, arm: Arm, rows: Sequence[StepRow], scratch: Path) -> list[StepRow]:
        """The rows with the runs of one more arm."""
        extended = []
        with self._engines.alone(arm) as engines:
            self._report(f"starting the {arm.name} engine", 0)
            engines.start(0)
            self._report("", 1)
            for row, (requests, stock) in zip(rows, self._done, strict=True):
                self._report(f"step {row.step + 1} of {self._plan.num_steps}: {arm.name}", 0)
                if row.step % self._plan.steps_per_epoch == 0:
                    engines.begin_epoch()
                if row.step > 0:
                    engines.push(self._served(row.step, scratch))
                    self._drop_served(row.step - 1, scratch)
                run, idle = engines.roll_out(arm, requests)
                rewards = self._rewards(requests, run)
                self._reports.append(engines.report_rewards(arm, requests, rewards))
                extended.append(replace(row, runs=(*row.runs, engine_run(arm, run, stock, idle, rewards))))
                self._report("", 1)
        return extended

    def _roll_out(self, step: int, requests: Sequence[Request]) -> dict[str, tuple[Run, float, list[float]]]:
        """Engine -> its answers, cores kept busy by the others, rewards. Another engine begins every step."""
        arms = self._engines.arms
        results = {}
        for i in range(len(arms)):
            arm = arms[(i + step) % len(arms)]
            self._report(f"step {step + 1} of {self._plan.num_steps}: {arm.name}", 0)
            run, idle = self._engines.roll_out(arm, requests)
            rewards = self._rewards(requests, run)
            if arm.is_ours:
                self._reports.append(self._engines.report_rewards(arm, requests, rewards))
            results[arm.name] = (run, idle, rewards)
            self._report("", 1)
        return results

    def _rewards(self, requests: Sequence[Request], run: Run) -> list[float]:
        texts = self._tokenizer.batch_decode([list(ids) for ids in run.token_ids], skip_special_tokens=True)
        return [reward(request.problem, text) for request, text in zip(requests, texts, strict=True)]

    def _groups(self, chosen: Sequence[Problem], run: Run, rewards: Sequence[float]) -> list[AnswerGroup]:
        n = self._plan.samples
        return [
            AnswerGroup(
                prompt_ids=tuple(self._prompts[problem.problem_id]),
                answers=run.token_ids[i * n : (i + 1) * n],
                rewards=tuple(rewards[i * n : (i + 1) * n]),
            )
            for i, problem in enumerate(chosen)
        ]

    def _push(self, version: int, scratch: Path) -> tuple[float, float | None]:
        """New weights into every engine; returns the seconds it took and the inflation's error.

        Each version has a folder of its own, as an engine may still map the file that it loaded last.
        """
        self._report("pushing the weights", 0)
        begin = time.perf_counter()
        folder = self._trainer.save(scratch / f"policy-{version}", self._plan.dtype)
        served = self._served(version, scratch)
        self._engines.push(served)
        seconds = time.perf_counter() - begin
        error = None
        if served != folder:
            error = inflation_error(folder, served, list(self._prompts.values())[:_CHECKED_PROMPTS])
            self._drop_served(version - 1, scratch)
        self._report("", 1)
        return seconds, error

    def _served(self, version: int, scratch: Path) -> Path:
        """What the engines load of a saved version: the policy itself, or inflated anew."""
        folder = scratch / f"policy-{version}"
        if self._models.size is None:
            return folder
        return inflate(folder, scratch / f"served-{version}", self._models.size)

    def _drop_served(self, version: int, scratch: Path) -> None:
        """Free the disk that an inflated version took; no engine reads it any more."""
        for path in (scratch / f"served-{version}").glob("*.safetensors"):
            path.unlink()

    def _is_finished(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] == self._tokenizer.eos_token_id

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


def num_units(plan: Plan, arms: Sequence[Arm], variants: Sequence[Arm]) -> int:
    """Progress units that `Loop.run` reports: starts, rollouts, updates, pushes."""
    num_arms = len(arms) + len(variants)
    return num_arms + plan.num_steps * (num_arms + 1) + plan.num_steps - 1


def reward_notes(reports: Sequence[Mapping[str, int] | None]) -> tuple[str, ...]:
    """What became of the rewards reported; nothing is said without an engine of ours."""
    if not reports:
        return ()
    if any(report is None for report in reports):
        return ("our engine keeps no history in this configuration: it takes no rewards",)
    matched = sum(report.get("matched", 0) for report in reports if report is not None)
    unknown = sum(report.get("unknown", 0) for report in reports if report is not None)
    return (f"rewards reported to ours: {matched} met their answer, {unknown} met none",)
