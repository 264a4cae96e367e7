"""An interrupted answer goes on, under another name, with the very tokens that it would have had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM

from tests.e2e.identity.cases import Case, cases, features
from tests.e2e.identity.check import VOCAB, Accepted
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.e2e.identity.fuzz import FuzzDrafter
from vllm_specrollout import resumed
from vllm_specrollout.errors import ConfigError

REFUSED = ("stop strings", "stop strings kept", "prompt logprobs", "n 3", "regex", "choice", "json", "chosen logprobs")
ALLOWED = tuple(name for name in features(VOCAB) if name not in REFUSED)


def go_on(llm: LLM, requests: list[Case], whole: list[Any], seed: int, **options: Any) -> list[list[int]]:
    """Each request cut anywhere before its end, and the rest asked for; returns the rests put behind the cuts."""
    rng = random.Random(seed)
    cuts = [list(o.outputs[0].token_ids[: rng.randrange(len(o.outputs[0].token_ids))]) for o in whole]
    asked = [resumed(case.sampling(**options), case.prompt, cut) for case, cut in zip(requests, cuts, strict=True)]
    rest = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked], [params for _, params in asked], use_tqdm=False
    )
    for one, cut, output in zip(whole, cuts, rest, strict=True):
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
            one.outputs[0].finish_reason,
            one.outputs[0].stop_reason,
        )
        if one.outputs[0].logprobs is not None:
            assert len(output.outputs[0].logprobs) == len(one.outputs[0].token_ids) - len(cut)
    return [[*cut, *output.outputs[0].token_ids] for cut, output in zip(cuts, rest, strict=True)]


def test_answers_cut_anywhere_go_on_as_stock_would_have(models: Path) -> None:
    path = model(models, "llama", "float32")
    requests = cases(len(ALLOWED), VOCAB, seed=31, max_tokens=18, only=ALLOWED)
    with engine(path, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    wanted = [list(one.outputs[0].token_ids) for one in truth]
    with engine(path, "float32", is_ours=True) as ours:
        for number, options in enumerate(({}, {"enabled": False})):
            assert go_on(ours.llm, requests, truth, number, **options) == wanted
        assert ours.runner.stats.accepted > 0
        plain = [n for n, case in enumerate(requests) if case.name == "temperature 1"]
        longest = max(plain, key=lambda n: len(wanted[n]))
        assert len(wanted[longest]) > 3
        _refuses(ours.llm, requests[longest], wanted[longest])


def test_a_resumed_request_may_be_preempted_and_prefilled_in_pieces(models: Path) -> None:
    path = model(models, "llama", "float32")
    only = ("temperature 1", "all penalties, greedy", "frequency penalty", "min_tokens", "bad words")
    requests = cases(10, VOCAB, seed=33, max_tokens=50, only=only)
    with engine(path, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    wanted = [list(one.outputs[0].token_ids) for one in truth]
    tight = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 14, "block_size": 32, "max_model_len": 400}
    with engine(path, "float32", is_ours=True, **tight) as ours:
        scheduler = ours.llm.llm_engine.engine_core.engine_core.scheduler
        preempted: list[str] = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *args, **kwargs: (
            preempted.append(request.request_id),
            original(request, *args, **kwargs),
        )
        answers = {case.problem_id: tokens for case, tokens in zip(requests, wanted, strict=True)}
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=33)])
        accepted = Accepted(ours)
        assert go_on(ours.llm, requests, truth, 5) == wanted
        ours.runner.settle()
        assert preempted and accepted.accepted.total() > 20


def _refuses(llm: LLM, case: Case, answer: list[int]) -> None:
    """A prompt that vLLM cuts, or that it may have cut unseen; what nobody cuts goes on, as verl asks for it.

    Args:
        answer: stock's, of which the rest is asked for.
    """
    cut = answer[: len(answer) // 2]
    prompt, params = resumed(case.sampling(), case.prompt, cut)
    lengths = f"{len(case.prompt)} tokens of prompt and {len(cut)} of answer"
    short = params.clone()
    short.extra_args = {"spec_rollout": {"resume": {"prompt_tokens": len(case.prompt)}}}

    def ask(params: Any, **kwargs: Any) -> list[int]:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], [params], use_tqdm=False, **kwargs)
        return [*cut, *output.outputs[0].token_ids]

    def hand_over(**kwargs: Any) -> list[int]:
        llm.llm_engine.add_request("raw", {"prompt_token_ids": list(prompt)}, short, **kwargs)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                found = list(output.outputs[0].token_ids)
        return [*cut, *found]

    for kept in (len(prompt), len(prompt) - 1, len(case.prompt), 1):
        options: dict[str, Any] = {"tokenization_kwargs": {"truncate_prompt_tokens": kept}}
        if kept == len(prompt):
            assert ask(params, **options) == hand_over(**options) == hand_over() == answer
            continue
        with pytest.raises(ConfigError, match=f"{lengths}, and {kept} came"):
            ask(params, **options)
        with pytest.raises(ConfigError, match="`resume.answer_tokens` is not given"):
            hand_over(**options)
    with pytest.raises(ConfigError, match="`resume.answer_tokens` is not given"):
        ask(short)
    assert not llm.llm_engine.has_unfinished_requests()
