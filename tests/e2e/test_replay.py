"""A recorded run yields the tokens of an unrecorded one, and can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import engine, model
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay.simulate import replay
from vllm_specrollout.report.walk import walk


def test_a_recorded_run_yields_the_same_tokens_and_replays_in_as_many_steps(tmp_path: Path) -> None:
    path = model(tmp_path, "qwen3", "float32")
    record = tmp_path / "trace.jsonl.gz"
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 6, 7, 5 + i, 6]} for i in range(6)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i, max_tokens=30, ignore_eos=True) for i in range(6)
    ]
    answers = []
    for extra in ({}, {"record": str(record)}):
        with engine(path, "float32", is_ours=True, spec_rollout=extra, max_num_seqs=3) as ours:
            outputs = ours.llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            assert ours.runner.stats.accepted > 0
            steps, stats = ours.runner.stats.steps, ours.runner.stats
    assert answers[0] == answers[1]
    trace = read_trace(record)
    assert not trace.is_cut and len(trace.steps) == steps and trace.header.max_num_seqs == 3
    recorded = [trace.ends[request].token_ids for request in range(6)]
    assert sorted(answer[:30] for answer in recorded) == sorted(answers[0])
    # and the walk that a page is drawn from is the engine's own
    table = walk(trace)
    assert len(table.step) == stats.request_steps and table.accepted.sum() == stats.accepted
    assert table.nodes.sum() == stats.drafted == sum(sum(step.sources) for step in trace.steps)
    assert [table.reasons[why] for why in table.step_why[1:]].count("fixed") > 0
    result = replay(trace, FixedBudget(trace.header.max_draft_tokens, trace.header.max_depth))
    assert result.steps == pytest.approx(steps, abs=2)
    assert result.accepted > 0
