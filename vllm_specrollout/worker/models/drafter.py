"""A model that drafts: vLLM's own proposer, whose tokens are drawn with the target's noise. Both runners use it.

On several tensor-parallel ranks its passes need all of them, and the first one decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_specrollout.budgets.goodput import Acceptance
from vllm_specrollout.budgets.step_cost import Price
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.drafters.coupling import Coupling, Likeliest
from vllm_specrollout.drafters.levels import Levels
from vllm_specrollout.errors import logger
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.observe.heads import Heads
from vllm_specrollout.types import (
    DraftLimits,
    DraftMode,
    RequestBatch,
    RequestView,
    TreeBatch,
    VerifyResult,
    empty_trees,
)
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.models.proposing import (
    Enough,
    Entry,
    HeldRows,
    NoiseAhead,
    Proposer,
    Seat,
    WaitingRows,
    first_rows,
    is_untrained,
)

Draw = Callable[[torch.Tensor], torch.Tensor]

_DROPPED = "dropped"


class Ranks:
    """All ranks of one engine, seen from one of them.

    Args:
        runner: our model runner.
        drafting: its own; it knows the ranks.
    """

    def __init__(self, runner: Any, drafting: Drafting) -> None:
        self._runner, self._drafting = runner, drafting
        self.are_several = drafting.group is not None
        self._has_told = False
        if self._drafting.group is not None:
            self._drafting.last_order = self._last_order

    def order(self, names: Sequence[str], depth: int) -> None:
        """The first rank is about to draft so many levels for these requests."""
        self._drafting.order((self._drafting.numbered(names), depth))

    def follow(self, run: Callable[[Sequence[str], int], Any]) -> None:
        """How another rank takes part in a pass."""

        def do(order: Any) -> None:
            if order == _DROPPED:
                self._runner.model_drafter = None
            else:
                run(self._drafting.named(order[0]), order[1])

        self._drafting.follow = do

    def drawing(self, draw: Draw) -> Draw:
        """`draw` on the first rank; the others are told what it has drawn, or that it is enough."""
        group = self._drafting.group
        if group is None:
            return draw

        def lead(logits: torch.Tensor) -> torch.Tensor:
            tokens = None
            try:
                tokens = draw(logits)
            finally:
                # each rank has a device of its own
                group.broadcast_object(None if tokens is None else tokens.cpu(), src=0)
            return tokens

        def follow(logits: torch.Tensor) -> torch.Tensor:
            tokens = group.broadcast_object(None, src=0)
            if tokens is None:
                raise Enough
            return tokens.to(logits.device)

        return lead if self._drafting.is_drafting else follow

    def _last_order(self) -> str | None:
        """A drafter that was dropped is dropped on all ranks, or they would wait for each other."""
        drafter = self._runner.model_drafter
        is_there = drafter is not None and any(one is drafter for one in self._runner.spec_rollout.drafters)
        if is_there or self._has_told:
            return None
        self._has_told = True
        return _DROPPED


MOST_WAITING = 64 << 20
"""Bytes of hidden states that may wait for the proposer; with more it is fed though nobody asked."""
_LEARN_EVERY = 8  # times drafted of which one says how its model's distributions and the target's tokens go together
MOST_UNSOUND = 64
"""Rows with logits that are no numbers, after which a model has failed."""
MOST_UNMET = 4096
"""Nodes in a row of which none was accepted, after which a model has failed that had some accepted before."""
_WORST = -100.0  # log probability of a token that was drawn from no numbers
_LOST = -1  # before any position


def join(runner: Any, proposer: Proposer, noise: NoiseAhead) -> ModelDrafter:
    """The drafter around the proposer that vLLM has loaded for this runner; it drafts from now on."""
    source = len(config_of(runner.vllm_config).drafters)
    drafter = ModelDrafter(proposer, noise, source, Ranks(runner, runner.drafting))
    drafter.heads.weights_version = lambda: runner.weights_version.computed
    drafter.is_resting = is_untrained(proposer.of_vllm)
    runner.spec_rollout.replace_drafters([*runner.spec_rollout.drafters, drafter])
    runner.metrics.bounded(drafter.name, drafter.most_tokens)
    return drafter


def tell(runner: Any, what: Callable[[ModelDrafter], None]) -> None:
    """Have the runner's drafter do something in every step, also while it is on probation: what it is not fed with
    costs it the request."""
    drafter, speculator = runner.model_drafter, runner.spec_rollout
    if drafter not in speculator.drafters and drafter not in speculator.all_drafters():
        runner.model_drafter, drafter.waiting = None, WaitingRows()  # it was given up
        return
    try:
        what(drafter)
    except CONTAINED as error:
        speculator.failed(drafter, error)


class ModelDrafter(BaseDrafter):
    """Drafts with vLLM's proposer: a chain, and at each level the second best token beside it.

    Args:
        proposer: its model loaded.
        noise: the engine's; a draft token is chosen with the noise of its position.
        source: index of the drafter; alternatives count as the next one, since they hold less often.
        ranks: each pass of the model needs all of them.
    """

    name = "model"
    num_sources = 2
    is_in_step = True

    def __init__(self, proposer: Proposer, noise: NoiseAhead, source: int, ranks: Ranks) -> None:
        self.proposer, self.of_vllm = proposer, proposer.of_vllm
        self.most_tokens = proposer.most_tokens
        self._ranks, self.is_on_ranks = ranks, ranks.are_several
        proposer.draw = ranks.drawing(self._draw)
        ranks.follow(lambda names, depth: self._run(names, depth))
        self.noise = noise
        self.source = source
        self.coupling = Coupling()
        """Of its distributions with the target's noise."""
        self.acceptance = Acceptance()
        self.heads = Heads(source)
        # request -> what the runner knows of it, for the step in progress
        self.seats: dict[str, Seat] = {}
        self.waiting = WaitingRows()
        self._pass_price = Price()
        self._times = 0
        self.is_comb = True
        self._has_alternatives = True
        # [R] the requests that are drafted for
        self.entries: list[Entry] = []
        self._temperatures, self._are_greedy = torch.ones(0), torch.ones(0, dtype=torch.bool)
        self._levels = Levels(0, np.ones(1), 0.0)
        # of its levels, those that the host has not read yet: tokens, and the logarithms of their probabilities
        self._drawn: list[torch.Tensor] = []
        # requests with rows of their prompts that wait, or whose last rows do
        self._prompts: set[str] = set()
        # request -> position of the first row that the model has not been given; `_LOST`: earlier ones were lost
        self._next: dict[str, int] = {}
        self._has_outgrown = False
        # rows whose logits were no numbers; nodes verified since the last accepted one, and whether there was any
        self._unsound, self._unmet, self._was_met = 0, 0, False
        # what was known of each level that is learned from, and the chain's tokens [R] there; request -> row in them
        self._watched: list[tuple[Likeliest, torch.Tensor]] = []
        self._watched_rows: dict[str, int] = {}

    # --- what it is fed with -----------------------------------------------------------------------------------------

    def feed_step(
        self,
        seats: Sequence[Seat],
        counts: np.ndarray,
        are_prompts: Sequence[bool],
        index: np.ndarray,
        columns_of: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> None:
        """A runner knows the tokens of a step.

        Args:
            seats: [R] what is known of its requests.
            counts, index: [R], [rows] as `rows_that_hold` says.
            are_prompts: [R] as `have_prompts` says.
            columns_of: rows of the step -> their tokens, positions and hidden states, as in `HeldRows`.
        """
        names, kept = [seat.entry.view.request_id for seat in seats], np.zeros_like(counts)
        self.seats = dict(zip(names, seats, strict=True))
        ends: dict[str, int] = {}
        for i, (name, seat, count) in enumerate(zip(names, seats, counts.tolist(), strict=True)):
            if seat.entry.admission.shape is DraftMode.OFF and count == 1:
                continue  # who never drafts is fed for the sake of those who share its prompt's blocks
            kept[i] = own = self._kept(name, seat.next_position - count, seat.next_position, are_prompts[i])
            if own:
                ends[name] = seat.next_position
        fed, counts, index = first_rows(names, counts, kept, index)
        self.feed(HeldRows(fed, counts, *columns_of(index)))
        self._next |= ends

    def _kept(self, name: str, begin: int, end: int, is_prompt: bool) -> int:
        """How many of a request's rows in these positions the model is fed with.

        Those behind its context are not: whoever has them among its own is not drafted for. What lies before them is
        fed at once, since it may be in blocks that shorter requests share.
        """
        known = self._next.get(name, begin)
        if begin > known or begin >= self.most_tokens:
            return 0
        if begin < known:
            self.waiting.forget(name)  # it was preempted, and is computed anew
        is_last = end >= self.most_tokens
        if is_last and not self._has_outgrown:
            self._has_outgrown = True
            logger.warning(
                "Spec rollout: the context of the %s that drafts is shorter than the target's: nobody beyond %d tokens"
                " is drafted for by it",
                *(self.name, self.most_tokens),
            )  # fmt: skip
        if is_prompt or is_last:
            self._prompts.add(name)
        return min(end, self.most_tokens) - begin

    def feed(self, rows: HeldRows) -> None:
        """Rows that the target has computed and that hold; `seats` are those of their step."""
        self.waiting.add(rows)
        if self._watched_rows:
            self._learn(rows)

    def forget(self, request_id: str) -> None:
        self.heads.forget(request_id)
        self._next.pop(request_id, None)
        self._watched_rows.pop(request_id, None)
        self._prompts.discard(request_id)
        self.waiting.forget(request_id)

    def flush_if_due(self) -> None:
        """Feed what waits, without drafting: prompts at once, since others may share their blocks, and all where it
        takes too much memory."""
        if self.waiting.num_bytes > MOST_WAITING:
            self.waiting.drop_gone()
        is_full = self.waiting.num_bytes > MOST_WAITING
        if not self._prompts and not is_full:
            return
        names = [n for n in self.waiting.request_ids() if n in self.seats and (is_full or n in self._prompts)]
        for begin in range(0, len(names), self.proposer.most_requests):
            self._run(names[begin : begin + self.proposer.most_requests], 0)

    # --- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        if self.is_resting:
            return empty_trees(batch.request_ids)
        wanted = limits.wanted(self.source)
        waiting = set(self.waiting.request_ids())
        index = [
            i for i, name in enumerate(batch.request_ids) if wanted[i] > 0 and name in waiting and self._is_short(name)
        ][: self.proposer.most_requests]
        wanted_depth = int(limits.max_depth[index].max(initial=0))
        depth = self.proposer.max_depth if self.proposer.is_one_pass else min(self.proposer.max_depth, wanted_depth)
        if not index or wanted_depth == 0:
            return empty_trees(batch.request_ids)
        names = [batch.request_ids[i] for i in index]
        self.entries = [self.seats[name].entry for name in names]
        temperatures = [1.0 if entry.is_greedy else entry.temperature for entry in self.entries]
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32)
        self._are_greedy = torch.tensor([entry.is_greedy for entry in self.entries])
        self._levels = Levels(len(names), self._survival(), limits.token_ms, batch.ends_of(index))
        self._drawn = []
        self._times += 1
        self._watched, self._watched_rows = [], {}
        if self._times % _LEARN_EVERY == 1:
            self._watched_rows = {name: i for i, name in enumerate(names)}
        self._has_alternatives = self.is_comb and not limits.is_chain[index].all()
        self._ranks.order(names, depth)
        begin = time.perf_counter()
        self._run(names, depth)
        self._read()
        if self._unsound >= MOST_UNSOUND:
            self._unsound = 0
            raise RuntimeError(f"its logits were no numbers in {MOST_UNSOUND} rows")
        spent = (time.perf_counter() - begin) * 1e3 / max(self._levels.depth, 1)
        self._pass_price.spent(len(names), spent)
        return self._levels.trees(batch, limits, np.asarray(index), self.source)

    def admit(self, view: RequestView) -> None:
        self.heads.admit(view.request_id)

    def renew(self) -> None:
        """Its weights are others: what was learned of the old ones counts for little, and failures for nothing."""
        self.is_resting = False
        self.acceptance.renew(self.source, self.num_sources)
        self.coupling.fade()
        self._unsound, self._unmet, self._was_met = 0, 0, False
        self._watched_rows.clear()

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        self.heads.observe(trees, result)
        counts = self.acceptance.count(trees, result)
        verified, accepted = (int(own[self.source : self.source + self.num_sources].sum()) for own in counts)
        self._was_met |= accepted > 0
        self._unmet = 0 if accepted else self._unmet + verified
        if self._was_met and self._unmet >= MOST_UNMET:
            self._unmet = 0
            raise RuntimeError(f"none of {MOST_UNMET} draft tokens was accepted, and earlier ones were")

    def _is_short(self, name: str) -> bool:
        """Whether a request and a whole draft fit into the model's context."""
        return name in self.seats and self.seats[name].next_position < self.most_tokens

    def _survival(self) -> np.ndarray:
        """[TENTHS] probability that a token of the chain holds, by the tenth of its q."""
        factors = self.acceptance.calibration()[self.source]
        tenths = (np.arange(len(factors)) + 0.5) / len(factors)
        return np.clip(factors * tenths, 0.0, 1.0)

    def _run(self, names: Sequence[str], depth: int) -> float:
        self._prompts.difference_update(names)
        rows = self.waiting.take(names)
        try:
            return self.proposer.run(rows, [self.seats[name] for name in names], depth)
        except CONTAINED:
            # it has not seen all of their rows, and these are gone; some of its levels may not have been drawn
            self._next.update(dict.fromkeys(names, _LOST))
            self._watched, self._watched_rows = [], {}
            raise

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """[R] the next level's tokens, of logits [R, vocab].

        Raises:
            Enough: another level is not worth its pass.
        """
        scaled, depth = self.scaled(logits), self._levels.depth + len(self._drawn)
        likeliest = self.likeliest(scaled, depth)
        known = self.coupling.log_probabilities(likeliest, self._are_greedy.to(logits.device))[:, :-1]
        log_q, place = known.topk(2 if self._has_alternatives and known.shape[1] > 1 else 1, dim=-1)
        drawn = likeliest.tokens.gather(1, place)
        if self._watched_rows:
            self._watched.append((likeliest, drawn[:, 0]))
        # what is no number tells the host so, with the copy that it reads anyway
        log_q = log_q + logits.amax(dim=-1, keepdim=True).float() * 0.0
        # one copy: 64 bits of floating point hold both as they are
        self._drawn.append(torch.stack([drawn.double(), log_q.double()]))
        if not self.proposer.is_one_pass and self._levels.may_end:
            # only the host can tell whether the next pass is worth it
            self._read()
            if self._levels.is_enough(self._pass_price.of(len(self.entries))):
                raise Enough
        return drawn[:, 0]

    def _read(self) -> None:
        """The levels that were drawn since the last time come to the host, in one copy."""
        if self._drawn:
            for tokens, log_q in torch.stack(self._drawn).cpu().numpy():
                self._unsound += int(np.isnan(log_q[:, 0]).sum())
                self._levels.add(tokens.astype(np.int64), np.nan_to_num(log_q, nan=_WORST).astype(np.float32))
            self._drawn = []

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, vocab] float32 the model's logits at the requests' temperatures, the highest 0."""
        # a broken drafter costs speed, never more
        logits = torch.nan_to_num(logits.float(), nan=0.0, posinf=1e4, neginf=-1e4)
        scaled = logits / self._temperatures.to(logits.device)[:, None]
        return scaled - scaled.amax(dim=-1, keepdim=True)

    def likeliest(self, scaled: torch.Tensor, depth: int) -> Likeliest:
        """Of `scaled` logits, with the noise of the position so far ahead."""
        found = Likeliest.of(scaled)
        noise = self.noise.ahead(found.tokens, self.entries, depth)
        noise = noise.masked_fill(self._are_greedy.to(noise.device)[:, None], 0.0)
        found.noise[:, :-1] = noise
        return found

    def _learn(self, rows: HeldRows) -> None:
        """The target's tokens are known: the first row of a request holds the token drafted from, those behind it what
        it went on with, and the last one was sampled in this step."""
        starts = np.concatenate([[0], np.cumsum(rows.counts)])[:-1].tolist()
        tokens = rows.token_ids.cpu().numpy()
        chains = torch.stack([chain for _, chain in self._watched], dim=1).cpu().numpy()
        # level, row among the requests of then, and the token that the target took
        met: list[tuple[int, int, int]] = []
        for name, start, count in zip(rows.request_ids, starts, rows.counts.tolist(), strict=True):
            row = self._watched_rows.get(name) if name is not None else None
            if row is None or name is None:
                continue
            path = tokens[start + 1 : start + count].tolist()
            if (seat := self.seats.get(name)) is not None:
                path.append(seat.next_token)
            for level, token in enumerate(path[: chains.shape[1]]):
                met.append((level, row, token))
                if token != chains[row, level]:
                    break
        watched, self._watched, self._watched_rows = self._watched, [], {}
        if met:
            level, row, taken = (torch.tensor(column) for column in zip(*met, strict=True))
            columns = ("tokens", "log_q", "noise")
            own = (torch.stack([getattr(one, name) for one, _ in watched])[level, row] for name in columns)
            self.coupling.observe(Likeliest(*own), self._are_greedy[row], taken)
