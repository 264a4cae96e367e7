"""A verifier and its drafters in one thread, with the lines between them: what is drafted, lost, doubled and late."""

import random

import numpy as np

from tests.reference.decoupled import VOCABULARY, FakeEngine, FakeNoise, Line, token_at
from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.following import OwnPlan
from vllm_specrollout.cluster.link import Link
from vllm_specrollout.cluster.loop import Loop
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.types import DraftLimits, FinishedRequest, FinishReason, RequestBatch, RequestView

PROMPT = [7, 8, 9]


class Elsewhere:
    """A drafter's process, and the line to it. It stays when its verifier leaves."""

    def __init__(self, seed: int, chance: float = 0.0) -> None:
        self.line = Line(random.Random(seed), chance)
        self.rng = random.Random(seed + 1)
        self.hangs_until = 0
        self.now = 0.0
        self.begin()

    def begin(self) -> None:
        """A process that knows of nothing."""
        self.engine = FakeEngine(random.Random(self.rng.random()))
        self.loop = Loop(self.engine, self.line.ends[1], clock=lambda: self.now, stays=True)

    def restart(self) -> None:
        """The process is gone with all that it knew; another one begins."""
        self.begin()
        self.loop._greet()


class Rollout:
    """Requests that decode to their end, with drafts from elsewhere.

    Args:
        windows: of each drafter.
        kind: of noise.
    """

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        windows: list[int],
        fan_out: int,
        chance: float = 0.0,
        kind: NoiseKind = TAPE,
    ) -> None:
        self.rng = random.Random(seed)
        self.noise = FakeNoise(kind)
        self.others = [Elsewhere(seed + 10 * i, chance) for i in range(1, 1 + len(windows))]
        self.now = 0.0
        self.drafter = DecoupledDrafter(
            self.noise,
            0,
            vocab_size=VOCABULARY,
            fan_out=fan_out,
            connect=lambda address, keys: self.others[int(address)].line.reopened(),
            clock=lambda: self.now,
        )
        self.windows = windows
        self.lengths = {str(i): length for i, length in enumerate(lengths)}
        self.tokens = {name: list(PROMPT) for name in self.lengths}
        self.steps = 0
        for i in range(len(windows)):
            self.attach(i)

    # of the first drafter
    @property
    def other(self) -> Elsewhere:
        return self.others[0]

    @property
    def engine(self) -> FakeEngine:
        return self.other.engine

    @property
    def loop(self) -> Loop:
        return self.other.loop

    @property
    def link(self) -> Link:
        return self.drafter.links["0"]

    def attach(self, i: int) -> None:
        self.drafter.attach(str(i), str(i), window=self.windows[i])

    def step(self) -> None:
        """One step of the verifier."""
        running = [name for name, tokens in self.tokens.items() if len(tokens) < self.end(name)]
        self.noise.lengths = {name: len(tokens) for name, tokens in self.tokens.items()}
        views = [
            RequestView(
                name, np.asarray(self.tokens[name], np.int32), len(PROMPT), self.end(name) - len(self.tokens[name])
            )
            for name in running
        ]
        batch = RequestBatch.of(views)
        trees = self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))
        for i, name in enumerate(running):
            tree, tokens = trees.tree(i), self.tokens[name]
            node = -1
            while len(tokens) < self.end(name):
                tokens.append(token_at(int(name), len(tokens)))
                rows = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
                found = [child for child, row in enumerate(rows) if row == (node, tokens[-1])]
                if not found:
                    break
                node = found[0]
            if len(tokens) >= self.end(name):
                none = np.zeros(0, np.int32)
                self.drafter.finish(FinishedRequest(name, "", none, none, FinishReason.FINISHED))
        self.steps += 1

    def turn(self) -> None:
        for other in self.others:
            other.now += 0.2
            if other.hangs_until <= self.steps:
                other.loop.turn()

    def end(self, name: str) -> int:
        return len(PROMPT) + self.lengths[name]

    @property
    def is_over(self) -> bool:
        return all(len(tokens) >= self.end(name) for name, tokens in self.tokens.items())

    def run(self, turns: int = 3) -> None:
        while not self.is_over:
            for _ in range(turns):
                self.turn()
            self.step()

    def check(self) -> None:
        """Every request has the target's tokens, and nothing is left of it."""
        for name, tokens in self.tokens.items():
            expected = [*PROMPT, *(token_at(int(name), at) for at in range(len(PROMPT), self.end(name)))]
            assert tokens == expected
        assert self.steps <= max(self.lengths.values()), "a step yields a token of each request at least"
        for link in self.drafter.links.values():
            assert not link.requests.open and not link.requests._by_handle
            score = link.requests.score
            assert 0 <= score.matched <= score.covered <= score.tried
            assert link.waited_s == 0.0
        for other in self.others:
            for wasted, levels in other.engine.wasted:
                assert wasted <= levels - 1

    def replan(self) -> None:
        """Some requests get a window and a mode of their own, others lose theirs."""
        for link in self.drafter.links.values():
            chosen = [name for name in self.lengths if self.rng.random() < 0.7]
            modes = (Mode.COUPLED, Mode.DECOUPLED)
            link.requests.plans = {name: OwnPlan(self.rng.randint(1, 16), self.rng.choice(modes)) for name in chosen}

    def check_calm(self) -> None:
        """Once faults have ended, drafters lose all streams of requests that are over, without a greeting."""
        for i, other in enumerate(self.others):
            other.hangs_until, other.line.chance = 0, 0.0
            if str(i) not in self.drafter.links:
                self.attach(i)
        # of the last one they hear: a drafter asks nothing while its verifier is silent
        name = str(len(self.lengths))
        self.lengths[name], self.tokens[name], self.steps = 150, list(PROMPT), 0
        while not self.is_over:
            self.turn()
            self.step()
            self.now += 1.0
        self.turn()
        assert not any(other.engine.streams for other in self.others)

    def check_end(self) -> None:
        """Whoever hears that its verifier leaves has nothing left of it, nor of one that left without being heard."""
        for i, other in enumerate(self.others):
            other.hangs_until, other.line.chance = 0, 0.0
            if str(i) not in self.drafter.links:
                self.attach(i)
            self.drafter.detach(str(i))
            for _ in range(2):
                other.loop.turn()
        assert not any(other.engine.streams for other in self.others)
