"""Budgets by name. What belongs here: which name is which budget, and nothing of how one decides."""

from __future__ import annotations

from typing import cast

import numpy as np

from vllm_specrollout.budgets.base import BaseBudget, Budget
from vllm_specrollout.budgets.fixed import FixedBudget, OffBudget
from vllm_specrollout.budgets.papers.das import DasBudget
from vllm_specrollout.budgets.papers.fastgrpo import FastGrpoBudget
from vllm_specrollout.budgets.papers.histospec import HistoSpecBudget
from vllm_specrollout.budgets.papers.specactor import SpecActorBudget
from vllm_specrollout.budgets.papers.tlt import TltBudget
from vllm_specrollout.config import SpecRolloutConfig, budgets, by_name


def names() -> tuple[str, ...]:
    """Every budget there is."""
    return tuple(budgets.OPTIONS)


def make_budget(config: SpecRolloutConfig, *, seed: int = 0) -> Budget:
    """The budget that a configuration asks for, with its options.

    Args:
        seed: of the budget's own chance (`tlt` alone has any); what it does depends on that and on what it is told.

    Raises:
        ConfigError: a class of the user's that cannot be used.
    """
    limits = (config.max_draft_tokens, config.max_depth)
    match config.budget_options:
        case budgets.FastGrpoOptions() as given:
            return FastGrpoBudget(*limits, given)
        case budgets.TltOptions() as given:
            return TltBudget(*limits, given, rng=np.random.default_rng(seed))
        case budgets.SpecActorOptions() as given:
            return SpecActorBudget(*limits, given)
        case budgets.NamedOptions(values=given):
            return cast(Budget, by_name.make("budget", config.budget, Budget, BaseBudget, limits, given))
    match config.budget:
        case "auto":
            # imported late: the default learns more, and needs more, than any other
            from vllm_specrollout.budgets.goodput import GoodputBudget

            return cast(Budget, GoodputBudget(*limits))
        case "histospec":
            return HistoSpecBudget(*limits)
        case "das":
            return DasBudget(*limits)
    return FixedBudget(*limits) if config.budget == "fixed" else OffBudget()
