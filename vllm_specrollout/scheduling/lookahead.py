"""Lookahead: draft tokens, or placeholders for them, that each running request gets of a step and the KV cache. Pure.

Room takes from the step's token budget and may take a KV block, whether it is used or not: neither may keep a request
from being scheduled or push one out of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def room_per_request(max_draft_tokens: int, *, num_running: int, has_waiting: bool, max_tokens_per_step: int) -> int:
    """Placeholders per request, the same for all.

    Args:
        max_draft_tokens: the configured most.
        num_running: requests that share the step.
        has_waiting: whether prompts wait, or are computed in part; then half of the step's tokens are left to them.
        max_tokens_per_step: the scheduler's token budget.
    """
    if num_running <= 0:
        return max_draft_tokens
    part = 2 if has_waiting else 1
    return max(0, min(max_draft_tokens, max_tokens_per_step // part // num_running - 1))


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """What one request's drafts would take of the KV cache."""

    # draft tokens
    wanted: int
    # slots of its blocks that plain decoding leaves over, at least 0
    slack: int


def granted(asks: Sequence[DraftAsk], spare_blocks: int, block_size: int, blocks_at_once: int = 1) -> list[int]:
    """How many draft tokens each request may have: all that its own blocks hold, and what spare blocks add in turn.

    Args:
        spare_blocks: blocks that nobody owns and plain decoding will not need; below 0: fewer than it may.
        block_size: tokens per block; of several kinds of blocks, the smallest.
        blocks_at_once: kinds of blocks, of each of which a request takes one where it takes any.

    Returns:
        [R] at most `wanted` each. What goes beyond `slack` takes no more than `spare_blocks`.
    """
    tokens = []
    for ask in asks:
        missing = ask.wanted - ask.slack
        blocks = min(-(-missing // block_size), max(spare_blocks, 0) // blocks_at_once) if missing > 0 else 0
        spare_blocks -= blocks * blocks_at_once
        tokens.append(min(ask.wanted, ask.slack + blocks * block_size))
    return tokens
