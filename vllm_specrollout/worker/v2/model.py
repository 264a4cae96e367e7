"""A model that drafts on the device: vLLM's own speculator, its tokens drawn with the target's noise.

What belongs here: what has to be so before vLLM's passes run as they are, and how sharp their tokens are drawn. Which
requests they are taken for is chosen beside the other drafts (device_drafts.py).

A draft token is argmax(s * logits / temperature + noise), with the very noise of its place. s = 1 is plain coupling, a
large s is greedy. Which s meets the target most often depends on how peaked both are, so it is learned: each request
has one s for all of its answer, and some requests try another than the best one so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_specrollout.drafters.levels import CHOICES
from vllm_specrollout.drafters.looked_up import LateDrafts
from vllm_specrollout.types import TreeBatch, VerifyResult
from vllm_specrollout.worker.models.proposing import is_untrained, most_tokens, without_adapters

TRIED_EVERY = 8
"""Requests of which one is drawn as sharp as the best choice so far is not."""
_FIRST = 1
# nodes of each choice that count beforehand, half of them as accepted; and the weight of those before each further one
_PRIOR, _MEMORY = 20.0, 0.999


class DeviceModel(LateDrafts):
    """One of vLLM's speculators.

    Args:
        of_vllm: its model loaded.
        target: the engine's model.
        levels: most tokens of a draft.
        source: index of the drafter.
    """

    name = "model"
    num_sources = 2
    is_in_step = True

    def __init__(self, of_vllm: Any, target: torch.nn.Module, levels: int, source: int) -> None:
        super().__init__()
        self.of_vllm, self.source = of_vllm, source
        self.most_tokens = most_tokens(of_vllm, levels)
        self.version = 0
        """How often its weights were swapped."""
        self.is_resting = is_untrained(of_vllm)
        self._arms: dict[str, int] = {}
        self._count = 0
        # [2, choices] nodes accepted, and nodes whose parents were
        self._seen = np.zeros((2, len(CHOICES)))
        # [rows of requests] how sharp each one's tokens are drawn
        self._sharpness = torch.full((of_vllm.max_num_reqs,), CHOICES[_FIRST], device=of_vllm.device)
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
        seeds: torch.Tensor, *args: Any, spec_step_idx: int = 0, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[R] int64, in the place of `DraftModelSpeculator.sample_draft`."""
        has_levels = hasattr(self.of_vllm, "compute_draft_logits")
        compute = self.of_vllm.compute_draft_logits if has_levels else self.of_vllm.model.compute_logits
        logits = compute(hidden, spec_step_idx) if has_levels else compute(hidden)
        return gumbel_sample(
            logits, rows, temperature / self._sharpness, seeds, positions, apply_temperature=True, is_drafting=False,
            use_fp64=self.of_vllm.use_fp64_gumbel,
        )  # fmt: skip

    # --- how sharp its tokens are ------------------------------------------------------------------------------------

    @property
    def best(self) -> int:
        """The choice that met the target most often."""
        accepted, reached = self._seen
        rates = (accepted + _PRIOR / 2) / (reached + _PRIOR)
        return int(rates.argmax()) if reached.any() else _FIRST

    def take(self, rows: Sequence[int], request_ids: Sequence[str]) -> None:
        """These requests have come into their rows."""
        for name in request_ids:
            self._count += 1
            turn, is_tried = divmod(self._count, TRIED_EVERY)
            self._arms[name] = self.best if is_tried else turn % len(CHOICES)
        own = torch.tensor([CHOICES[self._arms[name]] for name in request_ids])
        where = torch.tensor(rows, dtype=torch.int64)
        self._sharpness[where.to(self._sharpness.device)] = own.to(self._sharpness.device)

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        mine = np.flatnonzero(trees.sizes)
        mine = mine[trees.source[trees.node_start[mine]] == self.source]
        for i, size, accepted in zip(mine, trees.sizes[mine], result.num_accepted[mine], strict=True):
            arm = self._arms.get(trees.request_ids[i])
            if arm is not None:
                reached = min(accepted + 1, size)
                self._seen *= _MEMORY**reached
                self._seen[:, arm] += accepted, reached

    def forget(self, request_id: str) -> None:
        self._arms.pop(request_id, None)

    def begin_anew(self) -> None:
        """Its weights are others: what was learned of the old ones is forgotten."""
        self.version += 1
        self.is_resting = False
        self._seen[:] = 0.0
