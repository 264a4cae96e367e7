"""What a target tells drafters elsewhere of its requests: how their tokens are chosen, and with which noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.decoupled.counter import TAPE, NoiseKind
from vllm_specrollout.decoupled.following import Sampling
from vllm_specrollout.decoupled.messages import Noise
from vllm_specrollout.patches import features
from vllm_specrollout.verify.tape import SeedTape


class V1Noise:
    """What the V1 runner on CPU knows of its requests.

    Args:
        runner: our V1 runner.
    """

    kind = TAPE

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def sampling(self, request_id: str) -> Sampling:
        entry = self._entry(request_id)
        if entry.is_greedy:
            return Sampling(0.0)
        params = entry.state.sampling_params
        return Sampling(params.temperature, max(params.top_k, 0), params.top_p, params.min_p)

    def seeds(self, request_id: str, count: int) -> npt.NDArray[np.int64]:
        tape = self._entry(request_id).tape
        if not isinstance(tape, SeedTape):
            return np.zeros(0, dtype=np.int64)
        return tape.peek(count).copy()

    def _entry(self, request_id: str) -> Any:
        return self._runner.book.get(self._runner.requests[request_id])


class V2Noise:
    """What the V2 runner knows of its requests: vLLM's own copies on the host, so no step waits for the device.

    Args:
        runner: our V2 runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.kind = NoiseKind(Noise.COUNTER, features.installed().v2_noise)

    def sampling(self, request_id: str) -> Sampling:
        row, states = self._row(request_id), self._runner.sampler.sampling_states
        temperature, top_k = float(states.temperature.np[row]), int(states.top_k.np[row])
        if temperature == 0.0:
            return Sampling(0.0)
        # vLLM writes the whole vocabulary where a request has no such limit
        top_k = 0 if top_k == states.vocab_size else top_k
        return Sampling(temperature, top_k, float(states.top_p.np[row]), float(states.min_p.np[row]))

    def seeds(self, request_id: str, count: int) -> npt.NDArray[np.int64]:
        row, states = self._row(request_id), self._runner.sampler.sampling_states
        if states.temperature.np[row] == 0.0:
            return np.zeros(0, dtype=np.int64)
        return states.seeds.np[row : row + 1].astype(np.int64)

    def _row(self, request_id: str) -> int:
        row: int = self._runner.req_states.req_id_to_index[request_id]
        return row
