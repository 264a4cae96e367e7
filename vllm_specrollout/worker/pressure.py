"""Drafts give way: before a step is scheduled, they are cut to what plain decoding has no use for.

vLLM's scheduler preempts a request when the KV cache has no block left for another one, and draft tokens ask for blocks
like any other. Any first part of a draft is a good draft, so cutting costs speed, never tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_specrollout.scheduling.lookahead import Ask, granted

_Base = Scheduler if TYPE_CHECKING else object


class DraftsGiveWay(_Base):
    """Mixed into vLLM's schedulers."""

    # slots that the next step's tokens will need before it is known what became of this one's
    slots_ahead = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if any(request.spec_token_ids for request in self.running):
            self._cut_drafts()
        return super().schedule(*args, **kwargs)

    def _cut_drafts(self) -> None:
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        managers = self.kv_cache_manager.coordinator.single_type_managers
        requests: list[Request] = []
        asks: list[Ask] = []
        for request in self.running:
            needed = request.num_tokens + request.num_output_placeholders
            owned = [len(m.req_to_blocks.get(request.request_id, ())) * m.block_size for m in managers]
            # what plain decoding takes, of every kind of block
            more = [max(0, -(-(needed - own) // m.block_size)) for own, m in zip(owned, managers, strict=True)]
            free -= sum(more)
            if request.spec_token_ids:
                sizes = zip(owned, more, managers, strict=True)
                slack = min(own + count * m.block_size - needed for own, count, m in sizes) - self.slots_ahead
                requests.append(request)
                asks.append(Ask(len(request.spec_token_ids), max(slack, 0)))
        # who waits would take what is free; and each running request may need another block soon
        is_short = bool(self.waiting) and len(self.running) < self.max_num_active_reqs
        spare = 0 if is_short else free - len(self.running) * len(managers)
        block_size = min(m.block_size for m in managers)
        for request, most in zip(requests, granted(asks, spare, block_size, len(managers)), strict=True):
            if most < len(request.spec_token_ids):
                request.spec_token_ids = request.spec_token_ids[:most]
