"""An engine whose drafters run in processes of their own: what tests of both model runners ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind

from tests.e2e.identity.cases import Case
from vllm_specrollout.cluster.warm import WarmPool
from vllm_specrollout.drafters.decoupled import DecoupledDrafter

PATIENCE_S = 600.0  # for a process to begin, on a host that does much else; no test waits so long where all is well


@dataclass(frozen=True)
class Elsewhere:
    """The engine, drafters that may be attached to it, and requests with stock vLLM's answers."""

    llm: Any
    runner: Any
    pool: WarmPool
    requests: list[Case]
    truth: list[Any]

    @property
    def drafter(self) -> DecoupledDrafter:
        return self.runner.remote

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        (answer,) = self.llm.collective_rpc(method, args=args)
        return answer


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def decode(llm: Any, requests: Sequence[Case], before_step: Callable[[int], None]) -> list[Any]:
    """All at once, step by step; their outputs."""
    own = llm.llm_engine
    for i, request in enumerate(requests):
        params = request.sampling()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        own.add_request(str(i), {"prompt_token_ids": request.prompt}, params)
    found: dict[str, Any] = {}
    step = 0
    while own.has_unfinished_requests():
        before_step(step)
        found |= {output.request_id: output for output in own.step() if output.finished}
        step += 1
    return [found[str(i)] for i in range(len(requests))]
