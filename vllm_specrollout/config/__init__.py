"""Settings: of an engine, its drafters and its budget, of one request, and by the environment.

stdlib only. Defaults and limits live here and nowhere else.
"""

from vllm_specrollout.config.drafters import (
    DRAFTERS,
    DecoupledConfig,
    HistoryConfig,
    LearnConfig,
    NgramConfig,
    StartedDrafter,
)
from vllm_specrollout.config.engine import (
    ALTERNATIVES,
    BUDGETS,
    DECOUPLED_SOURCES,
    MAX_NODES,
    MODEL_SOURCES,
    PLACEMENTS,
    RequestOptions,
    SpecRolloutConfig,
    parse,
    parse_request,
)
from vllm_specrollout.config.resuming import Resume

__all__ = [
    "ALTERNATIVES",
    "BUDGETS",
    "DECOUPLED_SOURCES",
    "DRAFTERS",
    "MAX_NODES",
    "MODEL_SOURCES",
    "PLACEMENTS",
    "LearnConfig",
    "DecoupledConfig",
    "HistoryConfig",
    "NgramConfig",
    "RequestOptions",
    "Resume",
    "SpecRolloutConfig",
    "StartedDrafter",
    "parse",
    "parse_request",
]
