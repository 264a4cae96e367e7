"""What may stand in a trace: types and ranges of every value, checked before anything is computed from it.

May enter: the records. May not: files, JSON. Each check returns the value, or raises ValueError or TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np

from vllm_specrollout.replay.records import OPEN, Arrival, Header
from vllm_specrollout.types import MOST_NODES, ROOT, SOURCES, DraftTree, FinishReason, StepTiming

MOST = 1 << 40
"""Largest count, and longest time in milliseconds (35 years)."""
_AT_LEAST_ONE = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_draft_tokens", "max_depth")
_STATUSES = (OPEN, *(reason.value for reason in FinishReason))


def whole(value: Any, least: int = 0, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.80} where a whole number from {least} to {most} belongs")
    return value


def real(value: Any, least: float = 0.0, most: float = MOST) -> float:
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} where a number from {least:g} to {most:g} belongs")
    return float(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} where a text belongs")
    return value


def listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} where a list belongs")
    return value


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} where an object belongs")
    return value


def status(value: Any) -> str:
    if value not in _STATUSES:
        raise ValueError(f"{value!r:.80} is no status of an answer")
    return str(value)


def header(values: Mapping[str, Any]) -> Header:
    """Raises also: budgets could not be run on an engine like this."""
    found = Header(**_plain(Header, values))
    for name in _AT_LEAST_ONE:
        whole(getattr(found, name), 1)
    whole(found.max_draft_tokens, 1, MOST_NODES)
    whole(found.max_depth, 1, MOST_NODES)
    if found.runner not in ("v1", "v2") or found.shape not in ("tree", "chain"):
        raise ValueError(f"a runner {found.runner!r:.80} that drafts a {found.shape!r:.80}")
    for name, value in mapping(found.cost).items():
        for term in listed(value) if name == "rows" else [value]:
            # a token of a prompt is computed once at most
            real(term, most=1.0 if name == "prompt_share" else MOST)
    return found


def arrival(values: Mapping[str, Any]) -> Arrival:
    return Arrival(**_plain(Arrival, values))


def timing(values: Mapping[str, Any]) -> StepTiming:
    return StepTiming(**_plain(StepTiming, values))


def tree(found: DraftTree) -> None:
    """Raises: the columns differ in length, a parent does not come before its child, or a probability is above 1."""
    count = found.size
    if not count == len(found.parents) == len(found.log_q) == len(found.source):
        raise ValueError("columns of a draft differ in length")
    is_before = np.all(found.parents < np.arange(count)) and np.all(found.parents >= ROOT)
    if count > MOST_NODES or not is_before or np.any(found.source >= SOURCES):
        raise ValueError("a draft that is no tree")


def _plain(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, those of plain types checked; a dataclass refuses names that it does not have."""
    checks: dict[Any, Any] = {int: whole, float: real, str: text}
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name in hints and hints[name] is bool and type(value) is not bool:
            raise TypeError(f"{value!r:.80} where true or false belongs")
        if name in hints and hints[name] in checks:
            checks[hints[name]](value)
    return dict(values)
