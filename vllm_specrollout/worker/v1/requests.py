"""What the worker knows of each running request: its options, what may be drafted for it, and its noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_specrollout.types import Ending, IntArray, RequestView, Shape, Status
from vllm_specrollout.verify.tape import SeedArray, SeedTape, VectorTape
from vllm_specrollout.worker.admission import Admission, Desk
from vllm_specrollout.worker.request import RequestState

Tape = SeedTape | VectorTape[torch.Tensor]


class RequestEntry(RequestState):
    """One request, from admission to its end; it survives preemption."""

    __slots__ = ("admission", "state", "tape")

    def __init__(self, state: CachedRequestState, admission: Admission, tape: Tape | None) -> None:
        prompt = np.asarray(state.prompt_token_ids or [], dtype=np.int32)
        super().__init__(state.req_id, admission, prompt, len(prompt))
        self.state = state
        self.admission = admission
        # None for greedy requests
        self.tape = tape

    def ended(self, num_tokens: int, status: Status, weights_version: int) -> Ending:
        """What drafters are told at its end; `num_tokens` of the answer count."""
        output = np.asarray(self.state.output_token_ids[:num_tokens], dtype=np.int32)
        return self.ending(
            np.asarray(self.state.prompt_token_ids or [], dtype=np.int32), output, status, weights_version
        )


class RequestBook:
    """All requests the worker has seen and not forgotten."""

    def __init__(
        self,
        model_shape: Shape,
        make_tape: Callable[[torch.Generator | None], Tape],
        admitted: Callable[[RequestView], None] = lambda view: None,
    ) -> None:
        """Args:
        admitted: told of each request that may be drafted for.
        """
        self.desk = Desk(model_shape)
        self._make_tape = make_tape
        self._admitted = admitted
        self._entries: dict[str, RequestEntry] = {}
        # those that have no token yet
        self._fresh: dict[str, RequestEntry] = {}

    def get(self, state: CachedRequestState) -> RequestEntry:
        """The request's entry, made at its first sight."""
        entry = self._entries.get(state.req_id)
        if entry is None or entry.state is not state:
            entry = self._entries[state.req_id] = self._admit(state)
        return entry

    def forget(self, request_id: str) -> None:
        self._entries.pop(request_id, None)
        self._fresh.pop(request_id, None)

    def begun(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[tuple[int, RequestEntry]]:
        """Those that may be drafted for and got their first token in this step, with their places in the batch."""
        if not self._fresh:
            return []
        rows = zip(request_ids, tokens, strict=True)
        return [(i, self._fresh.pop(name)) for i, (name, own) in enumerate(rows) if own and name in self._fresh]

    def _admit(self, state: CachedRequestState) -> RequestEntry:
        params = state.sampling_params
        assert params is not None, "pooling requests never reach a generating engine"
        admission = self.desk.admit(params, state.prompt_token_ids, has_prompt_embeds=state.prompt_embeds is not None)
        tape = None if params.temperature < 1e-5 else self._make_tape(state.generator)
        entry = RequestEntry(state, admission, tape)
        if admission.shape is not Shape.OFF:
            self._admitted(entry.view)
            self._fresh[state.req_id] = entry
        return entry


def node_seeds(entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> SeedArray:
    """[rows] the noise seed of each logits row: that of its position in its request; 0 for greedy requests."""
    seeds = np.zeros(len(row_depth), dtype=np.int64)
    for i, entry in enumerate(entries):
        if entry.tape is None:
            continue
        begin, end = int(node_start[i]) + i, int(node_start[i + 1]) + i + 1
        depths = row_depth[begin:end]
        seeds[begin:end] = entry.tape.peek(int(depths.max()) + 1)[depths]
    return seeds
