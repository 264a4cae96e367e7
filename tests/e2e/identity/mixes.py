"""Requests of random parameters at random times, and what became of each: every field of its answer, or its error.

A request is drawn from a seed and its number alone, so a fault repeats by these two.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from vllm import LLM
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.engines import Engine
from tests.e2e.identity.fields import UNLISTED, differences
from tests.e2e.identity.fuzz import FuzzDrafter
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import RequestView, StepRecord

BEGIN, END = "Step", "OK"
"""Words of the policy's tokenizer between which it is taken to think."""
BEGIN_ID, END_ID = 270, 277


@ReasoningParserManager.register_module("words")
class WordsParser(BaseThinkingReasoningParser):
    """Grammars hold from `END` on: in an answer, or from its start where the prompt ends so."""

    start_token, end_token = BEGIN, END


ENGINE: dict[str, Any] = {
    "scheduling_policy": "priority",
    "max_logprobs": -1,
    "block_size": 32,
    "reasoning_config": {"reasoning_start_str": BEGIN, "reasoning_end_str": END},
    "structured_outputs_config": {"reasoning_parser": "words"},
}
"""Arguments of stock and ours."""
ROOMY = {"max_num_batched_tokens": 8192}
"""Of stock: on CPU it cannot prefill the prompt of a seeded request in chunks."""
BY_HISTORY = ("num_cached_tokens", "num_cache_creation_tokens", "metrics")
"""Fields of an answer that tell what ran before it, and when."""
BUDGET = "thinking_token_budget"
NEVER_DRAFTED = frozenset({BUDGET})
"""Parameters whose requests have no drafts: there, others of the batch must have had some."""
FEW = 2
"""So many requests of a feature may happen to have no drafts: another seed than the usual one draws rare features."""
SEVERAL = 4
"""Tokens of an answer that may have no draft: on the V2 runner one comes two steps behind the first token."""
MOST_STEPS = 50_000
MOST_LEVEL = 0.01
"""Share of requests with a rank that rounding may have changed."""

Draw = Callable[[np.random.Generator], Any]


def _one_of(*values: Any) -> Draw:
    return lambda rng: values[int(rng.integers(len(values)))]


def _some_of(*values: Any) -> Draw:
    return lambda rng: [values[i] for i in rng.choice(len(values), int(rng.integers(1, 4)), replace=False)]


def _tokens(most: int) -> Draw:
    return lambda rng: rng.choice(np.arange(5, 400), int(rng.integers(1, most + 1)), replace=False).tolist()


