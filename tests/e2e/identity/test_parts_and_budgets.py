"""What vLLM keeps of a request beyond its tokens: sessions that get more of their prompt, and thinking budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.e2e.identity.cases import BEGINS, ENDS, THINKING, Case
from tests.e2e.identity.check import VOCAB, Accepted
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.identity.fuzz import FuzzDrafter
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord

# of a random model: every eighth token ends a part
STOPS = list(range(5, VOCAB, 8))
PARTS = 3


def budgets() -> list[Case]:
    """Requests that think, some of them on a budget, which end at different times: their rows move."""
    rng, out = np.random.default_rng(31), []
    for i in range(14):
        params: dict[str, Any] = {"max_tokens": int(rng.integers(8, 50)), "ignore_eos": True, "seed": i}
        if i % 3 == 0:
            params |= {"thinking_token_budget": int(rng.integers(0, 9)), "max_tokens": 14 + i}
        if i % 5 == 4:
            params |= {"temperature": 0.0}
        out.append(Case("on a budget" if i % 3 == 0 else "thinks", str(i), [*rng.integers(5, 99, 9), BEGINS], params))
    return [Case(c.name, c.problem_id, [int(token) for token in c.prompt], c.params) for c in out]


@dataclass
class Session:
    """Parts that are fed one after the other, and what was answered to each."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[list[int]] = field(default_factory=lambda: [[]])
    ends: list[str] = field(default_factory=list)

    def part(self, llm: LLM, number: int, *, is_last: bool = False) -> EngineCoreRequest:
        # vLLM extends the very lists
        prompt, params = {"prompt_token_ids": [0] if is_last else list(self.prompts[number])}, self.params[number]
        made = llm.llm_engine.input_processor.process_inputs(
            self.name, prompt, params.clone(), ("generate",), resumable=not is_last
        )
        made.external_req_id = self.name
        return made


def sessions(tag: str) -> list[Session]:
    """Greedy, seeded and unlike parts; a first part of one token, as realtime clients send."""
    rng, out = np.random.default_rng(32), []
    for i in range(6):
        prompts = [[int(token) for token in rng.integers(5, VOCAB, 5 + i)] for _ in range(PARTS)]
        lengths = (1, 40, 40) if i % 3 == 2 else (30, 30, 30)
        greedy = {"temperature": 0.0} if i % 2 else {}
        params = [
            SamplingParams(max_tokens=most, seed=i, ignore_eos=True, stop_token_ids=STOPS if i < 4 else None, **greedy)
            for most in lengths
        ]
        out.append(Session(f"{tag}-{i}", prompts, params))
    return out


def answer(llm: LLM, asked: Sequence[Session], *, at_once: bool = False) -> list[Any]:
    """Feed each session its parts, all at once or each when the one before has ended."""
    core, by_name = llm.llm_engine.engine_core, {session.name: session for session in asked}
    for session in asked:
        for number in range(PARTS if at_once else 1):
            core.add_request(session.part(llm, number))
    left = PARTS * len(asked)
    for _ in range(2000):
        for out in core.get_output().outputs:
            session = by_name[out.request_id]
            session.answers[-1] += out.new_token_ids
            if out.finish_reason is None:
                continue
            session.ends.append(str(out.finish_reason))
            session.answers.append([])
            left -= 1
            number = len(session.ends)
            if number == PARTS or not at_once:
                core.add_request(session.part(llm, min(number, PARTS - 1), is_last=number == PARTS))
        if not left:
            core.get_output()
            break
    assert not left, "a part has no end"
    return [(session.answers, session.ends) for session in asked]


class PartByPart(Listener):
    """Accepted nodes by session and number of its part."""

    def __init__(self, ours: Engine, asked: Sequence[Session]) -> None:
        self.accepted: Counter[tuple[str, int]] = Counter()
        self._asked = {session.name: session for session in asked}
        ours.runner.spec_rollout.listeners.append(self)

    def stepped(self, record: StepRecord) -> None:
        for name, count in zip(record.trees.request_ids, record.result.num_accepted.tolist(), strict=True):
            if name in self._asked:
                self.accepted[name, len(self._asked[name].ends)] += count


@dataclass(frozen=True)
class Stock:
    """What stock vLLM answers."""

    budgets: list[Any]
    sessions: list[Any]


@pytest.fixture(scope="module")
def stock(models: Path) -> Stock:
    with engine(model(models, "qwen3", "float32"), "float32", is_ours=False, reasoning_config=THINKING) as stock:
        # one at a time: in a batch, vLLM 0.32.0 hands budgets on to requests that have none
        alone = [run(stock.llm, [case])[0] for case in budgets()]
        return Stock(alone, answer(stock.llm, sessions("stock")))


@pytest.fixture(scope="module")
def ours(models: Path, stock: Stock) -> Iterator[Engine]:
    drafters = {"drafters": ["history", "ngram"]}
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout=drafters, reasoning_config=THINKING) as made:
        yield made


def test_every_part_of_a_session_is_stocks_and_drafted_for(ours: Engine, stock: Stock) -> None:
    ends = Counter(end for _, ends in stock.sessions for end in ends)
    assert len(ends) == 2, "parts end by a token, and by their length"
    for number, at_once in enumerate((False, False, True)):
        asked = sessions(f"ours-{number}")
        watched = PartByPart(ours, asked)
        assert answer(ours.llm, asked, at_once=at_once) == stock.sessions
        if number:  # the history knows whole parts by now, their ends too
            for part in range(PARTS):
                # the limit of a first part of one token would leave later ones without drafts
                counted = [session.name for session in asked if not part or session.params[0].max_tokens == 1]
                assert sum(watched.accepted[name, part] for name in counted) > 5, watched.accepted
    run(ours.llm, budgets()[1:2])  # sessions are dropped when the next step is scheduled
    assert len(ours.runner.book._entries) <= 1


def test_budgets_end_the_thinking_beside_drafts_and_nobody_elses(ours: Engine, stock: Stock) -> None:
    requests, speculator = budgets(), ours.runner.spec_rollout
    cut = [out.outputs[0].token_ids for case, out in zip(requests, stock.budgets, strict=True) if "b" in case.name]
    assert all(ENDS in tokens for tokens in cut)
    own = list(speculator.drafters)
    truths = {
        case.problem_id: list(out.outputs[0].token_ids) for case, out in zip(requests, stock.budgets, strict=True)
    }
    try:
        speculator.replace_drafters([FuzzDrafter(truths, VOCAB, seed=33)])
        accepted = Accepted(ours)
        answers = run(ours.llm, requests)
    finally:
        speculator.replace_drafters(own)
    report = compare(requests, stock.budgets, answers, "float32")
    assert not report.failures, report.failures
    drafted = {case.problem_id: accepted.accepted[case.problem_id] for case in requests if case.name == "thinks"}
    assert sum(drafted.values()) > 20 and sum(accepted.drafted[name] for name in drafted) == accepted.drafted.total()
