"""A rollout on the V2 runner is told to its last token."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model


def test_the_story_of_every_request_reaches_its_last_token(tmp_path: Path) -> None:
    cases = [Case("one", str(i), list(range(5 + i, 25 + i)), {"max_tokens": 20 + i, "seed": i}) for i in range(3)]
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, max_num_seqs=4) as ours:
        run(ours.llm, cases)
        ours.llm.collective_rpc("spec_rollout_explain", kwargs={"keep": 8})
        run(ours.llm, cases)
        (told,) = ours.llm.collective_rpc("spec_rollout_explained")
        ours.llm.collective_rpc("spec_rollout_explain", kwargs={"keep": 0})
        assert ours.llm.collective_rpc("spec_rollout_explained") == [[]]
    assert len(told) == 3
    ends = []
    for entry in told:
        stretches = entry["stretches"]
        assert stretches[0]["first"] == 1
        assert all(a["end"] == b["first"] for a, b in zip(stretches, stretches[1:], strict=False))
        steps = sum(sum(one["reasons"].values()) for one in stretches)
        assert stretches[-1]["end"] - 1 <= steps + sum(one["accepted"] for one in stretches)
        ends.append(stretches[-1]["end"])
    assert sorted(ends) == [20, 21, 22]
    assert "fixed" in {reason for entry in told for one in entry["stretches"] for reason in one["reasons"]}
