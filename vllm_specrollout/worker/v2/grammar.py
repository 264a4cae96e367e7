"""Chains under a grammar: the mask of a row follows from the drafts before it, and on this runner workers make drafts.

So the scheduler, whose process holds the grammars, asks the workers what they have drafted, and masks those rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_specrollout.patches import features

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2

# vLLM's mark for a draft that the grammar forbids; rows behind it are not masked, and no walk gets there
_FORBIDDEN = -1


def with_masks_for_drafts(runner: SpecRolloutV2) -> StructuredOutputsWorker | None:
    """vLLM's applier of masks, with room for a mask per row; its own has room for one per request."""
    stock = runner.structured_outputs_worker
    if stock is None:
        return None
    width = 1 + runner.max_draft_tokens
    most = runner.max_num_reqs * width
    if features.installed().mask_stride == "fixed":
        return StructuredOutputsWorker(
            max_num_logits=most, vocab_size=runner.vocab_size, device=runner.device, mask_stride=width
        )
    return StructuredOutputsWorker(
        # no step has more rows than its budget of tokens
        max_num_logits=min(most, max(runner.max_num_tokens, runner.max_num_reqs)),
        vocab_size=runner.vocab_size,
        device=runner.device,
        mask_stride=width,
        num_bonus_tokens=stock.num_bonus_tokens,
    )


def drafted_schedule(
    scheduler_output: SchedulerOutput,
    request_ids: Sequence[str],
    drafts: DraftTokenIds | None,
    requests: Mapping[str, Request],
    manager: StructuredOutputManager,
) -> SchedulerOutput:
    """A copy of a step's schedule in which the room of `request_ids` has become what was drafted into it.

    The row of a draft that the grammar forbids is masked like any other, so that draft is not sampled: the walk ends
    there at the latest, and it does not matter that the rows behind it allow everything.
    """
    drafted = {} if drafts is None else dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))
    step = copy.copy(scheduler_output)
    step.scheduled_spec_decode_tokens = {}
    for request_id in request_ids:
        tokens = drafted.get(request_id)
        if tokens:
            allowed = manager.validate_tokens(requests[request_id], list(tokens))
            step.scheduled_spec_decode_tokens[request_id] = allowed + [_FORBIDDEN] * (len(tokens) - len(allowed))
    return step
