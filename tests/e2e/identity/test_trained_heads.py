"""From answers to a head by one command, and that the head drafts in vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("speculators")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import check_identity
from tests.e2e.identity.engines import engine
from vllm_specrollout.cli.train_head import train_head


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_head_trained_by_the_command_drafts_and_the_tokens_are_stocks(tmp_path: Path, capsys, method: str) -> None:
    """The project's policy: a random model's answers are not to be learned from a few of them."""
    target, head, file = str(CHECKPOINT), tmp_path / "head", tmp_path / "answers.jsonl"
    chosen = problems(160, seed=3, split="train")
    params = [SamplingParams(temperature=1.0, max_tokens=120, seed=i) for i in range(2 * len(chosen))]
    with engine(target, "float32", is_ours=True) as ours:
        tokenizer = ours.llm.get_tokenizer()
        encoded = [tokenizer.encode(prompt_text(one.prompt), add_special_tokens=False) for one in chosen]
        prompts = [{"prompt_token_ids": ids} for ids in encoded] * 2
        outputs = ours.llm.generate(prompts, params, use_tqdm=False)
    with file.open("w") as rollout:
        for out in outputs:
            line = {"prompt_token_ids": out.prompt_token_ids, "token_ids": list(out.outputs[0].token_ids)}
            rollout.write(json.dumps(line) + "\n")
    train_head(target=CHECKPOINT, answers=file, out=head, method=method, levels=3, json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["accepted"] > told["before"] + 0.5

    given = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 3, "speculative_config": given}
    check_identity(target, "float32", cases(12, 400, seed=33, max_tokens=24), num_drafters=0, spec_rollout=own)
    with engine(target, "float32", is_ours=True, spec_rollout={**own, "shape": "chain"}) as ours:
        ours.llm.generate(prompts[:40], params[:40], use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    # the engine drafts as well as the command said of answers that it was not trained on
    assert stats["accepted"] / stats["request_steps"] > told["accepted"] - 0.4
