"""What trainers do between steps, in any order: abort and resubmit, new weights, resets. No token changes.

Requests are unmistakable by name, so what the history keeps is checked against what was asked, and under which weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file
from vllm import SamplingParams
from vllm_specrollout.bench.policy.random_model import make_random_model

from tests.e2e.identity.engines import Engine, engine
from vllm_specrollout import resumed
from vllm_specrollout.types import Answer

PROMPTS = {"a": [3, 87, 261, 308, 18, 4], "b": [3, 90, 120, 7, 4], "c": [5, 6, 7, 8]}
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6},
    {"temperature": 1.2, "top_k": 30, "min_tokens": 6},
)


@dataclass
class Part:
    """What one answer got under one set of weights."""

    policy: int
    before: list[int]
    tokens: list[int] = field(default_factory=list)


@dataclass
class Asked:
    """One answer, under the names that it had."""

    problem: str
    params: SamplingParams
    parts: list[Part]
    name: str = ""
    seen: int = 0  # tokens of the request that now runs
    is_done: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.parts[-1].before, *self.parts[-1].tokens]


class Trainer:
    """Drives one engine by a schedule drawn from a seed."""

    def __init__(self, ours: Engine, policies: list[dict[str, Any]], kept: list[Answer]) -> None:
        self.ours, self.policies, self.kept = ours, policies, kept
        self.engine = ours.llm.llm_engine
        self.policy, self.count = 0, 0
        # request -> its problem, the weights' version when it ended, its answer then
        self.ended: dict[str, tuple[str, int, list[int]]] = {}

    def push(self, policy: int) -> None:
        for name, weight in self.policies[policy].items():
            self.ours.runner.model.load_weights([(name, weight)])
        self.ours.llm.reset_prefix_cache()
        self.policy = policy

    def ask(self, one: Asked) -> None:
        prompt, params = resumed(one.params, PROMPTS[one.problem], one.tokens)
        self.count += 1
        one.name, one.seen = f"{one.problem}-{self.count}", 0
        if one.parts[-1].policy != self.policy:
            one.parts.append(Part(self.policy, one.tokens))
        self.engine.add_request(one.name, {"prompt_token_ids": prompt}, params)

    def end(self, one: Asked) -> None:
        # one that was aborted before its first step left nothing behind
        if one.seen:
            self.ended[one.name] = (one.problem, self.ours.runner.weights_version.number, one.tokens)

    def abort(self, some: list[Asked]) -> None:
        self.engine.abort_request([one.name for one in some])
        for one in some:
            self.end(one)

    def step(self, asked: list[Asked]) -> None:
        names = {one.name: one for one in asked}
        for output in self.engine.step():
            one = names[output.request_id]
            tokens = list(output.outputs[0].token_ids)
            one.parts[-1].tokens += tokens[one.seen :]
            one.seen = len(tokens)
            if output.finished:
                one.is_done = True
                self.end(one)

    def run(self, seed: int) -> list[Asked]:
        rng = random.Random(seed)
        asked = []
        for number in range(rng.randint(2, 5)):
            params = SamplingParams(seed=10 * seed + number, max_tokens=rng.randint(8, 20), **rng.choice(FEATURES))
            asked.append(Asked(rng.choice(list(PROMPTS)), params, [Part(self.policy, [])]))
            self.ask(asked[-1])
        while running := [one for one in asked if not one.is_done]:
            what = rng.choices(("step", "abort one", "new weights", "reset"), (6, 1, 1, 1))[0]
            if what == "step":
                self.step(asked)
            elif what == "abort one":
                self.abort(running[:1])
                self.ask(running[0])
            elif what == "new weights":
                # as verl does: all is aborted, and asked for again under the new ones
                self.abort(running)
                self.push(rng.randrange(2))
                for one in running:
                    self.ask(one)
            else:
                self.ours.llm.reset_prefix_cache()
        return asked

    def truth(self, all_asked: list[Asked]) -> list[tuple[Part, list[int]]]:
        """Each part again, whole and without drafts, under its weights."""
        checked = []
        for policy in range(2):
            self.push(policy)
            parts = [(one, part) for one in all_asked for part in one.parts if part.policy == policy and part.tokens]
            requests = []
            for one, part in parts:
                params = one.params.clone()
                params.extra_args = {"spec_rollout": {"enabled": False}}
                params.max_tokens = len(part.before) + len(part.tokens)
                params.min_tokens = min(params.min_tokens, params.max_tokens)
                requests.append(resumed(params, PROMPTS[one.problem], part.before))
            outputs = self.ours.llm.generate(
                [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests],
                use_tqdm=False,
            )  # fmt: skip
            checked += [(part, list(out.outputs[0].token_ids)) for (_, part), out in zip(parts, outputs, strict=True)]
        return checked


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    folders = [
        make_random_model(tmp_path / str(seed), arch="llama", size="1M", num_layers=2, dtype="float32", seed=seed)
        for seed in (7, 8)
    ]
    drafters = {"drafters": ["history", "ngram"], "max_draft_tokens": 12, "max_depth": 12}
    with engine(str(folders[0]), "float32", is_ours=True, spec_rollout=drafters, max_num_seqs=8) as ours:
        (history,) = (one for one in ours.runner.spec_rollout.drafters if one.name == "history")
        kept: list[Answer] = []
        append = history.store.append
        monkeypatch.setattr(history.store, "append", lambda answer: (kept.append(answer), append(answer))[1])
        yield Trainer(ours, [load_file(folder / "model.safetensors") for folder in folders], kept)


# the long form is 200 schedules, in parts that can run side by side
@pytest.mark.parametrize(
    "seeds",
    [range(10), *(pytest.param(range(i, i + 25), marks=pytest.mark.identity) for i in range(0, 200, 25))],
    ids=str,
)
def test_no_schedule_changes_a_token_or_misplaces_an_answer(trainer: Trainer, seeds: range) -> None:
    asked = [one for seed in seeds for one in trainer.run(seed)]
    assert any(len(one.parts) > 1 for one in asked)
    assert trainer.ours.runner.stats.accepted > 0
    ended = dict(trainer.ended)
    for part, tokens in trainer.truth(asked):
        assert part.tokens == tokens
    # the engine says how requests ended with its next step, and the last check made some
    places = {answer.request_id: answer for answer in trainer.kept}
    assert len(ended) > len(asked)
    for name, (_, version, tokens) in ended.items():
        if tokens:
            answer = places[name]
            assert answer.token_ids.tolist() == tokens
            assert answer.weights_version == version
    problems = {(problem, places[name].problem_id) for name, (problem, _, tokens) in ended.items() if tokens}
    assert len(problems) == len(PROMPTS) == len({found for _, found in problems})
