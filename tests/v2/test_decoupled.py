"""The very tokens of stock vLLM on the V2 runner where models draft in processes of their own, which run V1 on CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.kernels.draft_choice.naive import MODELLED

from tests.e2e.drafting_models import perturbed
from tests.e2e.elsewhere import Elsewhere, decode, until
from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, judged
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model as model
from tests.v2.test_identity import ENGINE, FEATURES
from vllm_specrollout.cluster.child import Command, WarmDrafter
from vllm_specrollout.cluster.link import Link

pytestmark = pytest.mark.nightly

DRAFTER = {**ENGINE, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
DECOUPLED = {
    "drafters": [], "budget": "fixed", "max_draft_tokens": 6, "max_depth": 4, "placement": "decoupled",
    "decoupled": {"engine_args": DRAFTER},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Drafters share the host's cores with the engine: threads that wait for each other would take most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@dataclass(frozen=True)
class Stage(Elsewhere):
    """An engine whose drafter has the target's own weights, and one that may be attached beside it."""

    @property
    def link(self) -> Link:
        return self.drafter.links["drafter"]

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        answer = super().ask(method, *args)
        assert "cause" not in answer, answer
        return answer

    def decode(self, before_step: Callable[[int], None]) -> None:
        """All requests at once, whose tokens must be stock's."""
        # no further engine may prove ties: its end would take this one's process groups along
        report = compare(self.requests, self.truth, decode(self.llm, self.requests, before_step), "float32")
        assert not report.failures, report.failures[:3]


@pytest.fixture(scope="module")
def stage(models: Path) -> Iterator[Stage]:
    path = model(models, "llama", "float32")
    # above temperature 1 the noise has most of the say
    common = {"max_tokens": 20, "ignore_eos": True}
    requests = [
        Case("decoupled", str(i), [9 + i, 40, 41, 42 + i], {**common, "temperature": t, "seed": i})
        for i, t in enumerate((0.0, 1.0, 1.5, 2.0))
    ]
    other = WarmDrafter(Command.of(perturbed(path, models / "other", 0.1), (), DRAFTER))
    given = {"method": "draft_model", "model": path, "num_speculative_tokens": 4}
    try:
        with engine(path, "float32", is_ours=False, **ENGINE) as stock:
            truth = run(stock.llm, requests)
        settings = {**DECOUPLED, "speculative_config": given}
        with engine(path, "float32", is_ours=True, spec_rollout=settings, **ENGINE) as ours:
            own = Stage(ours.llm, ours.runner, {"other": other}, requests, truth)
            own.overheard("drafter")
            yield own
            process = ours.runner.remote.links["drafter"].process
            pid = process.pid
        assert not process.is_alive and not Path(f"/proc/{pid}").exists(), "the process ends with its engine"
        assert own.is_ready("other"), "a warm one stays"
    finally:
        other.stop()


