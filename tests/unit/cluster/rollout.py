"""A rollout without engines: a target engine, the drafters that it is linked to, and the mail between them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.reference.decoupled import VOCABULARY, FakeEngine, Wire, sampling, token_at
from vllm_specrollout.cluster.line import Line
from vllm_specrollout.cluster.link import Link
from vllm_specrollout.cluster.serving import Serving
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.types import DraftLimits, RequestBatch, RequestView

PROMPT = 3


@dataclass
class Other:
    """A drafter's process."""

    rollout: Rollout
    window: int
    wire: Wire
    hangs_until: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """It was killed, and is begun anew: it knows nothing of what was."""
        self.engine = FakeEngine(self.rollout.rng)
        self.serving = Serving(self.engine, self.wire, clock=lambda: self.rollout.now)

    def turn(self) -> None:
        if self.rollout.steps >= self.hangs_until:
            self.serving.turn()

    @property
    def lines(self) -> list[Line]:
        return [line for target in self.serving.targets.values() for line in target.lines.values()]


class Rollout:
    """
    Args:
        lengths: tokens of each answer.
        windows: of each drafter.
        late: as of `Wire`.
    """

    def __init__(
        self, seed: int, lengths: list[int], windows: list[int], fan_out: int, late: float = 0.0, most: int = 64
    ) -> None:
        self.rng = random.Random(seed)
        self.now, self.steps, self.accepted = 0.0, 0, 0
        self.fan_out = fan_out
        self.left = {str(i): length for i, length in enumerate(lengths)}
        self.tokens = {name: [token_at(int(name), at) for at in range(PROMPT)] for name in self.left}
        self.lengths = dict(self.left)
        self.drafter = DecoupledDrafter(sampling, 0, vocab_size=VOCABULARY, clock=lambda: self.now)
        self.others = [Other(self, window, Wire(self.rng, late, most)) for window in windows]
        for i in range(len(windows)):
            self.attach(i)

    def attach(self, index: int) -> None:
        other = self.others[index]
        self.drafter.link(str(index), other.wire.box(str(index)), window=other.window, fan_out=self.fan_out)

    @property
    def engine(self) -> FakeEngine:
        return self.others[0].engine

    @property
    def link(self) -> Link:
        return self.drafter.links["0"]

    @property
    def line(self) -> Line:
        (line,) = self.others[0].lines
        return line

    @property
    def is_over(self) -> bool:
        return not self.left

    def turn(self) -> None:
        for other in self.others:
            other.turn()

    def batch(self) -> RequestBatch:
        views = [
            RequestView(name, np.array(self.tokens[name], np.int32), PROMPT, left, name=f"client {name}")
            for name, left in self.left.items()
        ]
        return RequestBatch.of(views)

    def step(self) -> None:
        """One step of the target: drafts are verified, and each request gets its tokens."""
        batch = self.batch()
        limits = DraftLimits(np.minimum(batch.max_nodes, 32), batch.max_depth, batch.is_chain)
        trees = self.drafter.propose(batch, limits)
        for r, name in enumerate(batch.request_ids):
            begin, end = trees.node_start[r], trees.node_start[r + 1]
            tokens, parents = trees.token_ids[begin:end].tolist(), trees.parents[begin:end].tolist()
            assert end - begin <= 32 and all(0 <= token < VOCABULARY for token in tokens)
            at, own = -1, self.tokens[name]
            while True:
                token = token_at(int(name), len(own))
                own.append(token)
                self.left[name] -= 1
                nodes = zip(parents, tokens, strict=True)
                at = next((i for i, node in enumerate(nodes) if node == (at, token)), -2)
                if at == -2 or not self.left[name]:
                    break
                self.accepted += 1
            if not self.left[name]:
                del self.left[name]
                self.drafter.forget(name)
        self.steps += 1

    def run(self, turns: int = 3) -> None:
        while not self.is_over:
            self.gained(1, turns)

    def gained(self, steps: int, turns: int = 4) -> int:
        """Nodes accepted in so many steps."""
        before = self.accepted
        for _ in range(steps):
            for _ in range(turns):
                self.turn()
            self.step()
        return self.accepted - before

    def replan(self) -> None:
        """Other windows."""
        for link in self.drafter.links.values():
            link.window = self.rng.randint(1, 16)

    def check(self) -> None:
        """The target's very tokens."""
        for name, length in self.lengths.items():
            assert self.tokens[name] == [token_at(int(name), at) for at in range(PROMPT + length)]

    def check_nothing_is_left(self) -> None:
        """Once all that was said has come, of requests that are over."""
        for other in self.others:
            other.wire.late, other.hangs_until = 0.0, 0
        for _ in range(8):
            self.drafter.propose(self.batch(), DraftLimits(*(np.zeros(0, np.int32),) * 2, np.zeros(0, np.bool_)))
            self.turn()
            self.drafter.receive()
            self.now += 70.0
        assert not any(link.open for link in self.drafter.links.values())
        assert not any(other.lines or other.engine.running for other in self.others)
