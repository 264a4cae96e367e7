"""Traces out of nothing: rollouts with a known acceptance, length distribution and cost, for tests and for tuning.

May enter: numpy and a seed. Two traces of one plan are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.config.checks import Range, check_fields
from vllm_specrollout.replay.records import Arrival, Candidates, End, Header, Step, Trace
from vllm_specrollout.types import DraftTree, FinishReason

_VOCABULARY = 32_000
_Count = Annotated[int, Range(1, 1 << 30)]
_Size = Annotated[float, Range(0.0, math.inf)]
_Share = Annotated[float, Range(0.0, 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """A rollout to make up."""

    # Answers; those of one problem stand together.
    requests: _Count = 32
    # Answers to each problem.
    samples: _Count = 4
    # Requests at once.
    batch: _Count = 8
    # Tokens of each prompt.
    prompt: _Count = 64
    # Median length of an answer; lengths are log-normal.
    median: _Size = 100.0
    # Standard deviation of the logarithm of an answer's length; 0 makes all alike.
    spread: _Size = 0.8
    # Share of that variance that the answers to one problem have in common, from 0 to 1.
    shared: _Share = 0.5
    # Tokens after which an answer is cut.
    longest: _Count = 2048
    # Probability that the draft's token of depth 1, 2, ... is right, given that all above it are.
    acceptance: tuple[_Share, ...] = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5)
    # Factor on every acceptance that is reached, evenly, at the end of each answer.
    drift: _Size = 1.0
    # Probability that a second token beside a wrong one is right; 0 makes chains.
    sibling: _Share = 0.0
    # Exponent on the probabilities that the drafts claim: below 1 they claim too much, above 1 too little.
    told: _Size = 1.0
    # Probability that nothing is drafted at a position.
    silent: _Share = 0.0
    # What a step costs.
    cost: CostLine = field(
        default_factory=lambda: CostLine(
            fixed=20.0, request=0.6, draft=1.0, node=0.6, branch=0.4, ask=0.2, ask_request=0.02, prompt_row=0.5
        )
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


def make_trace(plan: TracePlan) -> Trace:
    """A trace with a proposal at every position of every answer, so that no budget stands where nothing is known.

    Its steps carry no timings: the plan's cost line stands in the header.

    Raises:
        ConfigError: a value of the plan is out of range.
    """
    rng = np.random.default_rng(plan.seed)
    lengths = _lengths(plan, rng)
    arrivals, ends, candidates = [], {}, []
    for request, length in enumerate(lengths):
        answer = rng.integers(0, _VOCABULARY, length, dtype=np.int32)
        is_cut = length == plan.longest
        arrivals.append(
            Arrival(
                request=request,
                step=0,
                num_prompt_tokens=plan.prompt,
                max_tokens=plan.longest,
                problem_id=f"p{request // plan.samples}",
                ready_ms=0.0,
            )
        )
        status = FinishReason.TRUNCATED if is_cut else FinishReason.FINISHED
        ends[request] = End(request=request, status=status.value, token_ids=answer.tolist())
        # the first token comes with the prompt
        for position in range(1, length + 1):
            if plan.silent == 0.0 or rng.random() >= plan.silent:
                tree = _tree(plan, rng, answer[position:], position / length)
                candidates.append(Candidates.of(request, position, tree))
    width = 1 + (plan.sibling > 0.0)
    header = Header(
        model="synthetic",
        max_num_seqs=plan.batch,
        budget="fixed",
        drafters=("synthetic",),
        max_draft_tokens=min(64, width * len(plan.acceptance)),
        max_depth=len(plan.acceptance),
        cost=plan.cost,
    )
    return Trace(header, tuple(arrivals), (Step(at_ms=0.0, candidates=tuple(candidates)),), ends)


def _lengths(plan: TracePlan, rng: np.random.Generator) -> list[int]:
    """Log-normal lengths; a problem's answers share a part of the variance."""
    problems = -(-plan.requests // plan.samples)
    common = np.repeat(rng.standard_normal(problems), plan.samples)[: plan.requests]
    own = rng.standard_normal(plan.requests)
    logs = plan.spread * (np.sqrt(plan.shared) * common + np.sqrt(1.0 - plan.shared) * own)
    lengths: list[int] = np.clip(np.rint(plan.median * np.exp(logs)), 1, plan.longest).astype(int).tolist()
    return lengths


def _tree(plan: TracePlan, rng: np.random.Generator, truth: np.ndarray, progress: float) -> DraftTree:
    """A chain that is right as often as planned; beside each of its nodes a leaf, if the plan has siblings."""
    factor = 1.0 + (plan.drift - 1.0) * progress
    depth = len(plan.acceptance)
    right = np.minimum(np.asarray(plan.acceptance) * factor, 1.0)
    hits = np.cumprod(rng.random(depth) < right)
    hits[len(truth) :] = 0
    # a wrong token is outside the vocabulary of answers
    chain = _VOCABULARY + rng.integers(0, _VOCABULARY, depth)
    count = int(hits.sum())
    chain[:count] = truth[:count]
    claimed = np.log(np.clip(right, 1e-6, 1.0)) * plan.told
    if plan.sibling == 0.0:
        parents = np.arange(-1, depth - 1)
        return _draft(chain, parents, claimed)
    leaves = 2 * _VOCABULARY + rng.integers(0, _VOCABULARY, depth)
    if count < min(depth, len(truth)) and rng.random() < plan.sibling:
        leaves[count] = truth[count]
    beside = np.log(np.clip((1.0 - right) * plan.sibling, 1e-6, 1.0)) * plan.told
    above = np.concatenate([[0.0], np.cumsum(claimed)[:-1]])
    tokens = np.concatenate([chain, leaves])
    parents = np.concatenate([np.arange(-1, depth - 1)] * 2)
    log_q = np.concatenate([claimed, beside])
    # best first, a parent before its children where they are equally likely
    ranks = np.lexsort((np.arange(2 * depth) % depth, -np.concatenate([above, above]) - log_q))
    place = np.empty(2 * depth + 1, dtype=np.int64)
    place[ranks] = np.arange(2 * depth)
    place[-1] = -1
    return _draft(tokens[ranks], place[parents[ranks]], log_q[ranks])


def _draft(tokens: np.ndarray, parents: np.ndarray, log_q: np.ndarray) -> DraftTree:
    return DraftTree(
        tokens.astype(np.int32),
        parents.astype(np.int32),
        np.minimum(log_q, 0.0).astype(np.float32),
        np.zeros(len(tokens), dtype=np.int32),
    )
