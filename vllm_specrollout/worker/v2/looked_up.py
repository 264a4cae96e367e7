"""Drafts looked up on the device, as vLLM's V2 runner asks a speculator for them: behind the sampler, without a wait.

What belongs here: what the host tells the lookup of a batch, in one packed copy, and what the device keeps of drafts
until their step: tokens, parents and chances of each request's row. What is looked up in is `texts.py`, how, is
`kernels/lookup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specrollout.kernels.lookup.kernel import Lookup
from vllm_specrollout.kernels.lookup.naive import TILE
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import IntArray, TreeBatch

MOST_TILES = 1 << 20
"""Tiles of a batch, at most: 32 MiB for what is found in them. Where there are more, the last texts are left out."""
MOST_SIBLINGS = 63
"""Running requests whose tokens are looked at beside a request's own."""
TOKENS, PARENTS, CHANCES = range(3)


@dataclass(frozen=True, slots=True)
class Told:
    """What the host knows of one request that runs."""

    # of its problem's earlier answers; -1: there are none
    problem: int
    siblings: Sequence[str]
    # tokens that end it, which are not drafted
    ends: IntArray
    # most nodes; 0: nothing is drafted
    limit: int
    # no branches
    is_chain: bool = False


@dataclass(frozen=True, slots=True)
class Home:
    """A step's drafts on their way to the host; they are there when the step's tokens are."""

    request_ids: list[str]
    # [R, 3 * K + 1] int32 tokens, parents, bits of the chances, and how many drafts had rows
    words: np.ndarray

    def proposed(self) -> TreeBatch:
        """All that was drafted, whatever had room."""
        tokens, parents, chances = np.split(self.words[:, :-1], 3, axis=1)
        is_there = tokens >= 0
        own = chances.copy().view(np.float32)
        # of a node, given its parent
        above = np.take_along_axis(own, np.maximum(parents, 0), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_q = np.log(own) - np.where(parents >= 0, np.log(above), 0.0).astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))]).astype(np.int32)
        return proposed(self.request_ids, starts, tokens[is_there], parents[is_there], log_q[is_there], 0)

    @property
    def rows(self) -> IntArray:
        """[R] drafts that had a row, whether there was one or not."""
        return self.words[:, -1]


