"""What may be drafted for a request, decided once at its admission; the same for both model runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_specrollout.config import RequestOptions, parse_request
from vllm_specrollout.config.resuming import asks_for_watermark
from vllm_specrollout.history.problems import Attribution, prompt_hash
from vllm_specrollout.support import RequestTraits, request_shape
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.arriving import attribution_of

logger = init_logger("vllm.specrollout")

_EFFECT = {DraftMode.CHAIN: "chains only", DraftMode.OFF: "off", DraftMode.TREE: "on"}


@dataclass(frozen=True, slots=True)
class Admission:
    """What holds for a request from its admission to its end."""

    options: RequestOptions
    problem_id: str
    shape: DraftMode
    max_tokens: int
    continues: bool = False
    """Whether it goes on from an earlier request's answer."""

    @property
    def max_draft_tokens(self) -> int:
        limit = self.options.max_draft_tokens
        return limit if limit is not None else 1 << 30


class Desk:
    """Admits requests for one engine, and remembers why some got less than trees."""

    def __init__(self, model_shape: DraftMode) -> None:
        self.model_shape = model_shape
        self._reasons: dict[str, int] = {}

    def reasons(self) -> dict[str, int]:
        """Why requests got less than trees, and how many did."""
        return dict(self._reasons)

    def admit(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | None,
        *,
        has_prompt_embeds: bool,
        follows_one_line: str = "",
    ) -> Admission:
        """Args:
        follows_one_line: why this runner can only draft chains for the request; empty if it can draft trees.
        """
        options = parse_request((params.extra_args or {}).get("spec_rollout"))
        shape, reason = request_shape(
            RequestTraits(
                is_enabled=options.enabled and options.max_draft_tokens != 0,
                has_grammar=params.structured_outputs is not None,
                has_thinking_budget=params.thinking_token_budget is not None,
                has_prompt_embeds=has_prompt_embeds,
                is_watermarked=asks_for_watermark(params),
                is_trace_replay=bool(params.trace_decode_token_ids),
            )
        )
        if follows_one_line and shape is DraftMode.TREE:
            shape, reason = DraftMode.CHAIN, follows_one_line
        if reason:
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
            logger.info_once("Drafts for some requests are %s: %s", _EFFECT[shape], reason)
        if self.model_shape is not DraftMode.TREE and shape is DraftMode.TREE:
            shape = self.model_shape
        found = attribution_of(params) or Attribution(options.problem_id or prompt_hash(prompt_token_ids))
        return Admission(
            options,
            found.problem_id,
            shape,
            params.max_tokens if params.max_tokens is not None else 1 << 30,
            found.continues,
        )