_WORDS = ("1", "2", " 3", "= ", "a", "Step", " is", " wrong", ".", " the answer", "12", "\n")
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[0-9]{3,9}( [+] [0-9]{1,4}){2,6}"},
    {"regex": "(ab|cd)*[xyz]"},
    {"choice": ["12 + 34", "12 + 35 = 47", "7"]},
    {"json": _SCHEMA},
    {"json_object": True},
    {"grammar": 'root ::= "SELECT " col (", " col)* " FROM t"\ncol ::= "a" | "b" | "c"'},
)
DRAWS: Mapping[str, Draw] = {
    "n": _one_of(2, 3, 5),
    "presence_penalty": _one_of(-2.0, -0.6, 0.4, 1.3, 2.0),
    "frequency_penalty": _one_of(-2.0, -0.6, 0.4, 1.3, 2.0),
    "repetition_penalty": _one_of(0.05, 0.8, 1.1, 2.0, 50.0),
    "temperature": _one_of(0.0, 0.0, 1e-6, 0.01, 0.3, 0.7, 0.9, 1.2, 1.5, 2.0),
    "top_p": _one_of(1e-9, 0.1, 0.6, 0.9, 0.999),
    "top_k": _one_of(-1, 0, 1, 2, 17, 399, 10**6),
    "min_p": _one_of(1e-6, 0.02, 0.3, 1.0),
    "seed": _one_of(0, 1, -2, 2**31, 2**32 + 1, 2**63 - 1, -(2**63), *range(100, 120)),
    "stop": _some_of(*_WORDS),
    "stop_token_ids": _tokens(30),
    "ignore_eos": _one_of(True),
    "max_tokens": lambda rng: int(rng.integers(1, 60)),
    "min_tokens": lambda rng: int(rng.integers(1, 20)),
    "logprobs": _one_of(0, 1, 5, 20, -1),
    "prompt_logprobs": _one_of(0, 1, 4, -1),
    "flat_logprobs": _one_of(True),
    "detokenize": _one_of(False),
    "skip_special_tokens": _one_of(False),
    "spaces_between_special_tokens": _one_of(False),
    "include_stop_str_in_output": _one_of(True),
    "output_kind": _one_of(*RequestOutputKind),
    "stream_interval": _one_of(1, 2, 7, 100),
    "structured_outputs": _one_of(*GRAMMARS),
    "logit_bias": lambda rng: {token: float(_one_of(-1e9, -3, 2, 5, 100)(rng)) for token in _tokens(4)(rng)},
    "allowed_token_ids": _tokens(120),
    "bad_words": _some_of(*_WORDS),
    # False beside `prompt_logprobs`: stock hands out memory that nobody wrote
    "skip_reading_prefix_cache": _one_of(True),
    BUDGET: _one_of(0, 1, 3, 9, -1),
    "repetition_detection": lambda rng: RepetitionDetectionParams(
        max_pattern_size=int(rng.integers(1, 5)), min_count=int(rng.integers(2, 5))
    ),
}
"""What a request's parameters are drawn from; each but three is left at its default most of the time."""
ALWAYS = ("temperature", "seed", "max_tokens")
WRONG: Mapping[str, Draw] = {
    "n": _one_of(0),
    "temperature": _one_of(-0.5, float("nan")),
    "top_p": _one_of(0.0, 1.5),
    "top_k": _one_of(-2),
    "min_p": _one_of(1.5),
    "presence_penalty": _one_of(2.5),
    "repetition_penalty": _one_of(0.0),
    "max_tokens": _one_of(0, 10**6),
    "min_tokens": _one_of(61),
    "logprobs": _one_of(-2),
    "logit_bias": _one_of({10**7: 1.0}),
    "allowed_token_ids": _one_of([], [10**7]),
    "stop": _one_of([""]),
    "structured_outputs": _one_of({"regex": "("}, {"choice": []}, {}),
    "stream_interval": _one_of(0),
}
"""Values that vLLM refuses: ours does so in the same words."""
LEFT_OUT: Mapping[str, str] = {
    "watermarking": "no test's engine has watermarks, for which nothing is drafted",
    "prompt_logprob_token_ids": "prompts alone",
    "prompt_logprob_start": "prompts alone",
    "logprob_token_ids": "stock gives others of the batch wrong logprobs beside it: cases.ALONE",
    "skip_clone": "vLLM's own",
    "output_text_buffer_length": "vLLM's own",
    "extra_args": "carries spec rollout's options",
    "routed_experts_prompt_start": "no model here has experts",
    "trace_decode_token_ids": "replaces sampling: nothing is drafted",
}
"""Parameters of vLLM's that no request here has, and why."""


@dataclass(frozen=True, kw_only=True)
class Mixed(Case):
    """A request, and when it comes."""

    # of the engine, in which it arrives
    step: int
    priority: int = 0
    salt: str = ""
    # steps after its arrival; None: never
    aborted_after: int | None = None

    @property
    def asked(self) -> dict[str, Any]:
        salt = {"cache_salt": self.salt} if self.salt else {}
        return {"prompt_token_ids": self.prompt, **salt}

    @property
    def features(self) -> set[str]:
        """What of it is not vLLM's default."""
        more = {"priority": self.priority, "cache_salt": self.salt}
        return {*self.params, *(name for name, value in more.items() if value)} - {"max_tokens"}


def drawn(seed: int, index: int, *, left_out: Sequence[str] = (), share: float = 0.12, most: int = 60) -> Mixed:
    """Request `index` of a seed.

    Args:
        left_out: names of parameters that it does not have.
        share: of requests that have one parameter.
        most: tokens of an answer.
    """
    rng = np.random.default_rng([seed, index])
    params = {
        name: draw(rng)
        for name, draw in DRAWS.items()
        if (name in ALWAYS or rng.random() < share) and name not in left_out
    }
    params["max_tokens"] = 1 + params["max_tokens"] * most // 60
    if rng.random() < 0.05:
        name = list(WRONG)[int(rng.integers(len(WRONG)))]
        params |= {} if name in left_out else {name: WRONG[name](rng)}
    if params["temperature"] == 0:
        params.pop("n", None)
    head = np.random.default_rng([seed, int(rng.integers(3))]).integers(5, 400, 70).tolist()
    prompt = rng.integers(5, 400, int(rng.choice([1, 3, 17, 31, 32, 33, 64, 90]))).tolist()
    if rng.random() < 0.3:
        prompt = head[: int(rng.choice([31, 32, 70]))] + prompt
    if "structured_outputs" in params:
        if rng.random() < 0.5:
            prompt.append(END_ID)
        else:
            params["logit_bias"] = {**params.get("logit_bias", {}), END_ID: 4.0}
    return Mixed(
        name=f"seed {seed}, request {index}",
        problem_id=str(index),
        prompt=prompt,
        params=params,
        step=int(index * 0.8 * rng.random()),
        priority=int(_one_of(-3, 0, 0, 0, 5)(rng)),
        salt=str(_one_of("", "", "", "", "a", "b")(rng)),
        aborted_after=int(rng.integers(0, 30)) if rng.random() < 0.05 else None,
    )