class LookedUp(BaseSpeculator):
    """vLLM's speculator of the lane.

    Args:
        width: most drafts of a request.
        told: what the host knows of a request by its name; None: nothing is drafted for it.
        row_of: name of a running request -> its row in vLLM's tables.
        texts: earlier answers on the device; None: none are looked at.
    """

    supports_mm_inputs = False
    draft_logits = None
    enable_adaptive_verification = False

    def __init__(
        self, width: int, states: Any, device: torch.device, told: Callable[[str], Told | None],
        row_of: Callable[[str], int | None], texts: Any = None,
    ) -> None:  # fmt: skip
        self.num_speculative_steps, self._states, self._device = width, states, device
        self._told, self._row_of, self.texts = told, row_of, texts
        most = states.max_num_reqs
        # [rows, 3, width] int32 of each running request's next step: tokens (-1: none), parents, bits of the chances
        self.drafted = torch.full((most, 3, width), -1, dtype=torch.int32, device=device)
        self.draft_token_confidence_probs = torch.zeros(most, width, dtype=torch.float32, device=device)
        self._lookup = Lookup(width, most, MOST_TILES, device)
        self.may_branch = False
        """Whether trees are drafted for those requests that may have them."""
        self.is_paused = False
        """Whether nothing is looked up."""
        self.look_up: Callable[[InputBatch], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = self._looked_up

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Both launches are made anew in each step, since their grid goes by the texts."""

    def capture(self) -> None:
        """Nothing is captured."""

    @torch.inference_mode()
    def propose(self, input_batch: InputBatch, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """[R, width] int64 drafts of the batch's requests, -1 where there are none."""
        rows, width = input_batch.num_reqs, self.num_speculative_steps
        packed = torch.full((rows, 3, width), -1, dtype=torch.int32, device=self._device)
        if dummy_run:
            return packed[:, TOKENS].clamp(min=0).long()
        group = get_tp_group()
        if group.rank_in_group == 0 and not self.is_paused:
            tokens, parents, chances = self.look_up(input_batch)
            packed[:, TOKENS], packed[:, PARENTS], packed[:, CHANCES] = tokens, parents, chances.view(torch.int32)
        if group.world_size > 1:
            # texts come when they come, and all ranks must compute the same rows
            packed = group.broadcast(packed, src=0)
        self.drafted[input_batch.idx_mapping] = packed
        self._tell_confidence(packed)
        return packed[:, TOKENS].long()

    def _tell_confidence(self, packed: torch.Tensor) -> None:
        """Each draft's chance over that of the one before it: their product, by which rows are given, is its own."""
        chances = torch.where(packed[:, TOKENS] >= 0, packed[:, CHANCES].contiguous().view(torch.float32), 0.0)
        before = torch.cat([torch.ones_like(chances[:, :1]), chances[:, :-1]], dim=1)
        self.draft_token_confidence_probs[: len(packed)] = (chances / before.clamp(min=1e-9)).clamp_(max=1.0)

    def home(self, batch: InputBatch) -> torch.Tensor:
        """[R, 3 * width + 1] int32, as in `Home`, of the step that is verified now."""
        sizes = (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1] - 1).clamp_(min=0)
        return torch.cat([self.drafted[batch.idx_mapping].flatten(1), sizes[:, None].int()], dim=1)

    # --- what the lookup is told -------------------------------------------------------------------------------------

    def _looked_up(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, texts = self._states, self.texts
        if texts is not None:
            texts.apply()
        told = [self._told(name) for name in batch.req_ids]
        asked, ends = self._asked(batch, told), self._ends(told)
        limits = np.fromiter((0 if one is None else one.limit for one in told), np.int32, len(told))
        most_tiles = min(self._most_tiles(asked, told), MOST_TILES // len(told))
        on_device = self._sent(asked, limits, ends)
        buffers = (texts.texts, texts.spans) if texts is not None else self._no_texts()
        return self._lookup(
            *buffers, states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu, *on_device, most_tiles
        )

    def _asked(self, batch: InputBatch, told: Sequence[Told | None]) -> IntArray:
        """[R, 2 + siblings] int32: rows of the request, of its problem, and of its siblings, -1 where there are none.

        A kernel is compiled for each number of siblings, so there are few of them.
        """
        rows = [
            [row for name in (one.siblings if one is not None else ()) if (row := self._row_of(name)) is not None]
            for one in told
        ]
        most = min(max(map(len, rows)), MOST_SIBLINGS)
        asked = np.full((len(told), 2 + (1 << most.bit_length()) - 1), -1, dtype=np.int32)
        asked[:, 0] = batch.idx_mapping_np
        for i, (one, own) in enumerate(zip(told, rows, strict=True)):
            asked[i, 1] = -1 if one is None else one.problem
            asked[i, 2 : 2 + min(len(own), MOST_SIBLINGS)] = own[:MOST_SIBLINGS]
        return asked

    def _ends(self, told: Sequence[Told | None]) -> IntArray:
        """[R, some] int32, -1 where a request has fewer."""
        most = max((len(one.ends) for one in told if one is not None), default=0)
        ends = np.full((len(told), 1 << max(most - 1, 0).bit_length()), -1, dtype=np.int32)
        for own, one in zip(ends, told, strict=True):
            if one is not None:
                own[: len(one.ends)] = one.ends
        return ends

    def _most_tiles(self, asked: IntArray, told: Sequence[Told | None]) -> int:
        """Tiles of one request, at most. How long texts are that run, the device alone knows: no longer than this."""
        states = self._states
        most = states.num_computed_tokens_np + self.num_speculative_steps + 2
        own = -(-most[asked[:, 0]] // TILE)
        others = np.where(asked[:, 2:] >= 0, -(-(most - states.prompt_len.np + 1)[asked[:, 2:]] // TILE), 0)
        past = [0 if one is None or self.texts is None else self.texts.tiles_of(one.problem) for one in told]
        return int((own + others.sum(axis=1) + np.array(past)).max())

    def _sent(self, *arrays: IntArray) -> list[torch.Tensor]:
        """These arrays of int32 on the device, by one copy; each begins where 16 bytes do."""
        starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)])
        words = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=PIN_MEMORY)
        for begin, array in zip(starts.tolist(), arrays, strict=False):
            words[begin : begin + array.size] = torch.from_numpy(array.reshape(-1))
        there = words.to(self._device, non_blocking=True)
        return [
            there[begin : begin + array.size].view(array.shape)
            for begin, array in zip(starts.tolist(), arrays, strict=False)
        ]

    def _no_texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        none = torch.zeros(4, dtype=torch.int32, device=self._device)
        return none, none[:0].view(0, 1, 3)
