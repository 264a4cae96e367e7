"""The guide's drafter, as it stands on its page: found by every process of an engine, and stock's tokens with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import OURS, engine, model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-drafter.md"
TWICE = {"drafters": [{"name": "my_drafter:Bigram", "levels": 6}]}


def cases() -> list[Case]:
    asked = {"max_tokens": 48, "ignore_eos": True}
    return [Case("one", str(i), [5 + i, 6, 7, 8 + i], {**asked, "seed": i, "temperature": i % 2}) for i in range(6)]


def test_the_guides_drafter_drafts_in_a_spawned_engine_core_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import LLM

    (code,) = re.findall(r"```python\n(.*?class Bigram.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    (tmp_path / "my_drafter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path, asked = model(tmp_path, "qwen3", "float32"), cases()
    with engine(path, "float32", is_ours=False) as stock:
        wanted = run(stock.llm, asked)
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"), ("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")):
        monkeypatch.setenv(name, value)
    own = {"additional_config": {"spec_rollout": {**OURS, **TWICE}}}
    ours = LLM(path, dtype="float32", max_model_len=512, max_num_seqs=32, enforce_eager=True, **own)
    try:
        # the second time it has seen the answers
        answers = [run(ours, asked) for _ in range(2)]
        (stats,) = ours.collective_rpc("spec_rollout_stats")
    finally:
        ours.llm_engine.engine_core.shutdown()
    for got in answers:
        report = compare(asked, wanted, got, "float32")
        assert report.requests == 6 and not report.failures, report.failures
    assert stats["accepted"] > 0
