"""How many placeholders each running request gets, when drafts are made after scheduling. Pure.

Room that is not used costs no row of the forward pass, but it does take from the step's token budget and may take a KV
block, so it must never keep a request from being scheduled or push one out of the cache.
"""

from __future__ import annotations


def room_per_request(
    max_draft_tokens: int,
    *,
    num_running: int,
    has_waiting: bool,
    max_tokens_per_step: int,
    num_free_blocks: int,
    block_size: int,
) -> int:
    """Placeholders per request, the same for all.

    Args:
        max_draft_tokens: the configured most.
        num_running: requests that share the step.
        has_waiting: whether prompts wait; then half of the step's tokens are left to them.
        max_tokens_per_step: the scheduler's token budget.
        num_free_blocks: KV blocks that nobody owns.
        block_size: tokens per block.

    A request whose room spans c tokens touches at most ceil(c / block_size) blocks it does not own yet.
    """
    if num_running <= 0:
        return max_draft_tokens
    share = max_tokens_per_step // (2 if has_waiting else 1)
    by_tokens = share // num_running - 1
    by_blocks = (num_free_blocks // num_running - 1) * block_size
    return max(0, min(max_draft_tokens, by_tokens, by_blocks))
