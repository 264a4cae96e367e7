"""Drafts of the lane, made on the device behind the sampler: looked up, carried there in lines, or a model's.

What belongs here: who drafts for a batch's requests, what the host tells of them in one packed copy, whose draft each
request gets, and what the device keeps of it until its step. What is looked up in is `texts.py`, how, is
`kernels/lookup`. Nothing is read back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specrollout.kernels.lookup.kernel import Lookup
from vllm_specrollout.kernels.lookup.naive import TILE
from vllm_specrollout.observe.guard import CONTAINED, Guard
from vllm_specrollout.patches import features
from vllm_specrollout.types import IntArray
from vllm_specrollout.worker.v2.device_times import DeviceTimes
from vllm_specrollout.worker.v2.texts import DeviceTexts

MOST_TILES = 1 << 20
"""Tiles of a batch, at most: 32 MiB for what is found in them. Where there are more, the last texts are left out."""
SIBLINGS, ENDS = (0, 7, 63), (1, 4, 16, 64)
"""Columns for running requests whose tokens are looked at beside a request's own, and for tokens that end it. Kernels
are compiled for each of these numbers; who has more siblings than the last one goes without the others."""
LINE = 64
"""Tokens that the host carries to the device of a draft which was not made there."""
LOOKED, LINED, MODELLED = range(3)
WITHHELD = 16
"""Added to the kind of drafts whose verdict is withheld, so that all ranks know."""


class Told(NamedTuple):
    """What the host knows of one request that runs."""

    # of its problem's earlier answers; -1: there are none
    problem: int
    siblings: Sequence[str]
    # tokens that end it, which are not drafted
    ends: IntArray
    # most nodes; 0: nothing is drafted
    limit: int
    # no branches
    is_chain: bool


NOBODY = Told(-1, (), np.zeros(0, np.int32), 0, True)


@dataclass(frozen=True, slots=True)
class Drafts:
    """One kind of drafts for a batch, on the device. Parents come before their children."""

    # [R, K] int32, -1 behind a draft's end
    tokens: torch.Tensor
    # [R, K] int32 node that each hangs on; -1: the root
    parents: torch.Tensor
    # [R, K] float32 probability that the target walks down to each
    chances: torch.Tensor


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
        times: of the step's parts on the device.
    """

    def __init__(
        self, speculator: Any, depth: int, states: Any, told: Callable[[str], Told], texts: DeviceTexts | None,
        max_depth: int, guard: Guard, times: DeviceTimes,
    ) -> None:  # fmt: skip
        self._states, self._told, self.texts = states, told, texts
        self._device, self._guard, self._times = states.device, guard, times
        self.width, most = states.num_speculative_steps, states.max_num_reqs
        self._propose, self._depth = speculator.propose, depth
        speculator.propose = self.propose
        self._speculator = speculator
        speculator.draft_token_confidence_probs = torch.zeros(most, self.width, device=self._device)
        # [rows, 3 * width + 1] int32 of each running request's next step: tokens (-1: none), parents, bits of the
        # chances; and who made it, with `WITHHELD`, or -1
        self._words = torch.full((most, 3 * self.width + 1), -1, dtype=torch.int32, device=self._device)
        self.drafted, self.kinds = self._words[:, :-1].unflatten(1, (3, self.width)), self._words[:, -1]
        # [rows, 1 + LINE] int32 tokens of a request when its line begins, and the line, -1 behind its end
        self._lines = torch.full((most, 1 + LINE), -1, dtype=torch.int32, device=self._device)
        self.has_lines = False
        # [3] share of each kind's drafts that hold where those before them do
        self._rates = torch.full((3,), 0.7, device=self._device)
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
        self.look_up: Callable[[InputBatch, Sequence[Told]], Drafts] = self._looked_up

    @torch.inference_mode()
    def propose(self, input_batch: InputBatch, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """[R, width] int64 drafts of the batch's requests, -1 where there are none: in the place of vLLM's."""
        modelled = None
        if self._depth:
            if features.installed().drafts_few:
                kwargs["num_speculative_tokens"] = self._depth
            modelled = self._propose(input_batch, *args, dummy_run=dummy_run, **kwargs)[:, : self._depth]
        if dummy_run:
            shape = input_batch.num_reqs, self.width
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.are_fresh = not self.is_paused
        group = get_tp_group()
        packed = torch.full((input_batch.num_reqs, 3 * self.width + 1), -1, dtype=torch.int32, device=self._device)
        if group.rank_in_group == 0:
            try:
                packed = self._chosen(input_batch, modelled, packed)
            except CONTAINED as error:
                self._guard.failed("drafting", error, "requests go on without drafts in such a step")
        if group.world_size > 1:
            # texts come when they come, and all ranks must compute the same rows
            packed = group.broadcast(packed, src=0)
        self._words[input_batch.idx_mapping] = packed
        if getattr(self._speculator, "enable_adaptive_verification", False):
            self._tell_confidence(packed)
        return packed[:, : self.width].long()

    def _chosen(self, batch: InputBatch, modelled: torch.Tensor | None, none: torch.Tensor) -> torch.Tensor:
        """[R, 3 * width + 1] int32 per request the drafts of which most tokens are expected, and whose they are."""
        told = [self._told(name) for name in batch.req_ids]
        kinds: list[tuple[int, Drafts]] = []
        if self.looks_up and not self.is_paused:
            with self._times.of("lookup"):
                kinds.append((LOOKED, self.look_up(batch, told)))
        chains: list[tuple[int, torch.Tensor]] = []
        if self.has_lines and not self.is_paused:
            chains.append((LINED, self._lined(batch)))
        if modelled is not None and self.model is not None:
            has_room = self._states.total_len.gpu[batch.idx_mapping].long() < self.model.most_tokens
            chains.append((MODELLED, torch.where(has_room[:, None], modelled.int(), -1)))
        if chains:
            limits, ends = self._sent(self._limits(told), self._ends(told))
            kinds += [(kind, self._chain(tokens, kind, limits, ends)) for kind, tokens in chains]
        if not kinds:
            return none
        packed = [torch.cat([one.tokens, one.parents, one.chances.view(torch.int32)], dim=1) for _, one in kinds]
        if len(kinds) == 1:
            none[:, :-1], none[:, -1] = packed[0], kinds[0][0]
            chosen = none
        else:
            best = torch.stack([(one.chances * (one.tokens >= 0)).sum(dim=1) for _, one in kinds]).argmax(dim=0)
            (names,) = self._sent(np.array([kind for kind, _ in kinds], dtype=np.int32))
            own = torch.stack(packed)[best, torch.arange(len(told), device=self._device)]
            chosen = torch.cat([own, names[best][:, None]], dim=1)
        self._cut_to_ends(chosen, batch)
        if (name := self.withhold(batch.req_ids)) in batch.req_ids:
            chosen[batch.req_ids.index(name), -1] += WITHHELD
        return chosen

    def _cut_to_ends(self, packed: torch.Tensor, batch: InputBatch) -> None:
        """Take from drafts, in place, what an answer has no use for: its last token is the target's."""
        states = self._states
        (ends,) = self._sent(np.minimum(states.max_seq_len[batch.idx_mapping_np], states.max_model_len))
        left = ends - states.total_len.gpu[batch.idx_mapping] - 1
        depth = torch.arange(self.width, dtype=torch.int32, device=self._device)
        packed[:, : self.width].masked_fill_(depth >= left[:, None], -1)

    def _chain(self, tokens: torch.Tensor, kind: int, limits: torch.Tensor, ends: torch.Tensor) -> Drafts:
        """A chain of these tokens [R, at most K] int32, cut at a request's limit and before what ends it."""
        count, depth = tokens.shape[1], torch.arange(self.width, dtype=torch.int32, device=self._device)
        own = torch.full((len(tokens), self.width), -1, dtype=torch.int32, device=self._device)
        own[:, :count] = tokens
        is_there = (own >= 0) & (depth < limits[:, None]) & ~(own[:, :, None] == ends[:, None, :]).any(dim=2)
        own = torch.where(is_there.cumprod(dim=1).bool(), own, -1)
        chances = (self._rates[kind] ** (depth + 1)).expand(own.shape)
        return Drafts(own, (depth - 1).expand(own.shape), chances)

    def _lined(self, batch: InputBatch) -> torch.Tensor:
        """[R, K] int32 what is left of each request's line, if all that it has got since is the line's."""
        rows, states = batch.idx_mapping, self._states
        line, begin = self._lines[rows, 1:], self._lines[rows, :1].long()
        place = torch.arange(LINE, device=self._device)
        since = states.total_len.gpu[rows][:, None] - begin
        at = (begin + place).clamp(0, states.max_model_len - 1)
        is_met = (states.all_token_ids.gpu[rows[:, None], at] == line) | (place >= since)
        is_good = (begin > 0) & (since >= 0) & is_met.all(dim=1, keepdim=True)
        left = since + place[: self.width]
        found = line.gather(1, left.clamp(0, LINE - 1))
        return torch.where(is_good & (left < LINE), found, -1)

    def _tell_confidence(self, packed: torch.Tensor) -> None:
        """Each draft's chance over that of the one before it: their product, by which rows are given, is its own."""
        bits = packed[:, 2 * self.width : 3 * self.width].contiguous().view(torch.float32)
        chances = torch.where(packed[:, : self.width] >= 0, bits, 0.0)
        before = torch.cat([torch.ones_like(chances[:, :1]), chances[:, :-1]], dim=1)
        self._speculator.draft_token_confidence_probs[: len(packed)] = (chances / before.clamp(min=1e-9)).clamp_(
            max=1.0
        )

    def warm_up(self) -> None:
        """Compile what steps launch, for rows that have no tokens: of these numbers of siblings, and few ends."""
        states = self._states
        tables = states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu
        buffers = (self.texts.texts, self.texts.spans) if self.texts is not None else self._no_texts()
        for siblings, ends in itertools.product(SIBLINGS if self.looks_up else (), ENDS[:2]):
            asked, one = np.full((1, 2 + siblings), -1, dtype=np.int32), np.zeros(1, dtype=np.int32)
            asked[0, 0] = 0
            sent = self._sent(asked, one, one, np.full((1, ends), -1, dtype=np.int32))
            self._lookup(*buffers, *tables, *sent, 1)

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
        self.has_lines = True
        where, what = self._sent(rows, lines)
        self._lines[where.long()] = what

    def rate(self, rates: Sequence[float]) -> None:
        """What of each kind's drafts held lately, by which they are compared from now on."""
        (bits,) = self._sent(np.asarray(rates, dtype=np.float32).view(np.int32))
        self._rates = bits.view(torch.float32)

    # --- what the lookup is told -------------------------------------------------------------------------------------

    def _looked_up(self, batch: InputBatch, told: Sequence[Told]) -> Drafts:
        states, texts = self._states, self.texts
        if texts is not None:
            texts.apply()
        asked = self._asked(batch, told)
        most_tiles = min(self._most_tiles(asked, told), MOST_TILES // len(told))
        branches = np.fromiter((self.may_branch and not one.is_chain for one in told), np.int32, len(told))
        on_device = self._sent(asked, self._limits(told), branches, self._ends(told))
        buffers = (texts.texts, texts.spans) if texts is not None else self._no_texts()
        found = self._lookup(
            *buffers, states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu, *on_device, most_tiles
        )
        return Drafts(*found)

    def _limits(self, told: Sequence[Told]) -> IntArray:
        return np.fromiter((one.limit for one in told), np.int32, len(told))

    def _asked(self, batch: InputBatch, told: Sequence[Told]) -> IntArray:
        """[R, 2 + siblings] int32: rows of the request, of its problem, and of its siblings, -1 where there are none.

        A kernel is compiled for each number of siblings, so there are few of them.
        """
        rows = [
            [row for name in one.siblings if (row := self._states.req_id_to_index.get(name)) is not None]
            for one in told
        ]
        most = min(max(map(len, rows)), SIBLINGS[-1])
        asked = np.full((len(told), 2 + next(n for n in SIBLINGS if n >= most)), -1, dtype=np.int32)
        asked[:, 0] = batch.idx_mapping_np
        for i, (one, own) in enumerate(zip(told, rows, strict=True)):
            asked[i, 1] = one.problem
            asked[i, 2 : 2 + min(len(own), SIBLINGS[-1])] = own[: SIBLINGS[-1]]
        return asked

    def _ends(self, told: Sequence[Told]) -> IntArray:
        """[R, some] int32, -1 where a request has fewer."""
        most = max(len(one.ends) for one in told)
        columns = next((n for n in ENDS if n >= most), 1 << most.bit_length())
        ends = np.full((len(told), columns), -1, dtype=np.int32)
        for own, one in zip(ends, told, strict=True):
            own[: len(one.ends)] = one.ends
        return ends

    def _most_tiles(self, asked: IntArray, told: Sequence[Told]) -> int:
        """Tiles of one request, at most. How long texts are that run, the device alone knows: no longer than this."""
        states = self._states
        most = np.maximum(states.num_computed_tokens_np + self.width + 2, states.prefill_len.np)
        own = -(-most[asked[:, 0]] // TILE)
        others = np.where(asked[:, 2:] >= 0, -(-(most - states.prompt_len.np + 1)[asked[:, 2:]] // TILE), 0)
        past = [0 if self.texts is None else self.texts.plan.tiles_of(one.problem) for one in told]
        return int((own + others.sum(axis=1) + np.array(past)).max())

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
