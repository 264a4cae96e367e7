"""What a worker knows of a running request, from its admission to its end; the same for both model runners."""

from __future__ import annotations

import re

import numpy as np
import vllm.envs

from vllm_specrollout.types import FinishedRequest, FinishReason, IntArray, RequestView
from vllm_specrollout.worker.admission import Admission

# what vLLM appends to the name that a client knows, so that no two requests share one
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}")
_SUFFIX_LENGTH = 9


def external_name(request_id: str) -> str:
    """The name under which a client knows a request (with `index_` before it for samples of `n > 1`)."""
    # no cache: clients choose ids of any length, and one that is over must not stay; so only the end is looked at
    has_suffix = _RANDOM_SUFFIX.fullmatch(request_id[-_SUFFIX_LENGTH:])
    if not has_suffix or vllm.envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return request_id[:-_SUFFIX_LENGTH]


class RequestState:
    """One request: what holds for it, and the view of it that drafters and budgets keep."""

    __slots__ = ("_max_tokens", "_own_limit", "view")

    def __init__(self, request_id: str, admission: Admission, token_ids: IntArray, num_prompt: int) -> None:
        self._max_tokens = admission.max_tokens
        self._own_limit = admission.max_draft_tokens
        self.view = RequestView(
            request_id,
            token_ids,
            num_prompt,
            admission.max_tokens,
            admission.shape,
            admission.max_draft_tokens,
            admission.problem_id,
            name=external_name(request_id),
            continues=admission.continues,
        )

    def seen(
        self, token_ids: IntArray, max_model_len: int, weights_version: int, room: int | None = None
    ) -> RequestView:
        """The view as the request stands now.

        Args:
            token_ids: [num_tokens] int32 prompt and output so far.
            room: draft tokens that were left room for; None: as many as the request itself allows.
        """
        view, length = self.view, len(token_ids)
        view.token_ids = token_ids
        view.max_new_tokens = min(self._max_tokens - (length - view.num_prompt_tokens), max_model_len - length)
        view.max_draft_tokens = self._own_limit if room is None else min(room, self._own_limit)
        view.weights_version = weights_version
        return view

    def ending(
        self, prompt_ids: IntArray, token_ids: IntArray, status: FinishReason, weights_version: int
    ) -> FinishedRequest:
        """What drafters are told at its end.

        Args:
            prompt_ids, token_ids: int32 the prompt, and the answer without what was sampled beyond its end.
        """
        view = self.view
        return FinishedRequest(
            view.request_id,
            view.problem_id,
            np.array(prompt_ids, dtype=np.int32),
            np.array(token_ids, dtype=np.int32),
            status,
            weights_version,
            view.name,
        )
