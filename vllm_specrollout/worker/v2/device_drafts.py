"""Drafts of the lane, made on the device behind the sampler: looked up, carried there in lines, or a model's.

What belongs here: who drafts for a batch's requests, what the host tells of them in one packed copy, whose draft each
request gets, and what the device keeps of it until its step. What is looked up in is `texts.py`, how, is
`kernels/lookup`. Nothing is read back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specrollout.kernels.draft_choice.kernel import choose
from vllm_specrollout.kernels.draft_choice.naive import WITHHELD
from vllm_specrollout.kernels.lookup.kernel import Lookup
from vllm_specrollout.kernels.lookup.naive import TILE
from vllm_specrollout.observe.guard import CONTAINED, Guard
from vllm_specrollout.patches import features
from vllm_specrollout.types import TENTHS, IntArray
from vllm_specrollout.worker.v2.texts import DeviceTexts
from vllm_specrollout.worker.v2.told import ENDS, SIBLINGS, Asked, Told, ToldRows

MOST_TILES = 1 << 20
"""Tiles of a batch, at most: 32 MiB for what is found in them. Where there are more, the last texts are left out."""
LINE = 64
"""Tokens that the host carries to the device of a draft which was not made there."""


class Bystander(BaseSpeculator):
    """What vLLM's runner asks where no model drafts."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, width: int) -> None:
        self.num_speculative_steps = width

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """A lookup's launches go by the texts, so they are made anew in each step."""

    def capture(self) -> None:
        """Nothing is captured."""

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[R, width] int64 no drafts."""
        device = input_batch.idx_mapping.device
        return torch.full((input_batch.num_reqs, self.num_speculative_steps), -1, dtype=torch.int64, device=device)


class DeviceDrafts:
    """Drafts of the requests that run, made in each step for the next.

    Args:
        speculator: vLLM's. What it proposes are a model's drafts; what it answers from now on is what was chosen.
        depth: most tokens that the speculator drafts itself; 0: it is a bystander.
        states: vLLM's of the requests that run.
        told: what the host knows of a request by its name.
        texts: earlier answers on the device; None: none are looked at.
        max_depth: most tokens of a path that is looked up.
        guard: told of what fails.
    """

    def __init__(
        self, speculator: Any, depth: int, states: Any, told: Callable[[str], Told], texts: DeviceTexts | None,
        max_depth: int, guard: Guard,
    ) -> None:  # fmt: skip
        self._states, self.texts = states, texts
        self._device, self._guard = states.device, guard
        self.width, most = states.num_speculative_steps, states.max_num_reqs
        self.told = ToldRows(most, states.req_id_to_index, told)
        self.changed: Callable[[], Iterable[str]] = tuple
        """Asked in each step of whom something else is to be told than so far."""
        self.held: Callable[[], Iterable[str]] = tuple
        """Asked in each step for whom nothing is drafted now."""
        self.most = self.width
        """Nodes of any request, at most."""
        self._speculator, self._propose, self._depth = speculator, speculator.propose, depth
        speculator.propose = self.propose
        # [batch, width] float32 chance of each draft once the one before it holds, by which vLLM may give it a row
        self._confidence = speculator.draft_token_confidence_probs = torch.zeros(most, self.width, device=self._device)
        # [rows, 3 * width + 1] int32 of each running request's next step, as `choose` writes them; or -1
        self._words = torch.full((most, 3 * self.width + 1), -1, dtype=torch.int32, device=self._device)
        self.drafted, self.kinds = self._words[:, :-1].unflatten(1, (3, self.width)), self._words[:, -1]
        # [rows, 1 + LINE] int32 tokens of a request when its line begins, and the line, -1 behind its end
        self._lines = torch.full((most, 1 + LINE), -1, dtype=torch.int32, device=self._device)
        self.carries = False
        """Whether drafters on the host carry lines here."""
        self.factors = np.ones((3, TENTHS))
        """[3, TENTHS] float64 what chances of each kind are multiplied by, as `choose` is told."""
        self.is_covered = False
        """Whether a model's drafts beyond the first token are not wanted in the next step."""
        self._lookup = Lookup(self.width, most, MOST_TILES, self._device, max_depth=max_depth)
        self.may_branch = False
        """Whether trees are drafted for those requests that may have them."""
        self.looks_up = True
        self.is_paused = False
        """Whether nothing but a model drafts."""
        self.are_fresh = False
        """Whether it was not so when drafts were made last."""
        self.model: Any = None
        """The model whose drafts are taken; None: none are."""
        self.withhold: Callable[[list[str]], str] = lambda names: ""
        """Names the request of a batch whose verdict is withheld in the next step; empty: none is."""
        self.rearranged: Callable[[InputBatch, Any], tuple[InputBatch, Any]] = lambda batch, args: (batch, args)
        """Brings the rows of a step, with what `propose` is told of them, into the order that speculators read."""
        self.look_up = self._looked_up
        # what `_tell` returned for the step in progress, if it was asked before the model's passes
        self._told_now: tuple[Asked, list[torch.Tensor]] | None = None

    @torch.inference_mode()
    def propose(self, input_batch: InputBatch, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """[R, width] int64 drafts of the batch's requests, -1 where there are none: in the place of vLLM's."""
        modelled = None
        if self._depth:
            # of drafts that nobody wants, the first pass alone, which keeps their model's KV cache whole
            levels = self._speculator.num_speculative_steps = 1 if self.is_covered and not dummy_run else self._depth
            if features.installed().drafts_few:
                kwargs["num_speculative_tokens"] = levels
            is_taken = self.model is not None and not dummy_run
            if is_taken:
                self._begin_model(input_batch, levels)
            input_batch, args = self.rearranged(input_batch, args)
            modelled = self._propose(input_batch, *args, dummy_run=dummy_run, **kwargs)[:, :levels]
            if is_taken:
                self.model.watch(input_batch, modelled)
        if dummy_run:
            shape = input_batch.num_reqs, self.width
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.are_fresh = not self.is_paused
        group, rows, words, known = get_tp_group(), input_batch.idx_mapping, self._words, self._confidence
        is_chosen = False
        if group.rank_in_group == 0:
            try:
                is_chosen = self._choose(input_batch, modelled)
            except CONTAINED as error:
                self._guard.failed("drafting", error, "requests go on without drafts in such a step")
        if not is_chosen:
            words[rows], known[: len(rows)] = -1, 0.0
        if group.world_size > 1:
            # texts come when they come, and all ranks must compute the same rows
            words[rows] = group.broadcast(words[rows], src=0)
            if getattr(self._speculator, "enable_adaptive_verification", False):
                known[: len(rows)] = group.broadcast(known[: len(rows)].clone(), src=0)
        return words[rows, : self.width].long()

    def _begin_model(self, batch: InputBatch, levels: int) -> None:
        """Before its passes the model learns of the last ones, and is told of the requests if several nodes of a level
        may go on."""
        try:
            self.model.learn()
            if self.model.beams is None or not self.may_branch or self.is_paused or levels < 2:
                return
            _, sent = self._told_now = self._tell(batch)
            self.model.begin(sent[3], sent[2], self.most)
        except CONTAINED as error:
            self._guard.failed("drafting", error, "requests go on without trees in such a step")

    def _tell(self, batch: InputBatch) -> tuple[Asked, list[torch.Tensor]]:
        """What the host knows of the batch's requests, and that on the device."""
        self.told.renew(self.changed())
        asked, states = self.told.asked(batch.idx_mapping_np, self.most, may_branch=self.may_branch), self._states
        for name in self.held():
            asked.limits[asked.rows == states.req_id_to_index.get(name, -1)] = 0
        until = np.minimum(states.max_seq_len[batch.idx_mapping_np], states.max_model_len)
        return asked, self._sent(*asked[1:], until, self.factors.astype(np.float32).view(np.int32))

    def _choose(self, batch: InputBatch, modelled: torch.Tensor | None) -> bool:
        """Give each request the draft of which most tokens are expected; False: there are none to choose from."""
        told, self._told_now = self._told_now, None
        asked, sent = told or self._tell(batch)
        _, limits, branches, ends, until_there, factors = sent
        states = self._states
        looked = None
        if self.looks_up and not self.is_paused:
            looked = self.look_up(batch, asked, sent[:4])
        lines = self._lines if self.carries and not self.is_paused else None
        if self.model is None:
            modelled = None
        if looked is None and lines is None and modelled is None:
            return False
        own = None
        if modelled is not None:
            lengths = states.total_len.gpu[batch.idx_mapping]
            own = self.model.drafted(
                modelled.shape[1], lengths, limits, ends, branches, self.width, may_branch=self.may_branch
            )
        name = self.withhold(batch.req_ids)
        choose(
            self._words, self._confidence, batch.idx_mapping, states.all_token_ids.gpu, states.total_len.gpu,
            limits, until_there, ends, factors.view(torch.float32), looked=looked, lines=lines, modelled=own,
            withheld=batch.req_ids.index(name) if name in batch.req_ids else -1, has_branches=self.may_branch,
        )  # fmt: skip
        return True

    def warm_up(self) -> None:
        """Compile what steps launch, for rows that have no tokens: of these numbers of siblings, and few ends."""
        states = self._states
        tables = states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu
        buffers = (self.texts.texts, self.texts.spans) if self.texts is not None else self._no_texts()
        one = np.zeros(1, dtype=np.int32)
        for siblings, ends in itertools.product(SIBLINGS if self.looks_up else (), ENDS[:2]):
            asked = np.full((1, 2 + siblings), -1, dtype=np.int32)
            asked[0, 0] = 0
            sent = self._sent(asked, one, one, np.full((1, ends), -1, dtype=np.int32))
            self._lookup(*buffers, *tables, *sent, 1)
        rows, words = torch.zeros(1, dtype=torch.int64, device=self._device), torch.full_like(self._words, -1)
        drafts = self._lookup.drafts, self._lookup.parents, self._lookup.chances
        none = torch.full((2, 1, self.width), -1, dtype=torch.int32, device=self._device)
        modelled = (*none, torch.zeros(1, self.width, device=self._device)) if self._depth else None
        for looked, ends, branches in itertools.product(
            (drafts, None) if self.looks_up else (None,), ENDS[:2], (False, True) if self.looks_up else (False,)
        ):
            lines = self._lines if self.carries else None
            if looked is None and lines is None and modelled is None:
                continue
            sent = self._sent(one, one, np.full((1, ends), -1, dtype=np.int32), np.zeros((3, TENTHS), np.int32))
            choose(
                words, torch.zeros_like(self._confidence), rows, tables[0], tables[2], *sent[:3],
                sent[3].view(torch.float32), looked=looked, lines=lines, modelled=modelled, has_branches=branches,
            )  # fmt: skip

    # --- between host and device -------------------------------------------------------------------------------------

    def withheld(self, batch: InputBatch) -> torch.Tensor:
        """[R] bool whose verdict is withheld in the step that is verified now."""
        return self.kinds[batch.idx_mapping] >= WITHHELD

    def home(self, batch: InputBatch, *, rows_are_on_device: bool) -> torch.Tensor:
        """[R, 3 * width + 1] int32, as in `Home`, of the step that is verified now; where the device alone knows how
        many drafts have rows, those numbers follow."""
        own = self._words[batch.idx_mapping]
        if not rows_are_on_device:
            return own
        return torch.cat([own, (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1] - 1)[:, None]], dim=1)

    def put(self, request_id: str, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Have a running request drafted for with these nodes in its next step."""
        row, count = self._states.req_id_to_index[request_id], len(tokens)
        own = torch.full((3, self.width), -1, dtype=torch.int32)
        own[0, :count], own[1, :count] = torch.tensor(tokens), torch.tensor(parents)
        self.drafted[row] = own.to(self._device)
        self._states.draft_tokens[row] = own[0].to(self._device)

    def carry(self, rows: IntArray, lines: IntArray) -> None:
        """Have these lines on the device from the next step on.

        Args:
            rows: [R] int32 rows of the requests.
            lines: [R, 1 + LINE] int32 as in `_lines`.
        """
        self.carries = True
        where, what = self._sent(rows, lines)
        self._lines[where.long()] = what

    # --- what the lookup is told -------------------------------------------------------------------------------------

    def _looked_up(
        self, batch: InputBatch, asked: Asked, on_device: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, texts = self._states, self.texts
        if texts is not None:
            texts.apply()
        most_tiles = min(self._most_tiles(asked.texts), MOST_TILES // len(asked.rows))
        buffers = (texts.texts, texts.spans) if texts is not None else self._no_texts()
        return self._lookup(
            *buffers, states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu, *on_device, most_tiles
        )

    def _most_tiles(self, asked: IntArray) -> int:
        """Tiles of one request, at most. How long texts are that run, the device alone knows: no longer than this."""
        states = self._states
        most = np.maximum(states.num_computed_tokens_np + self.width + 2, states.prefill_len.np)
        own = -(-most[asked[:, 0]] // TILE)
        others = np.where(asked[:, 2:] >= 0, -(-(most - states.prompt_len.np + 1)[asked[:, 2:]] // TILE), 0)
        past = 0 if self.texts is None else self.texts.plan.tiles_of(asked[:, 1])
        return int((own + others.sum(axis=1) + past).max())

    def _sent(self, *arrays: IntArray) -> list[torch.Tensor]:
        """These arrays of int32 on the device, by one copy; each begins where 16 bytes do."""
        bounds, size = [], 0
        for array in arrays:
            bounds.append((size, size + array.size))
            size += -(-array.size // 4) * 4
        words = torch.zeros(size, dtype=torch.int32, pin_memory=PIN_MEMORY)
        own = words.numpy()
        for (begin, end), array in zip(bounds, arrays, strict=True):
            own[begin:end] = array.reshape(-1)
        there = torch.empty_like(words, device=self._device).copy_(words, non_blocking=True)
        return [there[begin:end].view(array.shape) for (begin, end), array in zip(bounds, arrays, strict=True)]

    def _no_texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        none = torch.zeros(4, dtype=torch.int32, device=self._device)
        return none, none[:0].view(0, 1, 3)
