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

import vllm_specrollout
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.e2e.identity.fuzz import FuzzDrafter
from tests.v2.models import small_model

PACKAGE = Path(vllm_specrollout.__file__).parent
OURS = (str(PACKAGE / "worker" / "v2"), str(PACKAGE.parent / "kernels"))
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique")
# host tensors on any device: vLLM's upper bounds
ON_HOST = {("verify.py", "numpy")}


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
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, quality=0.9)])
        with Detector() as detector:
            run(ours.llm, requests)
        assert ours.runner.stats.branches_committed > 0
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
    at_start = {("self_check.py", "part")}
    assert waits - at_start == {("host.py", "tokens_of"), ("host.py", "wait")}
