"""One request alone, event by event: which way of drafting is fastest, and do closed formulas say the same?

Per position the target's token is the drafter's best guess, its second, its third, or none of them. `exits` of them are
drafted behind: 1 is a stream of best guesses, 2 and 3 also draft behind the second and third guess of each position, so
that a miss there does not end the stream. The verifier never waits: what is there is verified, else it decodes plainly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.report import Cell, Inputs, Number, ResultTable, Share, StudyReport

from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate

_ROUNDING = 1e-9  # tokens
_WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
# name -> whether the drafter drafts ahead, and how many guesses of each position are verified or drafted behind
_WAYS = {
    "coupled chain": (False, 1),
    "coupled comb of 2": (False, 2),
    "ahead": (True, 1),
    "ahead, 2 exits": (True, 2),
    "ahead, 3 exits": (True, 3),
}
_FORMULAS = {"coupled chain": coupled_rate, "ahead": decoupled_rate}


class OneRequestInputs(Inputs):
    """All are free."""

    # verifier ms, ms per draft token verified, drafter ms per token. SpecActor, section 5.1, and TLT, Table 8: 13 ms at
    # batch 1; a row as in specactor; 12.2 ms of drafting over 10 levels
    large_target: tuple[Number, Number, Number] = (13.0, 0.04, 1.22)
    # TLT, Table 7, row Base, for the verifier; the others set
    small_target: tuple[Number, Number, Number] = (4.13, 0.012, 0.8)
    # set: 150 M parameters on one CPU core, a drafter of a quarter of that
    cpu_target: tuple[Number, Number, Number] = (16.0, 1.2, 4.0)
    # set: of a token's time per further branch
    branch_share: Number = 0.05
    # set: the target's token is among the drafter's best, best two, best three guesses. A drafter close to its target,
    # with shared noise, and one further from it
    good_match: tuple[Share, Share, Share] = (0.85, 0.95, 0.97)
    fair_match: tuple[Share, Share, Share] = (0.62, 0.80, 0.88)
    # set: of a run; two standard errors are about 1 %
    tokens: Number = 20000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One verifier and one drafter."""

    verify_ms: float
    # per draft token verified
    row_ms: float
    # per token of one sequence
    draft_ms: float
    # more of that per further sequence in the drafter's batch
    branch_share: float
    # probability that the target's token is among the drafter's best, best two, best three guesses
    matches: tuple[float, float, float]

    @property
    def plain_ms(self) -> float:
        return self.verify_ms + self.row_ms


def _ranks(scene: Scene, rng: np.random.Generator) -> Iterator[int]:
    """Which guess of the drafter the target's token is, position by position: 0 the best, 3 none of three."""
    while True:
        yield from np.searchsorted(scene.matches, rng.random(4096), side="right").tolist()[::-1]


def coupled_speed(scene: Scene, window: int, width: int, tokens: float, rng: np.random.Generator) -> float:
    """Tokens per ms: draft a window, then verify it; with `width` guesses at each position, the others being leaves."""
    ranks = _ranks(scene, rng)
    step_ms = window * scene.draft_ms + scene.plain_ms + scene.row_ms * window * width
    done = steps = 0
    while done < tokens:
        steps += 1
        for _ in range(window):
            rank = next(ranks)
            done += 1
            if rank:
                # a leaf was verified too, so the token behind it is known
                done += rank < width
                break
        else:
            done += 1
    return done / (steps * step_ms)


def ahead_speed(scene: Scene, window: int, exits: int, tokens: float, rng: np.random.Generator) -> float:
    """Tokens per ms: the drafter goes on while the verifier works, at most one window beyond the one it has sent."""
    stream = _Stream(scene, window, exits, _ranks(scene, rng))
    while stream.tokens < tokens:
        stream.step()
    return stream.tokens / stream.ms


