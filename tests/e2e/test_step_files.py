"""Files of ours that a decode step passes on the V1 runner: who follows a step has to read them all."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.drafting_models import drafting_with
from tests.e2e.identity.engines import Engine, engine, model
from vllm_specrollout import drafters
from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.budgets.step_cost import Asking
from vllm_specrollout.budgets.worth import Worth
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.server.prefill import prefill
from vllm_specrollout.training.rows import RowSource
from vllm_specrollout.worker.models.drafter import ModelDrafter

ROOT = Path(__file__).parents[2]
BOTH = ("history", "ngram")
BINDINGS = {"csrc/bindings.cc", "csrc/bind_drafters.cc"}


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


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, ModelDrafter]]:
    folder = tmp_path_factory.mktemp("models")
    target = model(folder, "llama", "float32")
    head = drafting_with("eagle3", target, folder / "head")
    with engine(target, "float32", is_ours=True, spec_rollout={"drafters": BOTH, "speculative_config": head}) as one:
        yield one, one.runner.model_drafter


def steady_files(ours: Engine, head: ModelDrafter | None) -> list[set[str]]:
    """Of steps in which nothing comes or goes, all drafters are asked, and a tree is verified: by their number.

    Now and then a step passes files more: the history's index cache looks at how its indices have grown, and a branch
    that was accepted has its keys and values moved.
    """
    speculator, llm_engine = ours.runner.spec_rollout, ours.llm.llm_engine
    built = drafters.build(SpecRolloutConfig(drafters=BOTH))
    speculator.replace_drafters([*built, head] if head is not None else built)
    ours.runner.model_drafter = head
    speculator.budget, speculator.backoff = GoodputBudget(16, 16), Backoff()
    # counting the files makes drafters slow, as the first step of an engine does, and who takes much time is asked by
    # other rules
    speculator._clock, speculator._asking, speculator.worth = lambda: 0.0, Asking(), Worth()
    for i in range(4):
        # greedy ones repeat themselves, sampled ones need noise
        params = SamplingParams(seed=i, temperature=i % 2, max_tokens=64, ignore_eos=True)
        llm_engine.add_request(f"hops-{i}", {"prompt_token_ids": [5, 6, 7, 8] * 6 + [i]}, params)
    passed: list[set[str]] = []
    asked = {f"vllm_specrollout.drafters.{name}" for name in BOTH}
    if head is not None:
        asked.add("vllm_specrollout.drafters.levels")
    while llm_engine.has_unfinished_requests():
        before = list(ours.runner.input_batch.req_ids)
        with Hops() as hops:
            llm_engine.step()
        is_steady = before == ours.runner.input_batch.req_ids and len(before) == 4
        if is_steady and asked <= hops.files and ours.runner.step.sampled is not None:
            passed.append(hops.files)
    return sorted(passed, key=len)


@pytest.mark.parametrize(("has_head", "most"), [(False, 18), (True, 23)])
def test_a_decode_step_passes_few_of_our_files(
    with_head: tuple[Engine, ModelDrafter], has_head: bool, most: int
) -> None:
    ours, head = with_head
    passed = steady_files(ours, head if has_head else None)
    usual = passed[len(passed) // 2]
    assert usual >= BINDINGS
    assert len(usual - BINDINGS) <= most, "\n".join(sorted(usual))


def test_a_decode_step_passes_no_file_of_training_though_a_trainer_listens(
    with_head: tuple[Engine, ModelDrafter], tmp_path: Path
) -> None:
    ours, head = with_head
    address = f"ipc://{tmp_path}/rows"
    source = RowSource(address)
    prefill(ours.llm, address, 1)
    passed = set[str]().union(*steady_files(ours, head))
    ours.llm.llm_engine.step()
    assert len(ours.runner.tap.ring) == 4
    theirs = {name for name in passed if ".training" in name or name.endswith("worker.hidden")}
    assert passed >= BINDINGS and not theirs
    # and is there something to be found by that?
    with Hops() as hops:
        assert prefill(ours.llm, address, 1)["computed"] > 0
    assert hops.files >= {"vllm_specrollout.worker.hidden", "vllm_specrollout.training.rows"}
    source.close()
