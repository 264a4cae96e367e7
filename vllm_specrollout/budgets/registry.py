"""Budgets by name."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specrollout.budgets.base import Budget, FixedBudget, OffBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.config import SpecRolloutConfig

# name -> (most nodes per request, most levels) -> budget
_MAKERS: dict[str, Callable[[int, int], Budget]] = {"auto": GoodputBudget, "fixed": FixedBudget, "off": OffBudget}


def names() -> tuple[str, ...]:
    """Every budget there is."""
    return tuple(_MAKERS)


def make_budget(config: SpecRolloutConfig, *, seed: int = 0) -> Budget:
    """The budget a configuration asks for.

    Args:
        seed: of the budget's own chance; none of these has any.
    """
    return _MAKERS[config.budget](config.max_draft_tokens, config.max_depth)
