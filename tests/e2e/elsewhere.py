"""An engine whose drafters run in processes of their own: what tests of both model runners ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind

from tests.e2e.identity.cases import Case
from vllm_specrollout.cluster.child import WarmDrafter
from vllm_specrollout.cluster.link import Link
from vllm_specrollout.cluster.messages import DraftUpdate, Hello, Message, VerifierUpdate, ints, longs
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.trees.build import depths

PATIENCE_S = 600.0  # for a process to begin, on a host that does much else; no test waits so long where all is well


@dataclass(frozen=True)
class Elsewhere:
    """The engine, drafters that may be attached to it, and requests with stock vLLM's answers."""

    llm: Any
    runner: Any
    pool: dict[str, WarmDrafter]
    requests: list[Case]
    truth: list[Any]

    @property
    def drafter(self) -> DecoupledDrafter:
        return self.runner.remote

    def is_ready(self, name: str) -> bool:
        self.pool[name].wake()
        return bool(self.pool[name].address)

    def overheard(self, name: str) -> Overheard:
        """The drafter's mail, overheard from now on."""
        link = self.drafter.links[name]
        return link._mail if isinstance(link._mail, Overheard) else Overheard(link)

    def has_answered(self, name: str, levels: int = 2) -> bool:
        mail = self.overheard(name)
        self.drafter.receive()
        return mail.has_answered(levels)

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        (answer,) = self.llm.collective_rpc(method, args=args)
        if method == "attach_drafter" and "cause" not in answer:
            self.overheard(args[0])
        return answer


class Overheard:
    """Mail of a link, and what was said through it: to which token each request was told of, and drafted behind."""

    def __init__(self, link: Link) -> None:
        self.mail, self.address = link._mail, link.address
        self.told: dict[int, int] = {}
        # tokens before the newest tree, and its levels
        self.trees: dict[int, tuple[int, int]] = {}
        self.windows: set[int] = set()
        link._mail = self

    def send(self, message: Message) -> bool:
        if isinstance(message, VerifierUpdate):
            for opened in message.opened:
                self.told[opened.handle] = len(ints(opened.token_ids))
            for handle, count in zip(longs(message.handles).tolist(), ints(message.counts).tolist(), strict=True):
                self.told[handle] += count
            for handle in longs(message.closed).tolist():
                self.told.pop(handle, None)
            self.windows.add(message.window)
        return self.mail.send(message)

    def receive(self) -> Iterator[Message]:
        for message in self.mail.receive():
            if isinstance(message, Hello):
                # it was begun anew, and knows of no request
                self.told.clear()
            if isinstance(message, DraftUpdate):
                starts, parents = ints(message.node_start).tolist(), ints(message.parents)
                for i, handle in enumerate(longs(message.handles).tolist()):
                    levels = depths(parents[starts[i] : starts[i + 1]]).max(initial=0)
                    self.trees[handle] = int(ints(message.positions)[i]), int(levels)
            yield message

    def close(self) -> None:
        self.mail.close()

    def has_answered(self, levels: int = 2) -> bool:
        """Whether so many levels were drafted behind the newest token of half of the requests that it was told of.

        The step that comes adds a token: of two levels, one is verified in the step after it.
        """
        found = [self.trees.get(handle, (0, 0)) for handle in self.told]
        held = [own[0] == told and own[1] >= levels for own, told in zip(found, self.told.values(), strict=True)]
        return 2 * sum(held) >= len(held)


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
