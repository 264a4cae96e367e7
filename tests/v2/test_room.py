"""Room for drafts never starves a prompt: whoever still computes one keeps half of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model

BUDGET = 64


def test_a_long_prompt_beside_drafting_requests_keeps_half_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_specrollout.worker.v2.scheduler import SchedulerMixinV2

    pieces: list[tuple[int, int]] = []  # tokens of the long prompt's piece, and of all the room beside it
    original = SchedulerMixinV2.schedule

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        left = {r.request_id: r.num_prompt_tokens - r.num_computed_tokens for r in self.running}
        output = original(self, *args, **kwargs)
        for request_id, rows in output.num_scheduled_tokens.items():
            if left.get(request_id, 0) > BUDGET:
                pieces.append((rows, sum(map(len, output.scheduled_spec_decode_tokens.values()))))
        return output

    monkeypatch.setattr(SchedulerMixinV2, "schedule", noting)
    short = [Case("short", str(i), list(range(5 + i, 10 + i)), {"max_tokens": 12, "seed": i}) for i in range(3)]
    long = Case("long", "3", list(range(5, 305)), {"max_tokens": 1, "seed": 3})
    path = small_model(tmp_path, "qwen3", "float32")
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 320, "max_num_batched_tokens": BUDGET}
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 24}, **settings) as ours:
        run(ours.llm, [*short, long])
    assert any(room for _, room in pieces), "nobody had room beside the prompt"
    assert min(rows for rows, _ in pieces) >= BUDGET // 2, pieces
