"""Marks: which requests compute an answer once more, so that its hidden states are sent to a trainer.

What belongs here: what the front end and the engine both need. The mark travels in `SamplingParams.extra_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specrollout.errors import ConfigError

KEY = "spec_rollout_rows"


class RowsMark(dict[str, int]):
    """`prompt_tokens`, the `version` of the weights that shall compute the answer, and its `key` in the ring.

    It is a type of its own: what a client writes is another one, and is refused at the front end (`check_mark`).
    """


def mark_of(params: Any) -> Mapping[str, int] | None:
    """The mark of a request's `SamplingParams`; None: it has none."""
    return None if params is None or not params.extra_args else params.extra_args.get(KEY)


def check_mark(extra: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a client has marked its request.
    """
    if KEY in extra and type(extra[KEY]) is not RowsMark:
        raise ConfigError(f"`{KEY}` in `extra_args` is the engine's own", "leave it out")
