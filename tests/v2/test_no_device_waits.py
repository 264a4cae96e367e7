"""On a GPU, reading a device value stops the host. In our part of a step that may happen in one named place only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

import vllm_specrollout
from tests.e2e.drafting_models import drafting_with
from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model
from tests.v2.test_rows_by_cost import by_cost

PACKAGE = Path(vllm_specrollout.__file__).parent
OURS = (str(PACKAGE / "worker" / "v2"), str(PACKAGE.parent / "kernels"))
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique")
# host tensors on any device: vLLM's upper bounds, and what is about to be sent
ON_HOST = {("verify.py", "numpy"), ("device_drafts.py", "numpy")}


class Detector(TorchFunctionMode):
    """Notes every call by our code that would wait for the device if the tensor were on one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str, int]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or (name == "to" and "cpu" in map(str, args)):
            frame = sys._getframe(1)
            path = frame.f_code.co_filename
            # what stands in for the GPU on this host is not on the GPU's path
            is_stand_in = "HostTreeAttention" in frame.f_code.co_qualname
            if path.startswith(OURS) and not is_stand_in:
                self.found.add((Path(path).name, name, frame.f_lineno))
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back_from_the_device(tmp_path: Path) -> None:
    requests = cases(8, VOCAB, seed=6, max_tokens=10, only=("temperature 1", "greedy", "logprobs", "top_p"))
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 8}, max_num_seqs=8) as ours:
        truth = run(ours.llm, requests, enabled=False)
        answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
        fuzz(ours, answers, 0, 0.9)
        with Detector() as detector:
            run(ours.llm, requests)
        assert ours.runner.stats.branches_committed > 0 and ours.runner.stats.accepted > 0
    assert {(file, name) for file, name, _ in detector.found} <= ON_HOST, sorted(detector.found)


def test_the_detector_notices_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OURS", (__file__,))
    with Detector() as detector:
        torch.ones(3).sum().item()
    assert [name for _, name, _ in detector.found] == ["item"]


def _calls(path: Path) -> Iterator[tuple[str, str]]:
    """(function, method called) for every method call in a file."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield function.name, node.func.attr


def test_only_the_named_event_is_waited_for() -> None:
    waits = {
        (path.name, function)
        for path in (PACKAGE / "worker" / "v2").glob("*.py")
        for function, method in _calls(path)
        if method in ("synchronize", "wait_stream")
    }
    # before the first request, where all may wait
    at_start = {("self_check.py", "part"), ("texts.py", "__init__")}
    # one stream for another
    on_the_device = {("lane.py", "sample")}
    assert waits - at_start - on_the_device == {("host.py", "tokens_of"), ("host.py", "wait")}


class Late:
    """An event that comes two steps late, and may not be waited for before."""

    steps = 0

    def __init__(self) -> None:
        self._due = Late.steps + 2

    def record(self, stream: Any) -> None:
        """It is known when it comes."""

    def query(self) -> bool:
        return Late.steps >= self._due

    def synchronize(self) -> None:
        assert self.query(), "a step waited for tokens that were not home"


@pytest.mark.parametrize("drafter", ["history", "ngram", "draft_model", "eagle", "rows by cost"])
def test_no_step_waits_for_tokens_that_are_not_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: None, drafter: str
) -> None:
    path = small_model(tmp_path, "llama", "float32")
    own: dict[str, Any] = {"drafters": [drafter], "max_draft_tokens": 4, "max_depth": 4}
    if drafter == "draft_model":
        model = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
        own |= {"drafters": [], "speculative_config": model}
    elif drafter == "eagle":
        # it has learned nothing, so what is accepted is looked up
        model = {**drafting_with("eagle", path, tmp_path / "head"), "num_speculative_tokens": 2}
        own |= {"drafters": ["ngram"], "speculative_config": model}
    elif drafter == "rows by cost":
        eager = adaptive_verification._assign_draft_token_budget
        monkeypatch.setattr(adaptive_verification, "_assign_draft_token_budget_compiled", eager)
        own |= {"drafters": ["ngram"], "shape": "chain"}
    repeated = Case("twice", "twice", [5, 6, 7] * 5, {"temperature": 0, "max_tokens": 24, "ignore_eos": True})
    with engine(path, "float32", is_ours=True, spec_rollout=own, max_num_seqs=4) as ours:
        runner = ours.runner
        given = by_cost(ours, 0.3) if drafter == "rows by cost" else [(0, 0)]
        truth = run(ours.llm, [repeated], enabled=False)[0].outputs[0].token_ids
        run(ours.llm, [repeated])
        runner.settle()
        stock = type(runner)._remember

        def remember(self: Any, *args: Any) -> None:
            Late.steps += 1
            stock(self, *args)
            self.tokens_ready = Late()

        monkeypatch.setattr(type(runner), "_remember", remember)
        runner.tokens_ready = Late()
        accepted = runner.stats.accepted
        assert run(ours.llm, [repeated])[0].outputs[0].token_ids == truth
        Late.steps += 2
        runner.settle()
        assert runner.stats.accepted > accepted
    assert given
