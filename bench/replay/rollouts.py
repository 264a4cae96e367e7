"""Engines that roll the policy out with a budget, and record it if asked to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs
from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import Problem
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from vllm_specrollout.replay.records import Trace

from ..runner.engine_process import EngineProcess, EngineSpec
from ..runner.engines import PROMPT_LEN, asking, sampling

_KV_GIB = 1
_POOL = 1000
_WARM_UP_TOKENS = 24
_AT_ONCE_MS = 1000.0
_FEW_TERMS, _MANY_TERMS = 6, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
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


def chosen_problems(rollout: RolloutPlan) -> list[Problem]:
    """The rollout's problems; with a tail, the long ones stand first, as a trainer that knows them would order them."""
    if rollout.long is None:
        return problems(rollout.prompts, rollout.seed)
    pool = problems(_POOL, rollout.seed)
    long = [problem for problem in pool if problem.size >= _MANY_TERMS][: rollout.long]
    short = [problem for problem in pool if problem.size <= _FEW_TERMS][: rollout.prompts - len(long)]
    return long + short


def start(rollout: RolloutPlan, budget: str, history: Path | None = None) -> EngineProcess:
    """An engine of ours for it.

    Args:
        history: folder that keeps the history drafter's answers.
    """
    settings: dict[str, Any] = {"drafters": list(rollout.drafters), "budget": budget, "profile": "off"}
    # some passes repeat each other, and all of them are to be admitted alike
    settings["queue_order"] = "arrival"
    if history is not None:
        settings["history"] = {"dir": str(history)}
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


def run(engine: EngineProcess, rollout: RolloutPlan, noise: int) -> float:
    """One pass over the problems; returns its makespan in seconds."""
    owners = [problem for problem in chosen_problems(rollout) for _ in range(rollout.samples)]
    prompts = engine.ask("encode", texts=[prompt_text(problem.prompt) for problem in owners])
    params = asking(owners, noise * 1_000_003, rollout.max_tokens, is_ours=True)
    seconds: float = engine.ask("generate", prompts=prompts, params=params)["wall_s"]
    return seconds


def set_budget(engine: EngineProcess, name: str, record: Path | None = None) -> None:
    """A fresh one, and a recording of all that follows; the one before it is completed."""
    path = None if record is None else str(record)
    engine.ask("rpc", method="spec_rollout_set_budget", name=name, is_profiled=False, record=path)


def warm_up(engine: EngineProcess, rollout: RolloutPlan) -> None:
    """A few tokens of a full batch, so that kernels are set up before anything is timed or recorded."""
    prompts = engine.ask("encode", texts=[prompt_text(problem.prompt) for problem in chosen_problems(rollout)])
    repeated = (prompts * rollout.batch)[: rollout.batch]
    params = [sampling(i, _WARM_UP_TOKENS) for i in range(len(repeated))]
    engine.ask("generate", prompts=repeated, params=params)


def at_once(trace: Trace) -> Trace:
    """The trace of a rollout whose requests were all handed over together: they take some time to reach the engine."""
    if not all(arrival.ready_ms < _AT_ONCE_MS for arrival in trace.arrivals):
        return trace
    return replace(trace, arrivals=tuple(structs.replace(arrival, ready_ms=0.0) for arrival in trace.arrivals))