def thinking(seed: int, index: int) -> Mixed:
    """Like `drawn`; two in five have a thinking budget, and all are likely to think."""
    plain = drawn(seed, index, left_out=(BUDGET, "n"), most=24)
    rng = np.random.default_rng([seed, index, 1])
    begins = {"logit_bias": {BEGIN_ID: 3.0, END_ID: 2.0}}
    budget = {BUDGET: DRAWS[BUDGET](rng)} if rng.random() < 0.4 else {}
    params = {**plain.params, **begins, **budget}
    return dataclasses.replace(plain, name=f"thinking: {plain.name}", params=params, aborted_after=None)


class Drafts(Listener):
    """Draft tokens accepted by problem, and for whom others' were while they ran."""

    def __init__(self, runner: Any) -> None:
        self.accepted: Counter[str] = Counter()
        self.beside: set[str] = set()
        self._problem_of: dict[str, str] = {}
        self._live: set[str] = set()
        runner.spec_rollout.listeners.append(self)

    def admitted(self, view: RequestView) -> None:
        self._problem_of[view.request_id] = view.problem_id

    def stepped(self, record: StepRecord) -> None:
        counts = zip(record.trees.request_ids, record.result.num_accepted, strict=True)
        for request_id, accepted in counts:
            self.accepted[self._problem_of.get(request_id, "")] += int(accepted)
        if record.result.num_accepted.any():
            self.beside |= self._live

    def running(self, live: set[str]) -> None:
        """Those that the next step may have."""
        self._live = set(live)


class KnowsAll(FuzzDrafter):
    """A fuzzed drafter that knows every sample of a problem: of them, the first that begins as the answer does."""

    def __init__(self, answers: Mapping[str, Sequence[list[int]]], vocab_size: int, **options: Any) -> None:
        super().__init__({}, vocab_size, **options)
        self.samples = answers

    def rest(self, view: RequestView) -> list[int]:
        done = view.token_ids[view.num_prompt_tokens :].tolist()
        found = (one for one in self.samples.get(view.problem_id, ()) if one[: len(done)] == done)
        return next(found, [])[len(done) :]


def answers(llm: LLM, requests: Sequence[Mixed], drafts: Drafts | None = None) -> list[Any]:
    """Each request's answer, whole; the words of its refusal; or None if it was aborted."""
    engine, found = llm.llm_engine, _Answers(requests)
    for step in range(MOST_STEPS):
        for case in found.due(step):
            try:
                engine.add_request(case.problem_id, case.asked, case.sampling(), priority=case.priority)
            except Exception as error:
                found.end(case.problem_id, f"{type(error).__name__}: {error}")
        for name in found.to_abort(step):
            engine.abort_request([name])
            found.end(name, None)
        if drafts is not None:
            drafts.running(found.live)
        if found.are_all_there():
            return [found.ended[case.problem_id] for case in requests]
        for output in engine.step():
            found.take(output)
    raise AssertionError(f"no end of {sorted(found.live)} in {MOST_STEPS} steps")


