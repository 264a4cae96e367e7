"""A model that drafts on the device: vLLM's own speculator, its tokens the likeliest ones given the target's noise.

What belongs here: what has to be so before vLLM's passes run as they are, how likely each drafted token is, and what is
learned of that from the tokens that the target took. Which requests drafts are taken for is chosen beside the other
drafts (device_drafts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.budgets.goodput import Acceptance
from vllm_specrollout.drafters.beams import CHILDREN, BeamTrees, beam_for
from vllm_specrollout.drafters.coupling import LIKELIEST, Coupling, Likeliest
from vllm_specrollout.drafters.looked_up import LateDrafts
from vllm_specrollout.kernels.draft_choice.naive import CHAIN_CHANCE
from vllm_specrollout.kernels.tree_verify.kernel import noise_of
from vllm_specrollout.observe.heads import Heads
from vllm_specrollout.patches import features
from vllm_specrollout.types import RequestView, TreeBatch, VerifyResult
from vllm_specrollout.worker.models.proposing import is_untrained, most_tokens, without_adapters
from vllm_specrollout.worker.v2.beams import Beams

WATCHED_EVERY = 8
"""Steps of which one is learned from."""
WATCHED = 32
"""Requests of a batch that are, at most."""
_NEVER = 1 << 30
# weight of the last drafts in what a draft's chances usually are
_SHARE = 0.02


class DeviceModel(LateDrafts):
    """One of vLLM's speculators.

    Args:
        of_vllm: its model loaded.
        target: the engine's model.
        levels: most tokens of a draft.
        source: index of the drafter.
        states: vLLM's of the requests that run.
        acceptance: of all drafts of the engine.
    """

    name = "model"
    num_sources = 2
    is_in_step = True

    def __init__(
        self, of_vllm: Any, target: torch.nn.Module, levels: int, source: int, states: Any, acceptance: Acceptance
    ) -> None:
        super().__init__()
        self.of_vllm, self.source, self._states, self.acceptance = of_vllm, source, states, acceptance
        self.most_tokens = most_tokens(of_vllm, levels)
        self.heads = Heads(source)
        self.usual_chance = CHAIN_CHANCE
        """That a token of its drafts holds, of those that came home lately."""
        self.beams: Beams | None = None
        """Passes in which several nodes of a request go on; None: it has none such."""
        self.most_beams: int | None = None
        """Nodes of a level that go on; None: as many as pay."""
        self.is_by_q = False
        """Whether its nodes count by its own probabilities, as in papers, whatever the noise is."""
        device, most = of_vllm.device, of_vllm.max_num_reqs
        self.coupling = Coupling(device)
        count = min(LIKELIEST, of_vllm.vocab_size)
        # [batch, levels, children] of each level the likeliest tokens, the drafted one first; their log probabilities
        shape = most, levels, min(CHILDREN, count)
        self._children = torch.zeros(shape, dtype=torch.int64, device=device)
        self._log_p = torch.zeros(shape, device=device)
        # [first requests of the batch, levels, ...] what was known there, as `Likeliest` has it
        seen = min(most, WATCHED), levels
        self._seen = Likeliest(
            torch.zeros(*seen, count, dtype=torch.int64, device=device),
            torch.zeros(*seen, count + 1, device=device),
            torch.zeros(*seen, count + 1, device=device),
        )
        self._places = torch.arange(most * levels, device=device)
        # [rows of requests] tokens of each request when it was drafted for
        self._lengths = torch.full((most,), _NEVER, dtype=torch.int64, device=device)
        # the drafts that are learned from: [W] rows of the requests, [W, L] tokens; None: none are
        self._watched: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps = 0
        self._is_philox = features.installed().v2_noise == "philox"
        self.is_resting = is_untrained(of_vllm)
        of_vllm.sample_draft = self._sample
        without_adapters(of_vllm.model, target)
        # it is run for all requests, those beyond its own context as well, of whose drafts nothing is taken
        last = of_vllm.speculative_config.draft_model_config.max_model_len - 1

        def within(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "positions": kwargs["positions"].clamp(max=last)}

        if self.most_tokens < of_vllm.vllm_config.model_config.max_model_len:
            of_vllm.model.register_forward_pre_hook(within, with_kwargs=True)

    def _sample(
        self, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor,
        seeds: torch.Tensor, step: torch.Tensor, *args: Any, spec_step_idx: int = 0, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[R] int64, in the place of `DraftModelSpeculator.sample_draft`."""
        has_levels = hasattr(self.of_vllm, "compute_draft_logits")
        compute = self.of_vllm.compute_draft_logits if has_levels else self.of_vllm.model.compute_logits
        logits = compute(hidden, spec_step_idx) if has_levels else compute(hidden)
        found, is_greedy = self.likeliest(logits, positions, rows, temperature, seeds)
        children, log_p = self._children_of(found, is_greedy)
        # of one level all requests, or of each request all levels
        each = 1 if step.dim() == 0 else self._log_p.shape[1]
        place, level = self._places[: len(rows)] // each, step.expand(len(rows))
        self._log_p[place, level], self._children[place, level] = log_p, children
        watched = min(len(rows), len(self._seen.tokens) * each)
        at = place[:watched], level[:watched]
        for name in ("tokens", "log_q", "noise"):
            getattr(self._seen, name)[at] = getattr(found, name)[:watched]
        # vLLM's kernels read them one behind another
        return children[:, 0].contiguous()

    def _children_of(self, found: Likeliest, is_greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, C] each: the likeliest tokens of rows, and their log probabilities."""
        known = found.log_q if self.is_by_q else self.coupling.log_probabilities(found, is_greedy)
        log_p, best = known[:, :-1].topk(self._log_p.shape[-1], dim=-1)
        return found.tokens.gather(1, best), log_p

    def expand(
        self, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Expand` has it."""
        spec = self.of_vllm
        logits = spec.compute_draft_logits(hidden, 0)
        return self._children_of(*self.likeliest(logits, positions, rows, spec.temperature, spec.seeds))

    def begin(self, ends: torch.Tensor, branches: torch.Tensor, nodes: int) -> None:
        """Drafts of a batch are about to be made, as `drafted` will be asked for them.

        Args:
            nodes: of a tree, at most.
        """
        if self.beams is None:
            return
        count = len(ends)
        beam = beam_for(nodes, count, self.beams.most_rows) if self.most_beams is None else self.most_beams
        while beam * count > self.beams.most_rows:
            beam //= 2
        self.beams.trees = BeamTrees(ends, branches == 0, beam) if beam > 1 else None
        self.beams.drafted = self._children[:, 0], self._log_p[:, 0]

    def likeliest(
        self, logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> tuple[Likeliest, torch.Tensor]:  # fmt: skip
        """The likeliest tokens of logits [R, vocab] with the noise of their positions, and [R] bool whose request is
        greedy."""
        own = temperature[rows.clamp(min=0)]
        is_greedy = own == 0.0
        # a broken drafter costs speed, never more
        logits = torch.nan_to_num(logits.float(), nan=0.0, posinf=1e4, neginf=-1e4)
        found = Likeliest.of(logits / torch.where(is_greedy, 1.0, own)[:, None])
        found.noise[:, :-1] = noise_of(
            found.tokens, rows, temperature, seeds, positions, use_fp64=self.of_vllm.use_fp64_gumbel,
            is_philox=self._is_philox,
        )  # fmt: skip
        return found, is_greedy

    # --- its drafts --------------------------------------------------------------------------------------------------

    def drafted(
        self, levels: int, lengths: torch.Tensor, limits: torch.Tensor, ends: torch.Tensor, branches: torch.Tensor,
        width: int, *, may_branch: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The drafts of a batch, each [R, width] as a lookup returns them: tokens, -1 behind the last one; parents;
        and the probability that the target walks down to each node.

        Args:
            levels: that vLLM's passes drafted.
            lengths: [R] tokens of the requests.
            limits: [R] most nodes.
            ends: [R, at least 1] tokens that no draft has; -1: none.
            branches: [R] whether a request may have a tree.
            may_branch: False: none may.
        """
        # where there is no bound, it has more bits than lengths
        limits = torch.where(lengths.long() < self.most_tokens, limits, 0)
        if self.beams is not None and self.beams.trees is not None:
            trees, self.beams.trees = self.beams.trees, None
            return trees.best(limits, width)
        # without branches there is nothing to choose from
        count, own = len(limits), slice(None if may_branch else 1)
        tokens, log_p = self._children[:count, :levels, own], self._log_p[:count, :levels, own]
        trees = BeamTrees.of_comb(ends, branches == 0, tokens, log_p)
        return trees.best(limits, width)

    # --- how likely its tokens are -----------------------------------------------------------------------------------

    def take(self, rows: Sequence[int]) -> None:
        """Requests have come into these rows."""
        where = torch.tensor(rows, dtype=torch.int64)
        self._lengths[where.to(self._lengths.device)] = _NEVER

    def learn(self) -> None:
        """Compare the drafts that are watched with what the target took since; before any are made anew."""
        if self._watched is None:
            return
        (rows, tokens), self._watched = self._watched, None
        states, (count, levels) = self._states, tokens.shape
        level = torch.arange(levels, device=tokens.device)
        begin = self._lengths[rows]
        place = begin[:, None] + level
        running = states.all_token_ids.gpu
        taken = running[rows[:, None], place.clamp(max=running.shape[1] - 1)].long()
        is_there = place < states.total_len.gpu[rows].long()[:, None]
        # a level is drafted below what the target took, or says nothing of it
        follows = (taken == tokens).cumprod(dim=1).roll(1, dims=1)
        follows[:, 0] = 1
        seen = self._seen
        parts = (one[:count, :levels].flatten(0, 1) for one in (seen.tokens, seen.log_q, seen.noise))
        is_greedy = (self.of_vllm.temperature[rows] == 0.0).repeat_interleave(levels)
        self.coupling.observe(Likeliest(*parts), is_greedy, taken.flatten(), (is_there & (follows > 0)).flatten())

    def watch(self, batch: InputBatch, tokens: torch.Tensor) -> None:
        """The model has drafted tokens [R, levels] for a batch; now and then they are learned from."""
        self._steps += 1
        if self.beams is not None and self.beams.trees is not None:
            # which token went on from the first level goes by all of them
            tokens = tokens[:, :1]
        if self._steps % WATCHED_EVERY == 1:
            rows = batch.idx_mapping[: len(self._seen.tokens)].long()
            self._lengths[rows] = self._states.total_len.gpu[rows].long()
            self._watched = rows, tokens[: len(rows)].clone()

    def admit(self, view: RequestView) -> None:
        self.heads.admit(view.request_id)

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        self.heads.observe(trees, result)
        mine = np.flatnonzero(trees.sizes)
        mine = mine[trees.source[trees.node_start[mine]] == self.source]
        if len(mine):
            own = np.isin(np.repeat(np.arange(trees.num_requests), trees.sizes), mine)
            self.usual_chance += _SHARE * (float(np.exp(trees.log_q[own]).mean()) - self.usual_chance)

    def forget(self, request_id: str) -> None:
        self.heads.forget(request_id)

    def renew(self) -> None:
        """Its weights are others: what was learned of the old ones counts for little."""
        self.acceptance.renew(self.source, self.num_sources)
        self.coupling.fade()
        self._watched = None
        self.is_resting = False
