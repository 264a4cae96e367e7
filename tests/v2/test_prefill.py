"""Hidden states of answers that the V2 runner computes once more, and what users notice of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine
from tests.e2e.test_prefill import ALL, HEAD, POLICY, farthest, marked, scheduler_of, token_ids, training
from tests.v2.test_identity import ENGINE
from vllm_specrollout.server.prefill import prefill

PROMPTS = ["12+34=", "7*8+5=", "99-45="]
OTHERS = ["15*4=", "88-19=", "31+58="]
STEP = 16


def ask(one: Engine, prompts: list[str] = PROMPTS) -> list[list[int]]:
    params = [SamplingParams(seed=i, temperature=t, max_tokens=20) for i, t in enumerate((0.0, 1.0, 1.0))]
    outputs = one.llm.generate(prompts, params, use_tqdm=False)
    one.llm.llm_engine.step()
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]


def test_rows_are_those_of_transformers_and_users_get_stocks_tokens(ahead: None, tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "drafters": ["history"],
        "max_draft_tokens": 6,
        "train": {"prefill_tokens": STEP},
        "speculative_config": {**HEAD, "num_speculative_tokens": 3},
    }
    policy = str(POLICY / "checkpoint")
    with engine(policy, "float32", is_ours=False, **ENGINE) as stock:
        truth = ask(stock)
    with engine(policy, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours, training(tmp_path, ours) as one:
        core = ours.llm.llm_engine
        first = ask(ours)
        done = prefill(ours.llm, one.address, ALL)
        # a turn that a request ends, over answers of which no trainer has the rows yet
        ask(ours, OTHERS)
        names = marked(ours, one)
        core.step()
        core.add_request("user", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))
        ends: dict[str, Any] = {}
        while core.has_unfinished_requests():
            ends |= {out.request_id: out for out in core.step() if out.finished}
        assert not scheduler_of(ours).marked
        second = ask(ours)
        found = one.close()
        assert ours.runner.stats.accepted > 0
    assert first == second == truth
    assert "abort" in {ends[name].outputs[0].finish_reason for name in names}
    user = [*ends["user"].prompt_token_ids, *ends["user"].outputs[0].token_ids]
    assert user == truth[0][: len(user)]
    assert done["asked"] == done["computed"] == sum(map(len, truth))
    assert all(whole in token_ids(found) for whole in truth) and any(len(rows) > STEP for rows in found)
    assert max(farthest(rows, has_layers=True) for rows in found) < 1e-4