def test_a_drafter_elsewhere_changes_no_token_whatever_a_request_asks_for(models: Path, ahead: None) -> None:
    """Steps are scheduled ahead, as on a GPU, and every feature is sampled with."""
    path = model(models, "qwen3", "float32")
    given = {"method": "draft_model", "model": perturbed(path, models / "draft", 0.1), "num_speculative_tokens": 4}

    requests = cases(len(FEATURES), VOCAB, seed=31, max_tokens=24, only=FEATURES)
    own = {**DECOUPLED, "decoupled": {**DECOUPLED["decoupled"], "window": 8}, "speculative_config": given}
    with engine(path, "float32", is_ours=False, **ENGINE) as stock:
        truth = run(stock.llm, requests)
    with engine(path, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        drafted = run(ours.llm, requests)
        ours.runner.settle()
        state = ours.runner.remote.state()["drafter"]
        assert state["is_there"] and state["matched"] > 0
        # whom it came in time for is a matter of the clock: the device is some steps ahead of what it knows
        assert ours.runner.stats.accepted > 0
        # the runner itself learns with the next step that the last ones are over
        assert set(state["requests"]) <= set(ours.runner.host._requests)
    report = judged(path, "float32", requests, truth, drafted, **ENGINE)
    assert not report.failures, report.failures[:3]


def test_a_model_that_drafts_here_and_elsewhere_at_once_changes_no_token(models: Path) -> None:
    path = model(models, "llama", "float32")
    given = {"method": "draft_model", "model": perturbed(path, models / "both", 0.3), "num_speculative_tokens": 4}
    devices = [f"cpu:{max(os.sched_getaffinity(0))}"]
    own = {**DECOUPLED, "placement": "auto", "devices": devices, "speculative_config": given}
    requests = cases(3, VOCAB, seed=33, max_tokens=24, only=("temperature 1", "greedy", "logprobs"))
    with engine(path, "float32", is_ours=False, **ENGINE) as stock:
        truth = run(stock.llm, requests)
    with engine(path, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        drafted = run(ours.llm, requests)
        ours.runner.settle()
        assert ours.runner.stats.accepted > 0 and ours.runner.remote.totals()[1] > 0
        assert (ours.runner.drafts.kinds == MODELLED).any(), "both have drafted"
    report = judged(path, "float32", requests, truth, drafted, **ENGINE)
    assert not report.failures, report.failures[:3]


# Triton is told before anything is imported
_SITE = """
import sys
if "vllm_specrollout.worker.drafter_process" in " ".join(sys.orig_argv):
    import tests.v2.interpreter
"""


def test_stock_vllm_on_its_v2_runner_draws_the_targets_own_tokens_in_another_process(
    stage: Stage, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model and the same noise, place by place, without this plugin."""
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    folders = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    path = model(models, "llama", "float32")
    args = {**DRAFTER, "enable_prefix_caching": True}
    warm = WarmDrafter(Command(path, f"ipc://{tmp_path}/socket", args, is_v2=True))
    try:
        until(lambda: warm.wake() or warm.address)
        stage.ask("attach_drafter", "same", warm.address, 4, 1)
        until(lambda: stage.ask("drafters_state")["same"]["is_there"])
        accepted = stage.runner.stats.accepted

        def before_step(step: int) -> None:
            if step > 1:
                until(lambda: stage.has_answered("same", 1))

        stage.decode(before_step)
        state = stage.ask("detach_drafter", "same")
    finally:
        warm.stop()
    # how much was drafted in time is up to the host
    assert state["tried"] > 0 and state["matched"] == state["tried"], "each token that was drafted is the target's"
    assert stage.runner.stats.accepted > accepted


def test_drafters_come_and_go_within_one_batch(stage: Stage) -> None:
    seen: dict[str, Any] = {}
    accepted = stage.runner.stats.accepted
    until(lambda: stage.is_ready("other"))

    def before_step(step: int) -> None:
        if step == 1:
            stage.ask("attach_drafter", "other", stage.pool["other"].address)
            until(lambda: stage.ask("drafters_state")["other"]["is_there"])
        elif step == 3:
            # it was told of all requests, with all their tokens
            until(lambda: stage.has_answered("other", 1))
            stage.ask("assign_drafter", "other", ["2"])
            seen.update(standing=stage.ask("spec_rollout_standing"))
            assert {one["name"] for one in stage.ask("drafters_state")["other"]["requests"].values()} <= {"2"}
            stage.ask("assign_drafter", "other", None)
        elif step == 4:
            seen.update(stage.ask("detach_drafter", "other"))
        elif step > 4:
            until(lambda: stage.has_answered("drafter", 1))

    stage.decode(before_step)
    assert stage.runner.stats.accepted > accepted
    assert seen["opened"] >= 4 and seen["trees"] > 0 and not seen["error"]
    assert list(stage.drafter.links) == ["drafter"]
    standing, now = seen["standing"], stage.ask("spec_rollout_standing")
    assert standing["attached"] == {"other": ["2"]}
    assert [prompt for prompt, _ in standing["running"].values()] == [4] * 4
    assert all(0 <= tokens < 20 for _, tokens in standing["running"].values())
    assert now["steps"] > standing["steps"] > 0
    assert now["verified"] >= now["accepted"] > 0


@pytest.mark.identity
def test_a_drafter_killed_amid_a_batch_changes_no_token_and_comes_back(stage: Stage) -> None:
    def before_step(step: int) -> None:
        if step == 3:
            until(lambda: stage.has_answered("drafter", 1))
            assert (pid := stage.link.process.pid)
            os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        stage.link.watch()
        stage.link.receive()
        time.sleep(0.05)
        return stage.link.is_there

    stage.decode(before_step)
    # a short batch may be over before its drafter is begun anew
    until(lambda: is_back() and stage.link.process.restarts == 1)
    tried, accepted = stage.link.score.tried, stage.runner.stats.accepted
    stage.decode(lambda step: until(lambda: stage.has_answered("drafter", 1)))
    assert stage.link.score.tried > tried, "what it drafts is verified again"
    assert stage.runner.stats.accepted > accepted


def test_bad_calls_are_answered_with_their_cause(stage: Stage) -> None:
    for call in (("attach_drafter", ("drafter", stage.pool["other"].address)), ("detach_drafter", ("nobody",))):
        (answer,) = stage.llm.collective_rpc(call[0], args=call[1])
        assert set(answer) == {"cause", "hint"}, call
