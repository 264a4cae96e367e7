"""Random schedules of what trainers do to a running engine: abort and ask again, push weights, pause, drop caches.

Each answer is compared, piece by piece, with one that was never interrupted: under the weights of the piece, and behind
the tokens that stood there when these weights came.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from tests.e2e.identity.engines import Engine
from vllm_specrollout import resumed
from vllm_specrollout.history.problems import prompt_hash
from vllm_specrollout.types import Answer

WEIGHTS = range(3)


@dataclass
class Asked:
    """One answer that is wanted, however many requests it takes."""

    prompt: list[int]
    # None: greedy
    seed: int | None
    most: int
    tokens: list[int] = field(default_factory=list)
    # weights, and how many tokens stood there when they came
    pieces: list[tuple[int, int]] = field(default_factory=list)
    # the request that runs, and the tokens that stood there when it was asked for; None: none runs
    name: str | None = None
    begun_at: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.most

    def params(self, **options: Any) -> SamplingParams:
        temperature, own = (0.0, None) if self.seed is None else (1.0, self.seed)
        extra = {"spec_rollout": options} if options else None
        return SamplingParams(
            temperature=temperature, seed=own, max_tokens=self.most, ignore_eos=True, extra_args=extra
        )


class Trainer:
    """Drives one engine in this process, and knows what must come of it.

    Args:
        ours: its worker has `workers.TrainersExtension`.
    """

    def __init__(self, ours: Engine, prompts: Sequence[list[int]]) -> None:
        self._ours, self._prompts = ours, prompts
        self._engine = ours.llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self.did: Counter[str] = Counter()
        self._all: list[Asked] = []
        self._wanted: list[Asked] = []
        self._count = 0
        self._weights = self._stepped_with = 0
        # whether weights came by `load_weights` since the last step: that counts, whatever they are
        self._were_loaded = False
        self._version: int = ours.runner.weights_version.number
        # by request: its problem, and the version that it was last computed with
        self._attributed: dict[str, tuple[str, int]] = {}
        self._told: dict[str, Answer] = {}
        ours.llm.collective_rpc("write_in_place", args=(0,))
        ours.llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=1), use_tqdm=False)
        self._version = ours.runner.weights_version.number
        drafter = ours.runner.spec_rollout.drafters[0]
        finish = type(drafter).finish

        def finishing(ending: Answer) -> None:
            self._told[ending.name] = ending
            finish(drafter, ending)

        drafter.finish = finishing

    def carry_out(self, seed: int) -> None:
        """One schedule, to the end of all its answers."""
        chance = random.Random(seed)
        for prompt in chance.sample(list(self._prompts), 2):
            for _ in range(chance.randrange(1, 4)):
                sampling = chance.choice([None, 1, 2, 3])
                one = Asked(prompt, sampling, chance.randrange(6, 22), pieces=[(self._weights, 0)])
                self._wanted.append(one)
                self._ask(one)
        self._all += self._wanted
        acts = [self._abort, self._ask_again, self._pause, self._reset, self._push, self._empty_sign]
        while self._wanted:
            if chance.random() < 0.7:
                self._step()
            else:
                chance.choices(acts, (6, 8, 2, 2, 2, 1))[0](chance)
            if not any(one.name for one in self._wanted):
                self._ask_again(chance)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, one: Asked) -> None:
        self._count += 1
        one.name, one.begun_at = f"schedule-{self._count}", len(one.tokens)
        if one.seed is None:
            # as trainers do it that know nothing of us
            prompt, params = [*one.prompt, *one.tokens], one.params()
            params.max_tokens = one.most - len(one.tokens)
        else:
            prompt, params = resumed(one.params(), one.prompt, one.tokens)
        self._engine.add_request(one.name, {"prompt_token_ids": prompt}, params)
        self.did["went on"] += bool(one.tokens)

    def _ask_again(self, chance: random.Random) -> None:
        for one in self._wanted:
            if one.name is None and chance.random() < 0.7:
                self._ask(one)

    def _abort(self, chance: random.Random, share: float = 0.4) -> None:
        for one in self._wanted:
            if one.name is not None and chance.random() < share:
                self._engine.abort_request([one.name])
                one.name = None
                self.did["abort"] += 1

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests():
            return
        if self._stepped_with != self._weights or self._were_loaded:
            self._stepped_with, self._were_loaded = self._weights, False
            self._version += 1
        for one in self._wanted:
            if one.name is not None:
                self._attributed[one.name] = (prompt_hash(one.prompt), self._version)
        self.did["step"] += 1
        by_name = {one.name: one for one in self._wanted}
        for output in self._engine.step():
            one = by_name[output.request_id]
            one.tokens[one.begun_at :] = output.outputs[0].token_ids
            if output.finished:
                assert one.is_done
                self.did["whole"] += len(one.pieces) == 1
                self._wanted.remove(one)

    # --- the engine --------------------------------------------------------------------------------------------------

    def _pause(self, chance: random.Random) -> None:
        mode, clear_cache = chance.choice(["keep", "abort", "wait"]), chance.random() < 0.5
        if mode == "wait":
            # `pause_scheduler` leaves that to engines in a process of their own, which go on with their loop meanwhile
            self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._act(chance)
            while self._core.scheduler.running:
                self._step()
            self._core._finish_pause(clear_cache)
        else:
            self._core.pause_scheduler(mode=mode, clear_cache=clear_cache)
            if mode == "abort":
                self._abort(chance, share=1.0)  # the front end is told by outputs, which there are none of here
            self._act(chance)
        self._core.resume_scheduler()
        self.did["pause"] += 1
        self.did[f"pause, {mode}"] += 1

    def _act(self, chance: random.Random) -> None:
        for act in chance.sample([self._abort, self._ask_again, self._empty_sign], chance.randrange(3)):
            act(chance)

    def _reset(self, chance: random.Random) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=chance.random() < 0.5)
        self.did["reset"] += 1

    def _empty_sign(self, chance: random.Random) -> None:
        self._ours.llm.collective_rpc("refit_later")
        self.did["empty sign"] += 1

    def _push(self, chance: random.Random) -> None:
        """Other weights: the answers that run are stopped, or go on from what they have."""
        before, self._weights = self._weights, chance.choice([one for one in WEIGHTS if one != self._weights])
        if chance.random() < 0.5:
            self._abort(chance, share=1.0)
            self._write(chance)
            self._engine.reset_prefix_cache()
        else:
            self._core.pause_scheduler(mode="keep", clear_cache=False)
            self._write(chance)
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._core.resume_scheduler()
        for one in self._wanted:
            if one.pieces[-1] == (before, len(one.tokens)):
                one.pieces.pop()  # it got no token from those
            one.pieces.append((self._weights, len(one.tokens)))
        self.did["push"] += 1

    def _write(self, chance: random.Random | None = None) -> None:
        is_loaded = chance is not None and chance.random() < 0.5
        self._ours.llm.collective_rpc("load_norm" if is_loaded else "write_in_place", args=(self._weights,))
        self._were_loaded |= is_loaded
        self.did["load"] += is_loaded

    # --- what must have come of it -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Tokens, and what drafters were told of every request."""
        for self._weights in WEIGHTS:
            self._check_tokens(self._weights)
        known = {name: self._attributed[name] for name in self._told if name in self._attributed}
        assert {name: (self._told[name].problem_id, self._told[name].weights_version) for name in known} == known
        self.did["told"] = len(known)

    def _check_tokens(self, weights: int) -> None:
        self._write()
        self._engine.reset_prefix_cache()
        pieces = []
        for one in self._all:
            ends = [begin for _, begin in one.pieces[1:]] + [one.most]
            for (own, begin), end in zip(one.pieces, ends, strict=True):
                if own == weights and end > begin:
                    pieces.append((one, begin, end))
        # many answers begin alike: the longest of each kind holds the others
        longest: dict[tuple[Any, ...], tuple[Asked, int, int]] = {}
        for piece in sorted(pieces, key=lambda piece: piece[2]):
            longest[_kind(piece)] = piece
        asked = [
            resumed(one.params(enabled=False), one.prompt, one.tokens[:begin]) for one, begin, _ in longest.values()
        ]
        outputs = self._ours.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked], [params for _, params in asked], use_tqdm=False
        )
        truth = dict(zip(longest, (list(one.outputs[0].token_ids) for one in outputs), strict=True))
        for piece in pieces:
            one, begin, end = piece
            assert one.tokens[begin:end] == truth[_kind(piece)][: end - begin]


def _kind(piece: tuple[Asked, int, int]) -> tuple[Any, ...]:
    one, begin, _ = piece
    return (tuple(one.prompt), one.seed, tuple(one.tokens[:begin]))
