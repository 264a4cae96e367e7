"""An engine that begins without a head gets one while it runs: from then on its drafts are accepted, tokens stock's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("speculators")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from tests.e2e.identity.engines import Engine, engine
from vllm_specrollout.server import learning as loop
from vllm_specrollout.server.asking import ask, check_has_model
from vllm_specrollout.server.learning import learn
from vllm_specrollout.server.reports import read_drafters
from vllm_specrollout.training import parent, spot
from vllm_specrollout.training.parent import numbers_in

OWN = {"drafters": [], "budget": "fixed", "max_draft_tokens": 4}


def prompts(tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    chosen = problems(count, seed=3, split="train")
    return [{"prompt_token_ids": tokenizer.encode(prompt_text(one.prompt), add_special_tokens=False)} for one in chosen]


def params(count: int, first: int = 0) -> list[SamplingParams]:
    return [SamplingParams(temperature=(i % 3) / 2, max_tokens=100, seed=first + i) for i in range(count)]


def accepted(ours: Engine) -> int:
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
    return stats["accepted"]


def amid(ours: Engine, asked: list[Any], own: list[SamplingParams], between: Any) -> list[list[int]]:
    """The requests' tokens; something happens between all steps."""
    core, found = ours.llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(asked, own, strict=True)):
        core.add_request(str(i), prompt, one)
    while core.has_unfinished_requests():
        found |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
        between()
    return [found[str(i)] for i in range(len(asked))]


def test_a_first_head_is_published_amid_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no head is worth it before the requests run, and then one that a few seconds make
    monkeypatch.setattr(spot, "WORTH", 99.0)
    duty = parent.Duty
    monkeypatch.setattr(parent, "Duty", lambda **given: duty(**given, judge_rows=2048))
    train = {"mode": "auto", "dir": str(tmp_path), "devices": ["cpu:0"]}
    with engine(str(CHECKPOINT), "float32", is_ours=False) as stock:
        asked = prompts(stock.llm.get_tokenizer(), 96)
        truth = [
            list(out.outputs[0].token_ids) for out in stock.llm.generate(asked[:24], params(24, 500), use_tqdm=False)
        ]
    with engine(str(CHECKPOINT), "float32", is_ours=True, spec_rollout={**OWN, "train": train}) as ours:
        ours.llm.generate(asked, params(96), use_tqdm=False)
        assert accepted(ours) == 0, "an untrained head rests"
        # a busy host's trainer takes long to load
        while (told := learn(ours.llm, 10.0))["trainer_rows"] <= 2000:
            pass
        learning = ours.llm.spec_rollout_learning
        assert told["number"] == 0
        while learning._trainer.hear().own <= 0.15:
            learn(ours.llm, 1.0)
        assert numbers_in(tmp_path) == [0]
        monkeypatch.setattr(spot, "WORTH", 0.02)
        steps, before = [0], list[int]()

        def between() -> None:
            steps[0] += 1
            while steps[0] == 8 and not before:
                if numbers_in(tmp_path)[-1] > 0:
                    before.append(accepted(ours))  # of the steps until now
                ask(ours.llm, learning.beat(True), check_has_model)
                time.sleep(0.02)

        first = amid(ours, asked[:24], params(24, 500), between)
        assert before == [0], "nothing was accepted before the publication, which came amid the requests"
        after = accepted(ours)
        assert after > 0
        second = [
            list(out.outputs[0].token_ids) for out in ours.llm.generate(asked[:24], params(24, 500), use_tqdm=False)
        ]
        (health,) = read_drafters(ours.llm)["engines"]
        assert health["learning"]["number"] >= 1 and health["learning"]["trainer_rows"] > 2000
        learning.close()
    assert first == truth and second == truth
    assert json.loads((tmp_path / "1" / "config.json").read_text()) == json.loads(
        (tmp_path / "0" / "config.json").read_text()
    )


def test_learning_is_refused_where_no_head_learns(tmp_path: Path) -> None:
    from vllm_specrollout.config import SpecRolloutConfig, parse
    from vllm_specrollout.errors import ConfigError, UnsupportedError

    given = parse({"train": "auto", "speculative_config": {"method": "draft_model", "model": "small"}})
    assert isinstance(given, SpecRolloutConfig) and given.train.mode == "auto"
    with pytest.raises(ConfigError, match="method 'draft_model'"):
        loop.prepared(given, str(CHECKPOINT))
    with pytest.raises(UnsupportedError, match="no head can be made for"):
        loop.prepared(parse({"train": {"mode": "auto", "dir": str(tmp_path / "heads")}}), str(tmp_path))
