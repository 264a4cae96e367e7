"""Budgets by name. Each published system's is built from the same parts, so that all can be compared on one trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_specrollout.config import BUDGETS, SpecRolloutConfig
from vllm_specrollout.policies.auto import AutoBudget
from vllm_specrollout.policies.budget import FixedBudget, Policy
from vllm_specrollout.policies.das import DasBudget
from vllm_specrollout.policies.fastgrpo import FastGrpoBudget
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.policies.pick import NAIVE, Kernels
from vllm_specrollout.policies.specactor import SpecActorBudget
from vllm_specrollout.policies.tlt import TltBudget
from vllm_specrollout.policies.window import WindowBudget
from vllm_specrollout.types import StepTiming

# name -> (most nodes per request, most levels, source of chance, loops over nodes) -> policy; names are those of
# `config.BUDGETS`
_MAKERS: dict[str, Callable[[int, int, np.random.Generator, Kernels], Policy]] = {
    "auto": lambda nodes, depth, _, kernels: AutoBudget(nodes, depth, kernels=kernels),
    "fixed": lambda nodes, depth, *_: FixedBudget(nodes, depth),
    "off": lambda nodes, depth, *_: OffBudget(),
    "histospec": lambda nodes, depth, *_: WindowBudget(nodes, depth),
    "das": lambda nodes, depth, *_: DasBudget(nodes, depth),
    "fastgrpo": lambda nodes, depth, *_: FastGrpoBudget(nodes, depth),
    "tlt": lambda nodes, depth, rng, _: TltBudget(nodes, depth, rng=rng),
    "specactor": lambda nodes, depth, *_: SpecActorBudget(nodes, depth),
}


def names() -> tuple[str, ...]:
    """Every budget there is."""
    return BUDGETS


def make_policy(config: SpecRolloutConfig, *, seed: int = 0, kernels: Kernels = NAIVE) -> Policy:
    """The policy a configuration asks for.

    Args:
        seed: of the policy's own chance (`tlt` alone has any); what it does depends on that and on what it is told.
        kernels: loops over all nodes of a batch; engines pass in those in C++.
    """
    return _MAKERS[config.budget](config.max_draft_tokens, config.max_depth, np.random.default_rng(seed), kernels)


def seed_with(policy: Policy, timings: Sequence[StepTiming]) -> bool:
    """Let a policy start from steps measured earlier on such an engine; False if it makes no use of them."""
    for learner in (policy, getattr(policy, "cost", None)):
        seed = getattr(learner, "seed", None)
        if callable(seed):
            seed(timings)
            return True
    return False
