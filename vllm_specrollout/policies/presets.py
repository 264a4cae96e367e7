"""Budgets by name. Each published system's is built from the same parts, so that all can be compared on one trace."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.policies.auto import AutoBudget
from vllm_specrollout.policies.budget import FixedBudget, Policy
from vllm_specrollout.policies.das import DasBudget
from vllm_specrollout.policies.window import WindowBudget

_BUDGETS: dict[str, Callable[[int, int], Policy]] = {
    "auto": AutoBudget,
    "fixed": FixedBudget,
    "histospec": WindowBudget,
    "das": DasBudget,
}


def make_policy(config: SpecRolloutConfig) -> Policy:
    """The policy a configuration asks for."""
    return _BUDGETS[config.budget](config.max_draft_tokens, config.max_depth)