class _Stream:
    def __init__(self, scene: Scene, window: int, exits: int, ranks: Iterator[int]) -> None:
        self.tokens, self.ms = 0, 0.0
        self._scene, self._window, self._exits, self._ranks = scene, window, exits, ranks
        # drafted tokens beyond the text, and how many complete the window being drafted
        self._ahead, self._left = 0.0, window

    def step(self) -> None:
        """Verify what is complete, and one token of the target's own."""
        scene, exits = self._scene, self._exits
        size = self._left if self._ahead + _ROUNDING >= self._left else 0
        ms = scene.plain_ms + scene.row_ms * size * exits
        # the best guess goes on; behind each position's other guesses, and those of the target's own token, begins one
        drafted = ms / (scene.draft_ms * (1.0 + scene.branch_share * ((size + 1) * (exits - 1))))
        main = min(self._ahead + drafted, self._left + self._window)
        beside = min(drafted, float(self._window))
        self.ms += ms
        for right in range(size):
            rank = next(self._ranks)
            if rank:
                self._leave(right, rank, beside)
                return
        self.tokens += size + 1
        self._own(next(self._ranks), main - size, beside, size)

    def _leave(self, right: int, rank: int, beside: float) -> None:
        """A draft was refused; behind a guess that was enumerated the stream goes on."""
        self.tokens += right + 1
        self._begin(0.0)
        if rank < self._exits:
            # the guess was verified as a leaf, so the target's token behind it is known, and begins the continuation
            self.tokens += 1
            if next(self._ranks) == 0:
                self._begin(beside - 1.0)

    def _own(self, rank: int, rest: float, beside: float, size: int) -> None:
        """The target's own token behind all that was verified."""
        left = self._window if size else self._left
        if rank == 0 and rest + _ROUNDING >= 1.0:
            self._ahead, self._left = rest - 1.0, left - 1 if left > 1 else self._window
        else:
            self._begin(beside if 0 < rank < self._exits else 0.0)

    def _begin(self, drafted: float) -> None:
        """A continuation of which so much is drafted; its window is a new one."""
        self._ahead, self._left = max(drafted, 0.0), self._window


def scenes_of(inputs: OneRequestInputs) -> dict[str, Scene]:
    """Each verifier with each match rate."""
    targets = {"13 ms": inputs.large_target, "4 ms": inputs.small_target, "CPU, 16 ms": inputs.cpu_target}
    return {
        f"{title} target, match {match[0]:g}": Scene(
            verify_ms=ms[0], row_ms=ms[1], draft_ms=ms[2], branch_share=inputs.branch_share, matches=match
        )
        for title, ms in targets.items()
        for match in (inputs.good_match, inputs.fair_match)
    }


def run(inputs: OneRequestInputs, seed: int) -> StudyReport:
    """One request alone: coupled chain and comb, a drafter ahead, and enumerated exits.

    Every way with its best window in every scene.
    """
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    off = 0.0
    scenes = scenes_of(inputs)
    for name, scene in scenes.items():
        cells = []
        verifier = StepLine(base=scene.verify_ms, row=scene.row_ms, steep=scene.row_ms)
        for way, (is_ahead, width) in _WAYS.items():
            speed = ahead_speed if is_ahead else coupled_speed
            found = {
                window: speed(scene, window, width, inputs.tokens, np.random.default_rng(seed)) * scene.plain_ms
                for window in _WINDOWS
            }
            best = max(found, key=found.__getitem__)
            figures[f"{name}, {way}"] = found[best]
            cells.append(f"{found[best]:.2f}x (w {best})")
            if way in _FORMULAS:
                closed = _FORMULAS[way](StepLine(base=scene.draft_ms), verifier, 1, best, scene.matches[0])
                off = max(off, abs(found[best] / (closed * scene.plain_ms) - 1.0))
        rows.append((name, *cells))
    combs = {name: figures[f"{name}, coupled comb of 2"] for name in scenes}
    loses = sum(figures[f"{name}, ahead"] < comb for name, comb in combs.items())
    wins = sum(max(figures[f"{name}, ahead, {exits} exits"] for exits in (2, 3)) > combs[name] for name in scenes)
    return StudyReport(
        title="One request alone: coupled and decoupled drafts, with and without enumerated exits",
        tables=(ResultTable("over plain decoding, best window", ("scene", *_WAYS), tuple(rows)),),
        figures=figures | {"worst gap to a formula": off},
        findings=(
            "All inputs are free: the table compares ways of drafting, and no paper.",
            f"A stream alone loses to a coupled comb in {loses} of {len(scenes)} scenes; with exits it wins in"
            f" {wins} of {len(scenes)}.",
            f"Coupled chains and streams are at most {off:.1%} off their closed formulas.",
        ),
    )
