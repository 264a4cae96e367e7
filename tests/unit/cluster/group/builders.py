"""A group without engines and processes: what is sent lies in lists, and a schedule says who moves next."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from vllm_specrollout.cluster.group.coordinator import Coordinator, Rules, turn
from vllm_specrollout.cluster.group.dealing import Ask, Dealer
from vllm_specrollout.cluster.group.member import BEAT_S, Member
from vllm_specrollout.cluster.group.messages import Link, Message, Piece, Run, decode, encode


def token(request: str, position: int) -> int:
    """What every engine samples there."""
    return random.Random(f"{request} {position}").randrange(1000)


def length(request: str) -> int:
    return random.Random(f"length {request}").randint(1, 30)


def truth(request: str) -> tuple[int, ...]:
    return tuple(token(request, position) for position in range(length(request)))


class FakeEngine:
    """Samples `token`, some tokens a step; the seed is of how many."""

    places = 3

    def __init__(self, name: str, seed: int) -> None:
        self.drafter = f"ipc:///tmp/{name}"
        # every other worker has another model
        self.drafter_model = ("small", "tiny")[int(name[1:]) % 2]
        self.method = ""
        self.steps = 0
        # request -> tokens so far; what it holds of memory
        self.held: dict[str, int] = {}
        self.aborted_at: dict[str, int] = {}
        self._links: dict[str, tuple[str, ...]] = {}
        self._rng = random.Random(seed)

    def add(self, run: Run) -> None:
        if "refused" in run.request:
            raise ValueError("too long")
        assert run.answer == truth(run.request)[: len(run.answer)]
        self.held[run.request] = len(run.answer)

    def abort(self, request: str) -> None:
        self.held.pop(request, None)
        self.aborted_at[request] = self.steps

    def step(self) -> Sequence[Piece]:
        self.steps += 1
        pieces = []
        for request, start in list(self.held.items()):
            end = min(start + self._rng.randint(0, 3), length(request))
            if end == start:
                continue
            is_over = end == length(request)
            pieces.append(
                Piece(request, start, truth(request)[start:end], finish="stop" if is_over else "", reason="2")
            )
            self.held[request] = end
            if is_over:
                del self.held[request]
        return pieces

    def tries(self, request: str) -> tuple[int, int]:
        return 10, random.Random(f"rate {request}").randint(0, 10)

    def draft_with(self, method: str) -> None:
        self.method = method

    def attach(self, drafter: str, address: str, requests: Sequence[str]) -> None:
        assert address
        self._links[drafter] = tuple(requests)

    def detach(self, drafter: str) -> None:
        self._links.pop(drafter, None)

    def links(self) -> Sequence[Link]:
        return [Link(*one) for one in self._links.items()]


class Wire:
    """A worker's end: two lists."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.to_come: list[bytes] = []

    def send(self, message: Message) -> None:
        self.out.append(encode(message))

    def receive(self) -> list[Message]:
        taken, self.to_come = self.to_come, []
        return [decode(one) for one in taken]


class WireHub:
    """The other end of all of them."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = defaultdict(Wire)

    def send(self, worker: str, message: Message) -> None:
        self.wires[worker].to_come.append(encode(message))

    def receive(self) -> list[tuple[str, Message]]:
        taken = [(name, decode(one)) for name, wire in self.wires.items() for one in wire.out]
        for wire in self.wires.values():
            wire.out.clear()
        return taken


class World:
    """A driver, workers and a coordinator.

    Args:
        requests: names, or whole requests.
        make_engine: of a worker's name and a seed.
    """

    def __init__(
        self,
        requests: Sequence[str | Ask],
        workers: int,
        rules: Rules,
        seed: int,
        make_engine: Callable[[str, int], Any] = FakeEngine,
    ) -> None:
        self.rng = random.Random(seed)
        self._make_engine = make_engine
        self.now = 0.0
        self.rules = rules
        self.dealer = Dealer([one if isinstance(one, Ask) else Ask(one, (1, 2), {"seed": 1}) for one in requests])
        self.driver, self.commands = WireHub(), WireHub()
        self.engines: dict[str, Any] = {}
        self.members: dict[str, Member] = {}
        self.coordinator: Coordinator | None = Coordinator(rules)
        # workers that are gone, and the driver does not know
        self.unnoticed: list[str] = []
        self._names = 0
        self._called, self._call_at = 0, 0.0
        # workers whose drafters are dead, or load
        self.without_drafter: set[str] = set()
        for _ in range(workers):
            self.hire()

    def hire(self) -> str:
        name, self._names = f"w{self._names}", self._names + 1
        self.engines[name] = self._make_engine(name, self.rng.randrange(1 << 30))
        self.members[name] = Member(
            self.engines[name], self.driver.wires[name], self.commands.wires[name], lambda: self.now
        )
        return name

    def kill(self, name: str) -> None:
        del self.members[name]
        self.unnoticed.append(name)
        # what it said last reaches the coordinator, and may not reach the driver
        said = self.driver.wires[name].out
        del said[self.rng.randint(0, len(said)) :]

    def notice(self) -> None:
        """The driver sees whose process has ended."""
        for name in self.unnoticed:
            self.turn_driver()
            self.dealer.lose(name)
        self.unnoticed.clear()

    def turn_driver(self) -> None:
        for name, message in self.driver.receive():
            if name in self.members or name in self.unnoticed:
                self.dealer.take(name, message)
        if self.now >= self._call_at:
            self._called, self._call_at = self._called + 1, self.now + BEAT_S
            self.dealer.call({name: name not in self.without_drafter for name in self.members}, self._called)
        self.send(self.dealer.due())

    def lose_one(self) -> None:
        """One message between the driver and a worker does not arrive."""
        on_the_way = [own for wire in self.driver.wires.values() for own in (wire.out, wire.to_come) if own]
        if on_the_way:
            own = self.rng.choice(on_the_way)
            del own[self.rng.randrange(len(own))]

    def send(self, out: Sequence[tuple[str, Message]]) -> None:
        for name, message in out:
            self.driver.send(name, message)

    def turn_coordinator(self) -> None:
        if self.coordinator is not None:
            turn(self.coordinator, self.commands, self.now)

    def turn(self, name: str) -> None:
        self.now += self.rng.uniform(0.0, 0.3)
        self.members[name].turn()
        if self.coordinator is None:
            self.commands.wires[name].out.clear()

    def turn_all(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            for name in list(self.members):
                self.turn(name)
            self.turn_driver()
            self.turn_coordinator()
