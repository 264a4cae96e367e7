"""Answers that end at a stop string: to vLLM's scheduler they are aborted requests.

Its front end finds the string and takes the request back from the engine. So it says there how long the answer is: a
mark stands in the message beside the request's id, as an id that nobody has. A scheduler that does not know marks
leaves them alone, as it does every id without a request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_MARK = re.compile("spec_rollout_answer:([0-9]{1,18}):(.*)", re.DOTALL)


def mark(request_id: str, num_tokens: int) -> str:
    """Says that a request which is taken back is an answer.

    Args:
        num_tokens: of the answer, up to the one that completes the stop string.
    """
    return f"spec_rollout_answer:{num_tokens}:{request_id}"


def marked(request_id: str) -> str:
    """The request that a mark is of; empty: it is none."""
    found = _MARK.fullmatch(request_id)
    return found[2] if found else ""


def answers(request_ids: Iterable[str], requests: Collection[str]) -> dict[str, int]:
    """Request that is an answer -> its length in tokens.

    Args:
        request_ids: of one message; marks among them.
        requests: the scheduler's. A client may give its request a name that looks like a mark.
    """
    found = [one for name in request_ids if name not in requests and (one := _MARK.fullmatch(name))]
    return {one[2]: int(one[1]) for one in found}
