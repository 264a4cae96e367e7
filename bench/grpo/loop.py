"""The loop itself: roll out in every engine, compare, reward, update from stock's answers, push the weights; again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

from ..policy.grpo import AnswerGroup, GrpoTrainer
from ..policy.inflate import inflate
from ..policy.reward import reward
from ..policy.tokenizer import prompt_text
from ..runner.engines import PROMPT_LEN, STOCK, Report
from ..runner.fields import Row
from ..runner.rows import Run
from .fleet import Arm, Fleet, Request, engine_run
from .rows import step_row
from .trace import write_rollout

LIMIT = 1e-4
"""Largest difference of inflated logits, relative to the largest logit, both computed in float32."""
_CHECKED_PROMPTS = 2
"""Prompts on which the inflated policy is compared with the small one after every update."""


class LoopFailed(SpecRolloutError):
    """The loop cannot go on."""


class Loop:
    """One run of the loop. `run` does it all.

    Args:
        policy: the small one that is trained.
        size: what the engines run, by a name of bench/policy/random_model.py; None: the policy as it is.
    """

    def __init__(
        self, plan: Any, policy: Path, size: str | None, make_fleet: Callable[[Sequence[Arm]], Fleet], report: Report
    ) -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        # its bars would cut through ours
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        torch.set_num_threads(plan.threads)
        self._plan, self._size, self._make_fleet, self._report = plan, size, make_fleet, report
        self._tokenizer = AutoTokenizer.from_pretrained(policy)
        self._trainer = GrpoTrainer(policy, plan.grpo)
        self._problems = plan.problem_set()
        texts = [prompt_text(problem.prompt) for problem in self._problems]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._prompts = {one.problem_id: own[:PROMPT_LEN] for one, own in zip(self._problems, ids, strict=True)}
        # what our engines answered to the rewards of each rollout
        self._reports: list[dict[str, int] | None] = []
        # per step, what a variant needs to meet the same
        self._done: list[tuple[list[Request], Run]] = []

    def run(self, arms: Sequence[Arm], variants: Sequence[Arm]) -> tuple[list[Row], list[str]]:
        """All epochs, and lines for the reader; the trained policy goes where the scenario says.

        Args:
            arms: whose engines are alive at once.
            variants: run afterwards, one engine at a time, as all at once take too much memory: each answers the same
                requests with the same weights, and is compared with the same answers of stock.
        """
        with tempfile.TemporaryDirectory(prefix="specrollout-grpo-") as folder:
            scratch = Path(folder)
            with self._make_fleet(arms) as fleet:
                rows = [self._step(step, fleet, scratch) for step in range(self._plan.num_steps)]
            for arm in variants:
                rows = self._replay(arm, rows, scratch)
        if self._plan.save is not None:
            self._trainer.save(self._plan.save, self._plan.dtype)
        return rows, reward_notes(self._reports)

    def _step(self, step: int, fleet: Fleet, scratch: Path) -> Row:
        plan = self._plan
        epoch = step // plan.steps_per_epoch
        if step % plan.steps_per_epoch == 0:
            fleet.begin_epoch()
        requests = plan.requests_of_step(self._problems, self._prompts, step)
        results = self._roll_out(step, fleet, requests)
        stock, _, rewards = results[STOCK]
        self._done.append((requests, stock))
        if plan.trace is not None:
            write_rollout(plan.trace, step, self._trace_lines(step, epoch, requests, stock, rewards))
        self._report("updating the policy", 0)
        begin = time.perf_counter()
        groups = self._groups(requests, stock, rewards)
        update = self._trainer.update(groups)
        train_s = time.perf_counter() - begin
        self._report("", 1)
        push_s, error = self._push(step + 1, fleet, scratch) if step + 1 < plan.num_steps else (0.0, None)
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
            inflation_error=error,
        )

    def _replay(self, arm: Arm, rows: Sequence[Row], scratch: Path) -> list[Row]:
        """The rows with the runs of one more arm."""
        extended = []
        with self._make_fleet([arm]) as fleet:
            for row, (requests, stock) in zip(rows, self._done, strict=True):
                if row.step % self._plan.steps_per_epoch == 0:
                    fleet.begin_epoch()
                if row.step > 0:
                    fleet.push(self._served(row.step, scratch))
                    self._drop_served(row.step - 1, scratch)
                results = self._roll_out(row.step, fleet, requests)
                extended.append(step_row([*row.pop("runs"), engine_run(arm, *results[arm.name], stock)], **row))
        return extended

    def _roll_out(
        self, step: int, fleet: Fleet, requests: Sequence[Request]
    ) -> dict[str, tuple[Run, float, list[float]]]:
        """Engine -> its answers, cores kept busy by the others, rewards. Another engine begins every step."""
        results = {}
        for i in range(len(fleet.arms)):
            arm = fleet.arms[(i + step) % len(fleet.arms)]
            self._report(f"step {step + 1} of {self._plan.num_steps}: {arm.name}", 0)
            run, idle = fleet.roll_out(arm, requests)
            rewards = self._rewards(requests, run)
            if arm.is_ours:
                earned = {one.request_id: value for one, value in zip(requests, rewards, strict=True)}
                self._reports.append(fleet.report_rewards(arm, earned))
            results[arm.name] = (run, idle, rewards)
            self._report("", 1)
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

    def _push(self, version: int, fleet: Fleet, scratch: Path) -> tuple[float, float | None]:
        """New weights into every engine; returns the seconds it took and the inflation's error.

        Each version has a folder of its own, as an engine may still map the file that it loaded last.
        """
        self._report("pushing the weights", 0)
        begin = time.perf_counter()
        folder = self._trainer.save(scratch / f"policy-{version}", self._plan.dtype)
        served = self._served(version, scratch)
        fleet.push(served)
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
        if self._size is None:
            return folder
        return inflate(folder, scratch / f"served-{version}", self._size)

    def _drop_served(self, version: int, scratch: Path) -> None:
        """Free the disk that an inflated version took; no engine reads it any more."""
        for path in (scratch / f"served-{version}").glob("*.safetensors"):
            path.unlink()

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


def reward_notes(reports: Sequence[Mapping[str, int] | None]) -> list[str]:
    """What became of the rewards reported; nothing is said without an engine of ours."""
    if not reports:
        return []
    if None in reports:
        return ["our engine keeps no history in this configuration: it takes no rewards"]
    matched, unknown = (sum(report.get(name, 0) for report in reports) for name in ("matched", "unknown"))
    return [f"rewards reported to ours: {matched} met their answer, {unknown} met none"]
