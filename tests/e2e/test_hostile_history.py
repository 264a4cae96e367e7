"""An engine whose history's directory is full of what cannot be used: it serves, and says so once."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.unit.history.poisoned import poison
from vllm_specrollout.types import Answer, FinishReason

VOCAB = 400
ROOM = {"max_model_len": 128, "max_num_seqs": 8, "block_size": 32}
FEATURES = ("greedy", "temperature 1", "top_k and top_p", "stop tokens", "n 3")
TOKENS = np.arange(9, dtype=np.int32)
# what no model that is served here could answer
ELSEWHERE = Answer("good", "first", TOKENS, TOKENS + (1 << 20), FinishReason.FINISHED, 0)


def _tokens(outputs: list) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def test_an_engine_over_a_poisoned_directory_answers_as_stock_and_keeps_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = tmp_path / "history", model(tmp_path, "llama", "float32")
    folder.mkdir()
    # the good file is another model's here
    left_out = poison(folder, ELSEWHERE) + 1
    before = {entry: entry.lstat() for entry in folder.iterdir()}
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
    requests = [Case("the first", "first", [9, 40, 41], greedy)] + cases(5, VOCAB, seed=3, max_tokens=20, only=FEATURES)
    with engine(path, "float32", is_ours=False, **ROOM) as stock:
        truth = _tokens(run(stock.llm, requests))
    settings = {"drafters": ["history"], "history": {"dir": str(folder)}}
    # at its source: an engine's start configures anew where vLLM's messages go
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("vllm.specrollout"), "filters", [lambda record: not logged.append(record)])
    for start in range(2):
        logged.clear()
        with (
            caplog.at_level(logging.WARNING, logger="vllm.specrollout"),
            engine(path, "float32", is_ours=True, spec_rollout=settings, **ROOM) as ours,
        ):
            (found,) = ours.llm.collective_rpc("spec_rollout_history")
            # the second start finds what the first has left
            assert (found["store"]["answers"] > 0) == (start > 0)
            for _ in range(2):
                assert _tokens(run(ours.llm, requests)) == truth
            (kept,) = ours.llm.collective_rpc("spec_rollout_history")
            assert kept["store"]["answers"] > found["store"]["answers"] and kept["store"]["write_errors"] == 0
            said = [record for record in logged if Path(record.pathname).parent.name == "history"]
            assert len(said) == 1 and f"{left_out - 1} more" in said[0].getMessage()
            assert ours.runner.stats.accepted > 0
    own = {entry.name for entry in folder.iterdir() if entry not in before}
    # beside it, and beside what it could read, lie SQLite's own files while it runs
    assert {name for name in own if name.endswith(".history")} == {"answers-0008.history"}
    assert all(entry.lstat()[:7] == known[:7] for entry, known in before.items())
