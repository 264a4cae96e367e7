"""Engines that roll the policy out with a budget, and record it if asked to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from vllm_specrollout.replay.records import Trace, round_ms

from ..policy import CHECKPOINT
from ..policy.reward import problems
from ..policy.tasks import Problem
from ..policy.tokenizer import prompt_text
from ..runner.engine_process import EngineProcess, EngineSpec
from ..runner.engines import PROMPT_LEN, asking, sampling

_KV_GIB = 1
_POOL = 1000
_WARM_UP_TOKENS = 24
_AT_ONCE_MS = 1000.0
_FEW_TERMS, _MANY_TERMS = 6, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A set of problems, each answered several times."""

    prompts: int = 16
    samples: int = 4
    batch: int = 8
    max_tokens: int = 1024
    # of the problem set
    seed: int = 0
    # of the answers; a pass of its own for each
    noise: tuple[int, ...] = (0,)
    drafters: tuple[str, ...] = ("ngram",)
    # problems with very many terms, the others then having few; None: as they come
    long: int | None = None
    model: Path = CHECKPOINT


def chosen_problems(rollout: Rollout) -> list[Problem]:
    """The rollout's problems; with a tail, the long ones stand first, as a trainer that knows them would order them."""
    if rollout.long is None:
        return problems(rollout.prompts, rollout.seed)
    pool = problems(_POOL, rollout.seed)
    long = [problem for problem in pool if problem.size >= _MANY_TERMS][: rollout.long]
    short = [problem for problem in pool if problem.size <= _FEW_TERMS][: rollout.prompts - len(long)]
    return long + short


def start(rollout: Rollout, budget: str, history: Path | None = None, record: Path | None = None) -> EngineProcess:
    """An engine of ours for it.

    Args:
        history: folder that keeps the history drafter's answers.
        record: file that the rollout is recorded into.
    """
    settings: dict[str, Any] = {"drafters": list(rollout.drafters), "budget": budget, "profile": "off"}
    # some passes repeat each other, and all of them are to be admitted alike
    settings["queue_order"] = "arrival"
    if history is not None:
        settings["history"] = {"dir": str(history)}
    if record is not None:
        settings["record"] = str(record)
    arguments = {
        "model": str(rollout.model),
        "dtype": "bfloat16",
        "seed": 0,
        "enforce_eager": True,
        "max_num_seqs": rollout.batch,
        "max_model_len": PROMPT_LEN + rollout.max_tokens,
        "max_num_batched_tokens": max(2048, rollout.batch * 2 * PROMPT_LEN),
    }
    spec = EngineSpec(name=budget, arguments=arguments, kv_gib=_KV_GIB, has_plugin=True, spec_rollout=settings)
    return EngineProcess(spec)


def run(engine: EngineProcess, rollout: Rollout, noise: int) -> float:
    """One pass over the problems; returns its makespan in seconds."""
    owners = [problem for problem in chosen_problems(rollout) for _ in range(rollout.samples)]
    prompts = engine.ask("encode", texts=[prompt_text(problem.prompt) for problem in owners])
    params = asking(owners, noise * 1_000_003, rollout.max_tokens, is_ours=True)
    return engine.generate(prompts, params).wall_s


def warm_up(engine: EngineProcess, rollout: Rollout) -> int:
    """A few tokens of a full batch, so that kernels are set up before anything is timed; returns how many requests."""
    prompts = engine.ask("encode", texts=[prompt_text(problem.prompt) for problem in chosen_problems(rollout)])
    repeated = (prompts * rollout.batch)[: rollout.batch]
    params = [sampling(i, _WARM_UP_TOKENS) for i in range(len(repeated))]
    engine.generate(repeated, params)
    return len(repeated)


def without_first(trace: Trace, count: int) -> Trace:
    """The trace without its first requests, which were over before the next one came, and without their steps."""
    rest = [arrival for arrival in trace.arrivals if arrival.request >= count]
    first = min(arrival.step for arrival in rest)
    timing = trace.steps[first + 1].timing
    begin = trace.steps[first].at_ms - (0.0 if timing is None else timing.step_ms)
    arrivals = []
    for a in rest:
        ready_ms = round_ms(max(a.ready_ms - begin, 0.0))
        arrivals.append(structs.replace(a, request=a.request - count, step=a.step - first, ready_ms=ready_ms))
    steps = []
    for step in trace.steps[first:]:
        verified = tuple(structs.replace(v, request=v.request - count) for v in step.verified if v.request >= count)
        kept = tuple(structs.replace(c, request=c.request - count) for c in step.candidates if c.request >= count)
        steps.append(structs.replace(step, at_ms=round_ms(step.at_ms - begin), verified=verified, candidates=kept))
    # on the V1 runner it tells what the step before cost, which is none of ours
    if trace.header.lag:
        steps[0] = structs.replace(steps[0], timing=None)
    ends = {n - count: structs.replace(end, request=n - count) for n, end in trace.ends.items() if n >= count}
    return at_once(Trace(trace.header, tuple(arrivals), tuple(steps), ends, trace.is_cut))


def at_once(trace: Trace) -> Trace:
    """The trace of a rollout whose requests were all handed over together: they take some time to reach the engine."""
    if not all(arrival.ready_ms < _AT_ONCE_MS for arrival in trace.arrivals):
        return trace
    return replace(trace, arrivals=tuple(structs.replace(arrival, ready_ms=0.0) for arrival in trace.arrivals))
