"""`specrollout bench learn`: heads that learn in their engines, between epochs of the same problems, as in RL.

Every epoch all engines answer the same requests, and new weights are pushed to them before the next one. Meanwhile the
engines idle, as they do while a trainer updates its policy, and those that learn do so then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.bench.policy.reward import problems

from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, WARM_UP_TOKENS, Engines, asking
from ..runner.fields import Row
from ..runner.models import HABIT, SLOW, find_model, moved_policy, shipped_drafters
from ..runner.report import Found, Table
from ..runner.results import LEARN
from ..runner.rows import Pair, Run, make_row
from ..runner.scenario import EngineScenario, Session, command, flag

NONE = "none"
FROZEN, ONLINE, NOTHING, HISTORY, BESIDE = "frozen", "online", "nothing", "history", "beside"
ENGINES = (FROZEN, ONLINE, NOTHING, HISTORY, BESIDE)
_LEARNS = (ONLINE, NOTHING, BESIDE)
Learnings = dict[tuple[str, int], dict[str, int]]
"""Arm and epoch -> what `learn` told before it."""


@dataclass(frozen=True, kw_only=True)
class Learn(EngineScenario):
    """Let heads learn in their engines while the policy moves; compare what is accepted, the tokens and the time."""

    bench: ClassVar[str] = "learn"

    drift: str = flag(
        HABIT,
        "What changes before epoch 2: habit (the policy checks its steps), slow (four updates by GRPO), or none.",
        choices=(HABIT, SLOW, NONE),
    )
    engines: tuple[str, ...] = flag(
        (FROZEN, ONLINE),
        "frozen (the policy's head), online (it learns), nothing (a head is learned from nothing), history (no head),"
        " beside (history, and the head of `nothing`).",
        choices=ENGINES,
    )
    problems: int = flag(48, "Problems of the fixed set, from the training split.", within=(1, 10_000))
    samples: int = flag(4, "Answers to each problem.", within=(1, 1000))
    epochs: int = flag(4, "Passes over the problems; weights are pushed between them.", within=(1, 1000))
    batch: int = flag(32, "Requests at once (max_num_seqs).", within=(1, 256))
    max_tokens: int = flag(160, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    depth: int = flag(6, "Tokens of every draft.", within=(2, 16))
    learn_s: float = flag(150.0, "Most seconds between two epochs in which an engine learns.", within=(0.0, 86400.0))

    def spec_rollout(self, arm: str, head: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Our configuration of an arm: drafts of one length, so that what is accepted of them can be compared."""
        shape = {"budget": "fixed", "shape": "chain", "max_draft_tokens": self.depth, "max_depth": self.depth}
        own = {**shape, "drafters": [HISTORY] if arm in (HISTORY, BESIDE) else [], "queue_order": "arrival"}
        if arm in (FROZEN, ONLINE):
            own["speculative_config"] = dict(head)
        if arm in _LEARNS:
            # engines that share a folder share a trainer
            own["train"] = {"mode": "auto", "dir": str(folder / (NOTHING if arm == BESIDE else arm))}
        return own

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, None, self.dtype, self.cache, session.display, is_policy=True)
        head = shipped_drafters(folder, None, self.cache, (self.depth,))["head"]
        between = 1 + len(self._learning())
        report = session.display.steps(3 + len(self.engines) + self.epochs + (self.epochs - 1) * between)
        report("the moved policy", 0)
        moved = folder if self.drift == NONE else moved_policy(self.drift, self.cache)
        report("", 1)
        shape = {"seqs": self.batch, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for arm in self.engines:
                engines.start(arm, self.spec_rollout(arm, head, session.scratch))
            pairs, learned = self._epochs(engines, moved)
        return Found(model=title, rows=epoch_rows(pairs, learned, self.batch, self.depth))

    def _epochs(self, engines: Engines, moved: Path) -> tuple[dict[str, list[Pair]], Learnings]:
        """Every arm beside stock, epoch by epoch, and what its head had learned by the beginning of each."""
        chosen = problems(self.problems, self.seed, split="train")
        owners = [problem for problem in chosen for _ in range(self.samples)]
        prompts = [ids for ids in engines.encode(chosen) for _ in range(self.samples)]
        learned: Learnings = {}

        def run(_: str, arm: str | None, number: int) -> Run:
            seed = self.seed + number * len(owners)
            return engines.run(arm or STOCK, prompts, asking(owners, seed, self.max_tokens, is_ours=arm is not None))

        def after(_: str, number: int) -> None:
            if number + 1 == self.epochs:
                return
            for arm in self._learning():
                with engines.doing(f"{arm} learns"):
                    learned[arm, number + 1] = engines.ask(arm, "trainer", function="learn", seconds=self.learn_s)
            with engines.doing("pushing the weights"):
                for name in (STOCK, *self.engines):
                    engines.ask(name, "reload", folder=str(moved))
                for arm in self.engines:
                    engines.ask(arm, "trainer", function="begin_epoch")

        with engines.doing("warm-up"):
            # like no task, so that nothing is learned from them
            strange = [ids[::-1] for ids in prompts[: self.batch]]
            params = asking(owners[: self.batch], 0, WARM_UP_TOKENS, is_ours=False)
            for name in (STOCK, *self.engines):
                engines.run(name, strange, params)
        pairs = engines.rounds({"all": self.engines}, range(self.epochs), run, after=after)
        return {arm: pairs["all", arm] for arm in self.engines}, learned

    def _learning(self) -> list[str]:
        return [arm for arm in self.engines if arm in _LEARNS]

    def title(self, found: Found) -> str:
        sizes = f"{self.problems} problems x {self.samples} answers x {self.epochs} epochs, {self.batch} at once"
        return f"{found.model}, {self.dtype}, drift {self.drift}: {sizes}, drafts of {self.depth}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, LEARN, left=2)
        yield from (f"epoch {row.epoch}, {row.name}: {row.difference}" for row in found.rows if not row.identical)


def epoch_rows(pairs: Mapping[str, Sequence[Pair]], learned: Learnings, batch: int, depth: int) -> list[Row]:
    """A row per epoch and arm."""
    return [
        _row(arm, number, own, learned.get((arm, number), {}), batch, depth)
        for number in range(max(map(len, pairs.values())))
        for arm, own in pairs.items()
    ]


def _row(arm: str, number: int, pairs: Sequence[Pair], state: Mapping[str, int], batch: int, depth: int) -> Row:
    first, now = _accepted(pairs[0].ours), _accepted(pairs[number].ours)
    return make_row(arm, batch, depth, [pairs[number]]).but(
        epoch=number + 1,
        accepted_per_draft=now,
        of_first=now / first if first else None,
        learned_rows=state.get("trainer_rows"),
        published=state.get("number"),
        trainer_s=state.get("trainer_seconds"),
        digest=digest_of(pairs[number].ours),
    )


def _accepted(run: Run) -> float:
    """Tokens per request and decode step: each but a request's first one may have a draft."""
    assert run.totals is not None
    return run.totals.accepted / max(run.totals.request_steps - len(run.token_ids), 1)


def digest_of(run: Run) -> str:
    """Of all its tokens."""
    return hashlib.blake2b(json.dumps(run.token_ids).encode(), digest_size=8).hexdigest()


bench_learn = command(Learn)
