"""Plans for one host, ranked by rehearsal: what our trees yield, beside what the formulas of windows say. Pure.

What belongs here: which plans and windows are rehearsed, and what is said of each. Who drafts and who verifies comes
from planner.py, and what a plan yields from rehearsal.py. The formulas have a window sent when it is complete. A tree
is verified as far as it has come, gains at most a level per pass, and has exits behind exits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.config.checks import check_range
from vllm_specrollout.decoupled.planner import Plan, Workload, choose_placement
from vllm_specrollout.decoupled.rates import Mode
from vllm_specrollout.decoupled.rehearsal import Match, Setting, coupled_tokens, rehearse
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Windows that are rehearsed, beside the best one by formula."""
REQUEST_STEPS = 2000
"""Steps of a rehearsal, of all its requests together."""
MOST_REQUESTS = 256
"""Of one verifier: a rehearsal goes through the trees of each."""
_LEAST_STEPS = 100


@dataclass(frozen=True, slots=True)
class Trees:
    """What is drafted, and how well it is met.

    Raises:
        ConfigError: a value out of range.
    """

    match: Match
    # tokens of each position: the first choice, and exits beside it
    fan_out: int = 2
    # nodes of a stream that are looked behind, at most
    most_nodes: int = 16

    def __post_init__(self) -> None:
        check_range("fan_out", self.fan_out, 1, 8)
        check_range("most_nodes", self.most_nodes, 1, MOST_NODES)

    def drafts(self, window: int) -> int:
        """Nodes of a request that a step verifies, at most."""
        return min(window * self.fan_out, MOST_NODES)


@dataclass(frozen=True, slots=True)
class RehearsedPlan:
    """A plan, and what it is like in rehearsal."""

    # by formula, with the window that is best so
    plan: Plan
    # the one that is best in rehearsal, and then tokens of one request
    window: int
    rehearsed_per_s: float
    tokens_per_step: float


def rehearse_placements(
    work: Workload, devices: int, batch: int, trees: Trees, *, seed: int = 0, request_steps: int = REQUEST_STEPS
) -> tuple[RehearsedPlan, ...]:
    """The plans of `choose_placement`, each with the best of its windows, fastest in rehearsal first.

    Coupled, a model's comb is verified: each level has its choices, and the first one goes on.

    Args:
        devices, batch: as for `choose_placement`.
        seed: of where requests begin among the known ranks.

    Raises:
        ConfigError: no verifier fits, one would have more than `MOST_REQUESTS`, or it is to wait for windows.
    """
    if work.tau != "exact":
        raise ConfigError(
            f"a rehearsal has a verifier that never waits, and `tau` is {work.tau!r}", "leave `tau` at `exact`"
        )
    ranking = choose_placement(work, devices, batch)
    found = []
    for plan in (ranking.best, *ranking.others):
        if plan.batch > MOST_REQUESTS:
            raise ConfigError(
                f"a verifier would have {plan.batch} requests, and at most {MOST_REQUESTS} are rehearsed",
                "plan by formula, without `--rehearse`",
            )
        choices = (_rehearsed(work, plan, window, trees, seed, request_steps) for window in _windows(work, plan))
        found.append(max(choices, key=lambda choice: choice.rehearsed_per_s))
    return tuple(sorted(found, key=lambda one: -one.rehearsed_per_s))


def _windows(work: Workload, plan: Plan) -> Iterator[int]:
    """Shortest first: of equal ones that one is taken."""
    if plan.mode is Mode.PLAIN:
        return iter((0,))
    return iter(sorted({window for window in WINDOWS if window <= work.max_window} | {plan.window}))


def _rehearsed(work: Workload, plan: Plan, window: int, trees: Trees, seed: int, request_steps: int) -> RehearsedPlan:
    verify, draft = work.verify[plan.verify_gpus], work.draft
    if plan.mode is Mode.PLAIN:
        return RehearsedPlan(plan, window, plan.tokens_per_s, 1.0)
    if plan.mode is Mode.COUPLED:
        tokens = coupled_tokens(trees.match, window, trees.fan_out)
        rate = tokens / (window * draft.ms(plan.batch) + verify.ms(plan.batch, trees.drafts(window)))
    else:
        draft = draft.shared_by(plan.draft_gpus)
        setting = Setting(
            verify_ms=lambda requests, rows: verify.ms(requests, rows / requests),
            draft_ms=lambda streams, rows: draft.ms(streams, rows / streams),
            match=trees.match,
            batch=plan.batch,
            window=window,
            fan_out=trees.fan_out,
            most_nodes=trees.most_nodes,
            most_drafts=trees.drafts(window),
            most_depth=window,
        )
        steps = max(request_steps // plan.batch, _LEAST_STEPS)
        found = rehearse(setting, np.random.default_rng(seed), steps)
        tokens, rate = found.tokens_per_step, found.rate
    return RehearsedPlan(plan, window, 1e3 * rate, tokens)
