"""What the worker knows of each running request: its options, what may be drafted for it, and its noise.

Which noise it is depends on platform and version, and it is stock vLLM's own: on CPU an integer per token seeds Gumbel
noise, on CUDA, and on CPU before vLLM 0.32, every token draws one exponential variate per entry of the vocabulary. Each
request has a tape of it, read at the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, sample_with_exponential_noise
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_specrollout import _core
from vllm_specrollout.trees.batch import cut
from vllm_specrollout.trees.tape import SeedArray, SeedTape, VectorTape
from vllm_specrollout.types import DraftMode, FinishedRequest, FinishReason, IntArray, RequestView, TreeBatch
from vllm_specrollout.worker.request import Admission, Desk, RequestState
from vllm_specrollout.worker.v1.sampler import ExponentialTapeSampler, TapeTopKTopPSampler

Tape = SeedTape | VectorTape[torch.Tensor]

MOST_NOISE_BYTES = 256 << 20
"""Of the noise of all drafts of one step, where it holds one float per node and entry of the vocabulary."""
_SEEDS = 2**31  # the range stock vLLM draws from, in TopKTopPSampler.forward_cpu


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

    @property
    def is_greedy(self) -> bool:
        return self.tape is None

    @property
    def temperature(self) -> float:
        assert self.state.sampling_params is not None
        return self.state.sampling_params.temperature

    def ended(self, num_tokens: int, status: FinishReason, weights_version: int) -> FinishedRequest:
        """What drafters are told at its end; `num_tokens` of the answer count."""
        output = np.asarray(self.state.output_token_ids[:num_tokens], dtype=np.int32)
        return self.ending(
            np.asarray(self.state.prompt_token_ids or [], dtype=np.int32), output, status, weights_version
        )


class RequestBook:
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
        tape = None
        if params.temperature >= 1e-5:
            assert state.generator is not None, "whoever arrives without a seed is given one (arriving.py)"
            tape = self._make_tape(state.generator)
        if tape is not None and (resume := admission.options.resume) is not None:
            tape.skip(len(state.output_token_ids) if resume.drawn is None else resume.drawn)
        entry = RequestEntry(state, admission, tape)
        if admission.shape is not DraftMode.OFF:
            self._admitted(entry.view)
            self._fresh[state.req_id] = entry
        return entry


class Noise(Protocol):
    """One engine's noise. `sampler` takes the place of vLLM's, and reads what was set for the step in progress."""

    sampler: TopKTopPSampler
    # drafts of one step, all requests together, at most; None: as many as there are
    most_nodes: int | None

    def tape(self, generator: torch.Generator) -> Tape:
        """A request's tape, drawn from its own generator."""
        ...

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        """One row per request follows, each at its request's next position."""
        ...

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        """A root row and its nodes' rows per request follow; arguments as in `node_seeds`."""
        ...

    def clear(self) -> None:
        """The step is sampled."""
        ...

    def choose(self, logits: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        """[R] int64 the tokens that these logits [R, vocab] float32 and the noise so far ahead choose; the best ones of
        greedy requests. A drafter's logits, then, are met by the target's own noise."""
        ...


class SeedNoise:
    """CPU from vLLM 0.32 on: the seeds of `fused_gumbel_argmax`."""

    most_nodes = None

    def __init__(self, logprobs_mode: Any) -> None:
        self.sampler = TapeTopKTopPSampler(logprobs_mode)

    def tape(self, generator: torch.Generator) -> SeedTape:
        def draw(count: int) -> SeedArray:
            """The integers that stock vLLM would draw one by one."""
            return torch.randint(0, _SEEDS, (count,), generator=generator, dtype=torch.long).numpy()

        return SeedTape(draw)

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        seeds = [0 if e.tape is None else e.tape.peek(1)[0] for e in entries]
        self.sampler.seeds = torch.tensor(seeds, dtype=torch.int64)

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        self.sampler.seeds = torch.from_numpy(node_seeds(entries, node_start, row_depth))

    def clear(self) -> None:
        self.sampler.seeds = None

    def choose(self, logits: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        seeds = [0 if e.tape is None else e.tape.peek(depth + 1)[depth] for e in entries]
        chosen = torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds, dtype=torch.int64)).to(torch.int64)
        return _greedy_where_asked(chosen, logits, entries)


class ExponentialNoise:
    """CUDA, and CPU before vLLM 0.32: vectors of exponential variates, drawn on the device one position after another,
    kept until used up."""

    def __init__(self, logprobs_mode: Any, vocab_size: int, device: torch.device) -> None:
        self.sampler = ExponentialTapeSampler(logprobs_mode)
        self.vocab_size = vocab_size
        self.most_nodes = MOST_NOISE_BYTES // (4 * vocab_size)
        self.device = device
        # greedy rows do not look at it, but it must not be 0
        self._ones = torch.ones(vocab_size, dtype=torch.float32, device=device)

    def tape(self, generator: torch.Generator) -> VectorTape[torch.Tensor]:
        def draw() -> torch.Tensor:
            """[vocab] what stock vLLM draws for one token."""
            return torch.empty(self.vocab_size, dtype=torch.float32, device=self.device).exponential_(
                generator=generator
            )

        return VectorTape(draw)

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        self.sampler.noise = torch.stack([self._ones if e.tape is None else e.tape.peek(1)[0] for e in entries])

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        rows: list[torch.Tensor] = []
        for entry, depths in zip(entries, _depths_by_request(node_start, row_depth), strict=True):
            if entry.tape is None:
                rows += [self._ones] * len(depths)
            else:
                by_depth = entry.tape.peek(int(depths.max()) + 1)
                rows += [by_depth[depth] for depth in depths.tolist()]
        self.sampler.noise = torch.stack(rows)

    def clear(self) -> None:
        self.sampler.noise = None

    def choose(self, logits: torch.Tensor, entries: Sequence[RequestEntry], depth: int) -> torch.Tensor:
        noise = torch.stack([self._ones if e.tape is None else e.tape.peek(depth + 1)[depth] for e in entries])
        chosen = sample_with_exponential_noise(logits.softmax(dim=-1), noise).view(-1).to(torch.int64)
        return _greedy_where_asked(chosen, logits, entries)


def fewer(trees: TreeBatch, most_nodes: int | None) -> TreeBatch:
    """The trees, cut to equal shares where they are too many nodes together."""
    if most_nodes is None or trees.num_nodes <= most_nodes:
        return trees
    share = most_nodes // np.count_nonzero(trees.sizes)
    return cut(trees, np.full(trees.num_requests, share, dtype=np.int32))


def _greedy_where_asked(chosen: torch.Tensor, logits: torch.Tensor, entries: Sequence[RequestEntry]) -> torch.Tensor:
    is_greedy = [entry.tape is None for entry in entries]
    if not any(is_greedy):
        return chosen
    return torch.where(torch.tensor(is_greedy, device=logits.device), logits.argmax(dim=-1), chosen)


def _depths_by_request(node_start: IntArray, row_depth: IntArray) -> Iterator[IntArray]:
    """[own rows] depths of each request's rows: its root's, then its nodes'."""
    for i in range(len(node_start) - 1):
        yield row_depth[int(node_start[i]) + i : int(node_start[i + 1]) + i + 1]


def node_seeds(entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> SeedArray:
    """[rows] the noise seed of each logits row: that of its position in its request; 0 for greedy requests."""
    levels = int(row_depth.max()) + 1
    coming = [None if entry.tape is None else entry.tape.peek(levels) for entry in entries]
    return _core.by_depth(coming, node_start, row_depth)
