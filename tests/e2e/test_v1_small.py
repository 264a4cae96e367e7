"""One small engine on the V1 runner, in this process: what it leaves alone, when it asks again, what it survives."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.pausing import GAPS, STEPS, Always, NeverPays
from tests.e2e.randomness import check_rollouts_leave_randomness_alone
from vllm_specrollout import drafters
from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.budgets.step_cost import Asking
from vllm_specrollout.budgets.worth import Worth
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.observe.probation import Probation
from vllm_specrollout.types import DraftLimits, RequestBatch, StepRecord, TreeBatch


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = model(tmp_path_factory.mktemp("models"), "qwen3", "float32")
    with engine(path, "float32", is_ours=True) as one:
        yield one


def test_a_rollout_draws_nothing_from_the_processs_random_states(ours: Engine) -> None:
    check_rollouts_leave_randomness_alone(ours)


def test_after_drafts_did_not_pay_drafters_are_asked_again_after_so_many_steps(ours: Engine) -> None:
    budget = NeverPays(lambda: ours.runner.stats.steps)
    speculator = ours.runner.spec_rollout
    speculator.budget, speculator.backoff = budget, Backoff()
    speculator.replace_drafters([Always()])
    params = SamplingParams(seed=1, max_tokens=STEPS + 3, ignore_eos=True)
    ours.llm.generate([{"prompt_token_ids": [9, 40, 41]}], [params], use_tqdm=False)
    assert budget.gaps == GAPS


class Errs(Always):
    """Drafts soundly for some steps, and then what the function makes of it."""

    name = "errs"

    def __init__(self, fault: str) -> None:
        super().__init__([7, 8])
        self.fault, self.steps = fault, 0

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.steps += 1
        trees = super().propose(batch, limits)
        if self.steps < 6:
            return trees
        if self.fault == "raises":
            raise RuntimeError("out of ideas")
        if self.fault == "no tree":
            return replace(trees, parents=trees.parents[::-1].copy(), log_q=trees.log_q * np.nan)
        return replace(trees, token_ids=np.full_like(trees.token_ids, 400_000))


class Forgets(FixedBudget):
    """A budget that makes a mistake after some steps."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps = 0

    def observe(self, record: StepRecord) -> None:
        self.steps += 1
        assert self.steps < 6, "one step too many"


@pytest.mark.parametrize("fault", ["raises", "no tree", "a token that the model does not have", "budget"])
def test_a_running_engine_survives_what_errs_and_yields_the_same_tokens(
    ours: Engine, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    speculator = ours.runner.spec_rollout
    prompts = [{"prompt_token_ids": [9 + i, 40, 41]} for i in range(3)]
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    speculator.budget, speculator.backoff = FixedBudget(4, 4), Backoff()
    speculator.replace_drafters([])
    plain = ours.llm.generate(prompts, params, use_tqdm=False)
    survivor = Always()
    speculator.replace_drafters([survivor] if fault == "budget" else [Errs(fault), survivor])
    speculator.backoff = Backoff()
    speculator.budget = Forgets() if fault == "budget" else FixedBudget(4, 4)
    speculator.guard.is_strict, before = False, dict(speculator.guard.failures)
    try:
        with caplog.at_level(logging.ERROR, logger="vllm.specrollout"):
            drafted = ours.llm.generate(prompts, params, use_tqdm=False)
    finally:
        speculator.guard.is_strict = True
        # it would be tried again in a later test
        speculator.budget, speculator.probation = FixedBudget(4, 4), Probation()
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    part = "budget" if fault == "budget" else "drafter errs"
    assert stats["failures"] == {**before, part: before.get(part, 0) + 1} and stats["drafted"] > 0
    # named at the first failure only
    assert caplog.text.count(f"{part} failed") == (part not in before)
    assert speculator.drafters == [survivor]


ROOT = Path(__file__).parents[2]


class Hops:
    """The project's files that are entered while it watches this thread: Python files, and files of C++ bindings."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        # name of a bound function -> the files that bind one of that name
        self._bound: dict[str, set[str]] = {}
        for path in (ROOT / "csrc").glob("*.cc"):
            for name in re.findall(r'def\(\s*"(\w+)"', path.read_text()):
                self._bound.setdefault(name, set()).add(f"csrc/{path.name}")

    def __enter__(self) -> Hops:
        sys.setprofile(self._entered)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _entered(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("vllm_specrollout."):
            self.files.add(frame.f_globals["__name__"])
        elif event == "c_call" and "_core" in f"{function.__module__}{type(function.__self__).__module__}":
            self.files |= self._bound.get(function.__name__, set())


def test_a_decode_step_with_two_drafters_passes_few_of_our_files(ours: Engine) -> None:
    """Of steps in which nothing comes or goes, both drafters are asked, and a tree is verified, the usual one.

    Now and then a step passes two files more: the history's index cache looks at how its indices have grown.
    """
    speculator, llm_engine = ours.runner.spec_rollout, ours.llm.llm_engine
    speculator.replace_drafters(drafters.build(SpecRolloutConfig(drafters=("history", "ngram"))))
    speculator.budget, speculator.backoff = GoodputBudget(16, 16), Backoff()
    # counting the files makes drafters slow, as the first step of an engine does, and who takes much time is asked by
    # other rules
    speculator._clock, speculator._asking, speculator.worth = lambda: 0.0, Asking(), Worth()
    for i in range(4):
        # greedy ones repeat themselves, sampled ones need noise
        params = SamplingParams(seed=i, temperature=i % 2, max_tokens=64, ignore_eos=True)
        llm_engine.add_request(f"hops-{i}", {"prompt_token_ids": [5, 6, 7, 8] * 6 + [i]}, params)
    passed: list[set[str]] = []
    asked = {"vllm_specrollout.drafters.history", "vllm_specrollout.drafters.ngram"}
    while llm_engine.has_unfinished_requests():
        before = list(ours.runner.input_batch.req_ids)
        with Hops() as hops:
            llm_engine.step()
        is_steady = before == ours.runner.input_batch.req_ids and len(before) == 4
        if is_steady and asked <= hops.files and ours.runner.step.sampled is not None:
            passed.append(hops.files)
    usual = sorted(passed, key=len)[len(passed) // 2]
    assert usual >= {"csrc/bindings.cc", "csrc/bind_drafters.cc"}
    assert len(usual) <= 22, "\n".join(sorted(usual))