class _Answers:
    """Answers as they come, in parts or whole."""

    def __init__(self, requests: Sequence[Mixed]) -> None:
        self.ended: dict[str, Any] = {}
        self.live: set[str] = set()
        self._requests = {case.problem_id: case for case in requests}
        self._due = defaultdict(list)
        self._parts: dict[str, dict[int, Any]] = defaultdict(dict)
        self._prompt_logprobs: dict[str, Any] = {}
        for case in requests:
            self._due[case.step].append(case)

    def due(self, step: int) -> list[Mixed]:
        come = self._due.pop(step, [])
        self.live |= {case.problem_id for case in come}
        return come

    def to_abort(self, step: int) -> list[str]:
        after = {name: self._requests[name].aborted_after for name in self.live}
        return [name for name, by in after.items() if by is not None and step >= self._requests[name].step + by]

    def end(self, name: str, answer: Any) -> None:
        self.ended[name] = answer
        self.live.discard(name)

    def are_all_there(self) -> bool:
        return not self.live and not self._due

    def take(self, output: RequestOutput) -> None:
        name = output.request_id
        if name not in self.live:
            return
        is_delta = self._requests[name].params.get("output_kind") is RequestOutputKind.DELTA
        parts = self._parts[name]
        for part in output.outputs:
            before = parts.get(part.index) if is_delta else None
            parts[part.index] = part if before is None else _joined(before, part)
        self._prompt_logprobs[name] = self._prompt_logprobs.get(name) or output.prompt_logprobs
        if output.finished:
            output.prompt_logprobs = self._prompt_logprobs[name]
            output.outputs = [parts[index] for index in sorted(parts)]
            self.end(name, output)


def _joined(before: Any, part: Any) -> Any:
    logprobs = None if part.logprobs is None else [*before.logprobs, *part.logprobs]
    tokens = [*before.token_ids, *part.token_ids]
    return dataclasses.replace(part, text=before.text + part.text, token_ids=tokens, logprobs=logprobs)


def stock_answers(llm: LLM, requests: Sequence[Mixed]) -> list[Any]:
    """Stock's, each request with a thinking budget alone: in a batch stock has others inherit budgets."""
    alone = [case for case in requests if BUDGET in case.params]
    others = [case for case in requests if BUDGET not in case.params]
    found = {case.problem_id: answer for case, answer in zip(others, answers(llm, others), strict=True)}
    for case in alone:
        (found[case.problem_id],) = answers(llm, [dataclasses.replace(case, step=0)])
    return [found[case.problem_id] for case in requests]


def samples(requests: Sequence[Mixed], wanted: Sequence[Any]) -> dict[str, list[list[int]]]:
    """Every sample of every problem, as stock answered it."""
    return {
        case.problem_id: [list(one.token_ids) for one in answer.outputs]
        for case, answer in zip(requests, wanted, strict=True)
        if isinstance(answer, RequestOutput)
    }


def faults(requests: Sequence[Mixed], wanted: Sequence[Any], got: Sequence[Any]) -> list[str]:
    """A line of each request that was not answered as by stock."""
    found, level = [], []
    for case, theirs, ours in zip(requests, wanted, got, strict=True):
        if theirs is None or ours is None:  # aborted, or at its end before that
            continue
        lines = list(differences(theirs, ours, left_out=BY_HISTORY))
        if lines:
            kind = level if all(line.endswith(UNLISTED) for line in lines) else found
            kind.append(f"{case.name}: {lines[0]} ({len(lines)} differences), {case.params}")
    return found + (level if len(level) > MOST_LEVEL * len(requests) else [])


def undrafted(requests: Sequence[Mixed], wanted: Sequence[Any], drafts: Drafts) -> set[str]:
    """Features of several requests with answers of several tokens, of which none was accepted as a draft."""
    met: Counter[str] = Counter()
    had: set[str] = set()
    for case, answer in zip(requests, wanted, strict=True):
        if isinstance(answer, RequestOutput) and any(len(one.token_ids) > SEVERAL for one in answer.outputs):
            # what comes beside a feature that is never drafted for says nothing of its own drafts
            met.update(case.features & NEVER_DRAFTED or case.features)
            if drafts.accepted[case.problem_id]:
                had |= case.features
            if case.problem_id in drafts.beside:
                had |= case.features & NEVER_DRAFTED
    return {feature for feature, count in met.items() if count > FEW} - had


def hold(ours: Engine, requests: Sequence[Mixed], wanted: Sequence[Any]) -> int:
    """Ours answers as stock did, with a fuzzed drafter; each feature had drafts accepted, or others beside it.

    Returns how often a request was preempted.
    """
    known = samples(requests, wanted)
    ours.runner.spec_rollout.replace_drafters([KnowsAll(known, VOCAB, seed=1)])
    drafts = Drafts(ours.runner)
    scheduler = ours.llm.llm_engine.engine_core.engine_core.scheduler
    with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempting:
        got = answers(ours.llm, requests, drafts)
    ours.runner.settle()
    found = faults(requests, wanted, got)
    assert not found, "\n".join(found)
    bare = undrafted(requests, wanted, drafts)
    assert not bare, bare
    return preempting.call_count
