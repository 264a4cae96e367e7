"""Seeds of requests that come without one. Drawn here, and never from the process's own random states.

With the engine in a trainer's process those are the trainer's: its shuffles must not depend on how many requests ran.
"""

from __future__ import annotations

import numpy as np
from vllm.config import VllmConfig

_SEEDS = 1 << 62


class RequestSeeds:
    """One engine's source of seeds. Requests get theirs in the order of their arrival (arriving.py).

    Tensor-parallel ranks that schedule for themselves are given the same requests in the same order, so they agree on
    every seed. Engines of a data-parallel group draw different ones: samples of one problem may be spread over them.
    """

    def __init__(self, engine_seed: int, data_parallel_rank: int = 0) -> None:
        entropy = [engine_seed % (1 << 64), data_parallel_rank]
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> RequestSeeds:
        """The source that an engine's configuration stands for."""
        return cls(vllm_config.model_config.seed or 0, vllm_config.parallel_config.data_parallel_rank)

    def draw(self) -> int:
        """The next request's seed, at least 0 and below 2**62."""
        return int(self._rng.integers(0, _SEEDS))
