"""How many placeholders each running request gets, when drafts are made after scheduling. Pure.

Room that is not used costs no row of the forward pass, but it does take from the step's token budget and may take a KV
block, so it must never keep a request from being scheduled or push one out of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 8
"""Steps in a row that may yield no draft before trying is paused."""
LONGEST_PAUSE = 32


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
        has_waiting: whether prompts wait, or are computed in part; then half of the step's tokens and of the free
            blocks are left to them.
        max_tokens_per_step: the scheduler's token budget.
        num_free_blocks: KV blocks that nobody owns.
        block_size: tokens per block.

    A request whose room spans c tokens touches at most ceil(c / block_size) blocks it does not own yet.
    """
    if num_running <= 0:
        return max_draft_tokens
    part = 2 if has_waiting else 1
    by_tokens = max_tokens_per_step // part // num_running - 1
    by_blocks = (num_free_blocks // part // num_running - 1) * block_size
    return max(0, min(max_draft_tokens, by_tokens, by_blocks))


@dataclass(slots=True)
class Pause:
    """When to leave no room at all: a step with room must wait for the tokens before it, which costs time for nothing
    while nothing is drafted. Pauses double from 2 steps to LONGEST_PAUSE, and end with the first draft."""

    dry: int = 0
    until: int = 0

    def tried(self, step: int, has_drafted: bool) -> None:
        """Room was left in this step, and drafted into or not."""
        self.dry = 0 if has_drafted else self.dry + 1
        excess = self.dry - PATIENCE
        self.until = step + min(LONGEST_PAUSE, 2 << min(excess, 10)) if excess >= 0 else 0

    def is_over(self, step: int) -> bool:
        return step >= self.until
