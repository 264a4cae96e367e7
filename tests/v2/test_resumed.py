"""The V2 runner goes on with an interrupted answer by its position alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.e2e.identity.test_resumed import go_on
from tests.v2.models import small_model as model

ONLY = ("temperature 1", "greedy", "frequency penalty", "min_tokens", "bad words", "top_p")


def test_answers_cut_anywhere_go_on_as_they_would_have(tmp_path: Path, ahead: None) -> None:
    path = model(tmp_path, "qwen3", "float32")
    requests = cases(len(ONLY), VOCAB, seed=11, max_tokens=6, only=ONLY)
    drafts = {"max_draft_tokens": 6, "max_depth": 6, "shape": "chain"}
    with engine(path, "float32", is_ours=True, spec_rollout=drafts, max_num_seqs=16, max_model_len=320) as ours:
        whole = run(ours.llm, requests, enabled=False)
        wanted = [list(one.outputs[0].token_ids) for one in whole]
        assert go_on(ours.llm, requests, whole, 1) == wanted
