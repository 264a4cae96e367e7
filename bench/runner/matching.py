"""Match rates: how often what a model would draft next is what the target then samples, for several ways to choose it.

What belongs here: a measurement for benchmarks. While it goes on, the model is asked in every step and nothing of it is
verified, so each position counts once, whatever is accepted.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.drafters.coupling import Coupling
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import DraftLimits, RequestBatch, TreeBatch, empty_trees
from vllm_specrollout.worker.models.drafter import ModelDrafter

NONE_OF_THEM = 8
"""Rank of a token that no choice was, as the core has it."""


@dataclass(slots=True)
class Matches:
    """Sums over positions."""

    positions: int = 0
    # [ways] positions at which the first choice is the target's token, and at which one of the first two is
    first: dict[str, int] = field(default_factory=dict)
    best_two: dict[str, int] = field(default_factory=dict)
    # what rejection sampling would accept: sum of min(p, q)
    overlap: float = 0.0
    # [positions] which choice the target's token is, as drafts are drawn now: 0, 1, ..., or `NONE_OF_THEM`; by
    # request, each in the order of its tokens
    ranks: list[int] = field(default_factory=list)
    # of what was learned, the weight of the model's log probabilities over the noise's
    sharpness: float = 0.0
    # milliseconds that asking took, all requests together
    draft_ms: float = 0.0


class MatchMeter:
    """Takes the place of a drafter's proposing, and looks at what the sampler is given.

    Args:
        runner: our V1 runner, with a model that drafts.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._drafter: ModelDrafter = runner.model_drafter
        self.matches = Matches()
        self._ways = {"greedy": Coupling(), "shared": Coupling()}
        self._ways["greedy"].pin(1.0, 0.0)
        self._ways["shared"].pin(1.0, 1.0)
        # request -> as `Matches.ranks`
        self._ranks: dict[str, list[int]] = {}
        # request -> its row in the tensors below
        self._rows: dict[str, int] = {}
        # [R, vocab] the drafter's distribution, and way -> [R, 2] its choices, of "learned" [R, NONE_OF_THEM]
        self._q = torch.empty(0, 0)
        self._choices: dict[str, torch.Tensor] = {}
        # asked in every step, for one level
        self._budget, runner.spec_rollout.budget = runner.spec_rollout.budget, FixedBudget(2, 1)
        runner.spec_rollout.backoff = Backoff()
        sampler = runner.noise.sampler
        # what stood where this one's own stand for a while
        self._old_draw, self._old_propose = self._drafter.proposer.draw, self._drafter.propose
        self._old_forward = sampler.forward
        self._drafter.proposer.draw = self._draw
        self._drafter.propose = self._propose  # type: ignore[method-assign]
        sampler.forward = self._sample

    def stop(self) -> Matches:
        """Put everything back."""
        drafter, sampler = self._drafter, self._runner.noise.sampler
        drafter.proposer.draw, drafter.propose = self._old_draw, self._old_propose  # type: ignore[method-assign]
        sampler.forward = self._old_forward
        self._runner.spec_rollout.budget = self._budget
        self.matches.ranks = [rank for own in self._ranks.values() for rank in own]
        weight, beside = drafter.coupling.sampled
        self.matches.sharpness = weight / max(beside, 1e-3)
        return self.matches

    def _propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self._rows = {}
        begin = time.perf_counter()
        self._old_propose(batch, limits)
        self.matches.draft_ms += (time.perf_counter() - begin) * 1e3
        return empty_trees(batch.request_ids)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        drafter = self._drafter
        scaled, entries = drafter.scaled(logits), drafter.entries
        self._rows = {entry.view.request_id: i for i, entry in enumerate(entries)}
        self._q = scaled.softmax(dim=-1)
        likeliest, are_greedy = drafter.likeliest(scaled, 0), torch.tensor([entry.is_greedy for entry in entries])
        for way, coupling in {**self._ways, "learned": drafter.coupling}.items():
            known = coupling.log_probabilities(likeliest, are_greedy)[:, :-1]
            count = min(NONE_OF_THEM if way == "learned" else 2, known.shape[1])
            self._choices[way] = likeliest.tokens.gather(1, known.topk(count, dim=-1).indices)
        return self._old_draw(logits)

    def _sample(self, logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        p = logits.softmax(dim=-1, dtype=torch.float32)
        tokens, processed = self._old_forward(logits, *args)
        names = self._runner.input_batch.req_ids
        known = [i for i, name in enumerate(names) if name in self._rows and len(names) == len(p)]
        if known:
            own = [self._rows[names[i]] for i in known]
            matches = self.matches
            matches.positions += len(known)
            matches.overlap += float(torch.minimum(p[known], self._q[own]).sum())
            for way, choices in self._choices.items():
                is_met = choices[own] == tokens[known][:, None]
                matches.first[way] = matches.first.get(way, 0) + int(is_met[:, 0].sum())
                matches.best_two[way] = matches.best_two.get(way, 0) + int(is_met[:, :2].any(dim=1).sum())
            is_met = self._choices["learned"][own] == tokens[known][:, None]
            ranks = torch.where(is_met.any(dim=1), is_met.to(torch.int8).argmax(dim=1), NONE_OF_THEM).tolist()
            for i, rank in zip(known, ranks, strict=True):
                self._ranks.setdefault(names[i], []).append(rank)
        self._rows = {}
        return tokens, processed


class MatchingMixin:
    """Part of `Tuning`; for the V1 runners' workers."""

    model_runner: Any
    _meter: MatchMeter | None = None

    def spec_rollout_matches(self, start: bool) -> dict[str, Any]:
        """Begin to measure how often a model's drafts are the target's tokens, or end it and tell what was found.

        Raises:
            ConfigError: no model drafts.
        """
        runner = self.model_runner
        if runner.model_drafter is None:
            raise ConfigError("no model drafts in this engine", "give it a `speculative_config`")
        meter, self._meter = getattr(self, "_meter", None), None
        found = asdict(meter.stop()) if meter is not None else {}
        if start:
            self._meter = MatchMeter(runner)
        return found
