"""The V2 runner goes on with an interrupted answer by its position alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import LLM

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.e2e.identity.test_resumed import go_on
from tests.v2.models import small_model as model
from vllm_specrollout import resumed

ONLY = ("temperature 1", "greedy", "frequency penalty", "min_tokens", "bad words", "top_p")


def interrupt(llm: LLM, requests: list[Case], seed: int) -> tuple[list[list[int]], list[int]]:
    """All answers, each aborted while it runs and asked for again; and how many tokens stood there when it was."""
    rng, running = random.Random(seed), llm.llm_engine
    answers: list[list[int]] = [[] for _ in requests]
    # a request's name -> its case, and the tokens that stood there when it was asked for
    asked: dict[str, tuple[int, int]] = {}
    cuts: list[int] = []

    def ask(number: int) -> None:
        case = requests[number]
        prompt, params = resumed(case.sampling(max_draft_tokens=1 + number % 2), case.prompt, answers[number])
        name = f"{number}-{len(answers[number])}"
        asked[name] = (number, len(answers[number]))
        running.add_request(name, {"prompt_token_ids": prompt}, params)

    for number in range(len(requests)):
        ask(number)
    # how many more times each of them is to be interrupted
    left = [2] * len(requests)
    while running.has_unfinished_requests():
        for output in running.step():
            number, begun = asked[output.request_id]
            answers[number][begun:] = output.outputs[0].token_ids
            if output.finished:
                del asked[output.request_id]
        for name, (number, begun) in list(asked.items()):
            if left[number] and len(answers[number]) > begun and rng.random() < 0.8:
                running.abort_request([name])
                del asked[name]
                left[number] -= 1
                cuts.append(len(answers[number]))
                ask(number)
    return answers, cuts


def test_answers_cut_anywhere_go_on_as_they_would_have(tmp_path: Path, ahead: None) -> None:
    path = model(tmp_path, "qwen3", "float32")
    requests = cases(len(ONLY), VOCAB, seed=11, max_tokens=6, only=ONLY)
    drafts = {"drafters": ["history", "ngram"], "max_draft_tokens": 6, "max_depth": 6, "shape": "chain"}
    with engine(path, "float32", is_ours=True, spec_rollout=drafts, max_num_seqs=16, max_model_len=320) as ours:
        whole = run(ours.llm, requests, enabled=False)
        wanted = [list(one.outputs[0].token_ids) for one in whole]
        assert go_on(ours.llm, requests, whole, 1) == wanted
        # not after they ended, but amid a step that runs ahead
        before = ours.runner.stats.accepted
        answers, cuts = interrupt(ours.llm, requests, seed=2)
        assert answers == wanted
        assert len(cuts) >= len(requests)
        ours.llm.collective_rpc("spec_rollout_stats")
        assert ours.runner.stats.accepted > before
