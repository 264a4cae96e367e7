"""State of a running request in a worker, from its admission to its end; the same for both model runners."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import vllm.envs
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_specrollout.config import RequestOptions, parse_request
from vllm_specrollout.config.resuming import asks_for_watermark
from vllm_specrollout.history.problems import Attribution, prompt_hash
from vllm_specrollout.scheduling.support import RequestTraits, request_shape
from vllm_specrollout.trees.tape import SeedTape, VectorTape
from vllm_specrollout.types import Answer, DraftMode, FinishReason, IntArray, RequestView
from vllm_specrollout.worker.arriving import attribution_of, ends_of_grammar, is_session

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

logger = init_logger("vllm.specrollout")

Tape = SeedTape | VectorTape[torch.Tensor]
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
    # [E] int32, ascending: as in `RequestView`
    ends: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def max_draft_tokens(self) -> int:
        limit = self.options.max_draft_tokens
        return limit if limit is not None else 1 << 30


def ends_of(params: SamplingParams) -> IntArray:
    """[E] int32, ascending: the tokens that end an answer (vLLM's `check_stop`), those of the model's config included.

    `min_tokens` leaves none of them out: until then none is sampled.
    """
    eos = params.eos_token_id  # None: there is none, or it is ignored
    given = [*(params.stop_token_ids or ()), *([] if eos is None else [eos]), *ends_of_grammar(params)]
    return np.unique(np.asarray(given, dtype=np.int32))


class Admissions:
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
        drafts_sessions: bool = True,
        replays_traces: bool = False,
    ) -> Admission:
        """Args:
        follows_one_line: why this runner can only draft chains for the request; empty if it can draft trees.
        drafts_sessions: whether this runner admits a session anew with each of its parts.
        replays_traces: whether a trace's tokens stand for the target's own where this runner judges drafts.
        """
        options = parse_request((params.extra_args or {}).get("spec_rollout"))
        shape, reason = request_shape(
            RequestTraits(
                is_enabled=options.enabled and options.max_draft_tokens != 0,
                has_grammar=params.structured_outputs is not None,
                has_thinking_budget=params.thinking_token_budget is not None,
                has_prompt_embeds=has_prompt_embeds,
                is_watermarked=asks_for_watermark(params),
                is_trace_replay=bool(params.trace_decode_token_ids) and not replays_traces,
                ends_amid_drafts=is_session(params) and not (drafts_sessions and params.repetition_detection is None),
            )
        )
        if follows_one_line and shape is DraftMode.TREE:
            shape, reason = DraftMode.CHAIN, follows_one_line
        if reason:
            self._note(shape, reason)
        if self.model_shape is not DraftMode.TREE and shape is DraftMode.TREE:
            shape = self.model_shape
        found = attribution_of(params) or Attribution(options.problem_id or prompt_hash(prompt_token_ids))
        return Admission(
            options,
            found.problem_id,
            shape,
            params.max_tokens if params.max_tokens is not None else 1 << 30,
            found.continues,
            ends_of(params),
        )

    def _note(self, shape: DraftMode, reason: str) -> None:
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        logger.info_once("Drafts for some requests are %s: %s", _EFFECT[shape], reason)


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
            ends=admission.ends,
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

    def ending(self, prompt_ids: IntArray, token_ids: IntArray, status: FinishReason, weights_version: int) -> Answer:
        """What drafters are told at its end.

        Args:
            prompt_ids, token_ids: int32 the prompt, and the answer without what was sampled beyond its end.
        """
        view = self.view
        return Answer(
            view.request_id,
            view.problem_id,
            np.array(prompt_ids, dtype=np.int32),
            np.array(token_ids, dtype=np.int32),
            status,
            weights_version,
            view.name,
        )


class RequestEntry(RequestState):
    """One request, from admission to its end; it survives preemption."""

    __slots__ = ("admission", "noise", "state", "tape")

    def __init__(self, state: CachedRequestState, admission: Admission, noise: Tape | None, *, is_greedy: bool) -> None:
        prompt = np.asarray(state.prompt_token_ids or [], dtype=np.int32)
        super().__init__(state.req_id, admission, prompt, len(prompt))
        self.state = state
        self.admission = admission
        # of a session's greedy part, what goes on in a later one
        self.noise = noise
        # None for greedy requests
        self.tape = None if is_greedy else noise

    @property
    def is_greedy(self) -> bool:
        return self.tape is None

    @property
    def temperature(self) -> float:
        assert self.state.sampling_params is not None
        return self.state.sampling_params.temperature

    def ended(self, num_tokens: int, status: FinishReason, weights_version: int) -> Answer:
        """What drafters are told at its end; `num_tokens` of the answer count."""
        output = np.asarray(self.state.output_token_ids[:num_tokens], dtype=np.int32)
        return self.ending(
            np.asarray(self.state.prompt_token_ids or [], dtype=np.int32), output, status, weights_version
        )

    def part_ended(self, weights_version: int) -> Answer:
        """What drafters are told of a session's part, once the next one is there."""
        count = len(self.state.output_token_ids)
        status = FinishReason.FINISHED if count < self.admission.max_tokens else FinishReason.TRUNCATED
        return self.ended(count, status, weights_version)


class RequestBook(Admissions):
    """All requests the worker has seen and not forgotten."""

    def __init__(
        self,
        model_shape: DraftMode,
        make_tape: Callable[[torch.Generator], Tape],
        admitted: Callable[[RequestView], None] = lambda view: None,
    ) -> None:
        """Args:
        admitted: told of each request that may be drafted for.
        """
        super().__init__(model_shape)
        self._make_tape = make_tape
        self._admitted = admitted
        self._entries: dict[str, RequestEntry] = {}
        # of the batch that was asked for last, in its order; names are left out once one of them is another request's
        self._batch_ids: list[str] = []
        self._batch: list[RequestEntry] = []
        # those that have no token yet
        self._fresh: dict[str, RequestEntry] = {}

    def get(self, state: CachedRequestState) -> RequestEntry:
        """The request's entry, made at its first sight."""
        entry = self._entries.get(state.req_id)
        if entry is None or entry.state is not state:
            entry = self._entries[state.req_id] = self._admit(state)
        return entry

    def of_batch(self, request_ids: list[str], states: Mapping[str, CachedRequestState]) -> list[RequestEntry]:
        """The requests' entries, in this order: the very same list while the batch is the same."""
        if request_ids != self._batch_ids:
            self._batch = [self.get(states[request_id]) for request_id in request_ids]
            self._batch_ids = request_ids.copy()
        return self._batch

    def forget(self, request_id: str) -> None:
        self._batch_ids, self._batch = [], []
        self._entries.pop(request_id, None)
        self._fresh.pop(request_id, None)

    def begun(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[tuple[int, RequestEntry]]:
        """Those that may be drafted for and got their first token in this step, with their places in the batch."""
        if not self._fresh:
            return []
        rows = zip(request_ids, tokens, strict=True)
        return [(i, self._fresh.pop(name)) for i, (name, own) in enumerate(rows) if own and name in self._fresh]

    def next_part(self, state: CachedRequestState) -> None:
        """A session goes on (vLLM's streaming input): its prompt, its limits and its ends are the new part's.

        Its noise goes on where it was, as vLLM keeps one generator per session.
        """
        self._batch_ids = []
        before = self._entries.pop(state.req_id, None)
        self._entries[state.req_id] = self._admit(state, None if before is None else before.noise)

    def _admit(self, state: CachedRequestState, noise: Tape | None = None) -> RequestEntry:
        params = state.sampling_params
        assert params is not None, "pooling requests never reach a generating engine"
        admission = self.admit(params, state.prompt_token_ids, has_prompt_embeds=state.prompt_embeds is not None)
        is_greedy = params.temperature < 1e-5
        if noise is None and not is_greedy:
            assert state.generator is not None, "whoever arrives without a seed is given one (arriving.py)"
            noise = self._make_tape(state.generator)
            if (resume := admission.options.resume) is not None:
                noise.skip(len(state.output_token_ids) if resume.drawn is None else resume.drawn)
        entry = RequestEntry(state, admission, noise, is_greedy=is_greedy)
        if admission.shape is not DraftMode.OFF:
            self._admitted(entry.view)
            self._fresh[state.req_id] = entry
        return entry
