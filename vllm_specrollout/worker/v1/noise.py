"""The noise of the V1 runner's samplers: one tape per request, read at the rows of a step.

Which noise it is depends on the platform, and it is stock vLLM's own: on CPU an integer per token seeds Gumbel noise,
on CUDA every token draws one exponential variate per entry of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from vllm_specrollout.types import IntArray
from vllm_specrollout.verify.tape import SeedArray, SeedTape, VectorTape
from vllm_specrollout.worker.seeds import RequestSeeds
from vllm_specrollout.worker.v1.requests import RequestEntry, Tape, node_seeds
from vllm_specrollout.worker.v1.sampler import ExponentialTapeSampler, TapeTopKTopPSampler

_SEEDS = 2**31  # the range stock vLLM draws from, in TopKTopPSampler.forward_cpu


class Noise(Protocol):
    """One engine's noise. `sampler` takes the place of vLLM's, and reads what was set for the step in progress."""

    sampler: TopKTopPSampler

    def tape(self, generator: torch.Generator | None) -> Tape:
        """A request's tape; a request without a seed gets one here, once."""
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


class SeedNoise:
    """CPU: the seeds of `fused_gumbel_argmax`."""

    def __init__(self, logprobs_mode: Any, seeds: RequestSeeds) -> None:
        self.sampler = TapeTopKTopPSampler(logprobs_mode)
        self._seeds = seeds

    def tape(self, generator: torch.Generator | None) -> SeedTape:
        own = generator if generator is not None else _seeded_generator(self._seeds, "cpu")

        def draw(count: int) -> SeedArray:
            """The integers that stock vLLM would draw one by one."""
            return torch.randint(0, _SEEDS, (count,), generator=own, dtype=torch.long).numpy()

        return SeedTape(draw)

    def set_roots(self, entries: Sequence[RequestEntry]) -> None:
        seeds = [0 if e.tape is None else e.tape.peek(1)[0] for e in entries]
        self.sampler.seeds = torch.tensor(seeds, dtype=torch.int64)

    def set_nodes(self, entries: Sequence[RequestEntry], node_start: IntArray, row_depth: IntArray) -> None:
        self.sampler.seeds = torch.from_numpy(node_seeds(entries, node_start, row_depth))

    def clear(self) -> None:
        self.sampler.seeds = None


class ExponentialNoise:
    """CUDA: vectors of exponential variates, drawn on the device one position after another, kept until used up."""

    def __init__(self, logprobs_mode: Any, vocab_size: int, device: torch.device, seeds: RequestSeeds) -> None:
        self.sampler = ExponentialTapeSampler(logprobs_mode)
        self._seeds = seeds
        self.vocab_size = vocab_size
        self.device = device
        # greedy rows do not look at it, but it must not be 0
        self._ones = torch.ones(vocab_size, dtype=torch.float32, device=device)

    def tape(self, generator: torch.Generator | None) -> VectorTape[torch.Tensor]:
        own = generator if generator is not None else _seeded_generator(self._seeds, self.device)

        def draw() -> torch.Tensor:
            """[vocab] what stock vLLM draws for one token."""
            return torch.empty(self.vocab_size, dtype=torch.float32, device=self.device).exponential_(generator=own)

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


def _depths_by_request(node_start: IntArray, row_depth: IntArray) -> Iterator[IntArray]:
    """[own rows] depths of each request's rows: its root's, then its nodes'."""
    for i in range(len(node_start) - 1):
        yield row_depth[int(node_start[i]) + i : int(node_start[i + 1]) + i + 1]


def _seeded_generator(seeds: RequestSeeds, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seeds.draw())
