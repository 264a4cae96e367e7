"""Hidden states of the rows that hold, kept answer by answer, for heads to be trained on.

What belongs here: what the V1 runner has to hand out for it, and how an answer's rows are put together. Where they are
kept is the buffer's matter (`training/buffer.py`). Without `collect.dir`, nothing here takes part in a step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specrollout.config.drafters import CollectConfig
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.training.buffer import BufferWriter, Example, Source
from vllm_specrollout.types import FinishedRequest, VerifyResult
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.models.proposing import rows_that_hold

_JOIN = 32  # parts of an answer after which they are joined, so that it does not keep the steps' tensors alive
_ENDS = "hidden states are not kept any more"

_Base: Any = object
if TYPE_CHECKING:
    from vllm_specrollout.worker.v1.runner import SpecRolloutV1 as _Base

Part = tuple[torch.Tensor, ...]
"""Rows of one answer: [n] positions, [n] tokens, [n, layers * hidden], [n, hidden]."""


class Collector(Listener):
    """Puts answers together, and gives them to the buffer when they end.

    Args:
        draws: chooses the requests, by `collect.share`.
    """

    def __init__(self, buffer: BufferWriter, config: CollectConfig, draws: random.Random) -> None:
        self._buffer, self._config, self._draws = buffer, config, draws
        # request -> the weights that its rows are of, and its rows; None: not chosen
        self._answers: dict[str, tuple[int, list[Part]] | None] = {}

    def feed(self, names: Sequence[str], counts: np.ndarray, columns: Part, weights_version: int) -> None:
        """Rows of a step that hold.

        Args:
            names: [R] requests.
            counts: [R] how many rows are each one's.
            columns: as in `Part`, the requests' rows behind one another.
        """
        wanted = np.array([self._is_chosen(name, weights_version) for name in names])
        inside = np.repeat(wanted, counts) & (columns[0].cpu().numpy() < self._config.max_answer_tokens)
        if not inside.any():
            return
        owner = np.repeat(np.arange(len(names)), counts)[inside]
        index = torch.from_numpy(np.flatnonzero(inside)).to(columns[0].device)
        rows = [column[index].cpu() for column in columns]
        owners, sizes = np.unique(owner, return_counts=True)
        parts = zip(*(column.split(sizes.tolist()) for column in rows), strict=True)
        for i, part in zip(owners.tolist(), parts, strict=True):
            answer = self._answers[names[i]]
            assert answer is not None
            version, kept = answer
            if version != weights_version:
                # what older weights computed does not fit what these do
                kept = []
            kept.append(part)
            if len(kept) >= _JOIN:
                kept = [_joined(kept)]
            self._answers[names[i]] = (weights_version, kept)

    def finished(self, ending: FinishedRequest) -> None:
        answer = self._answers.pop(ending.request_id, None)
        if answer is None or not answer[1]:
            return
        example = _example(_joined(answer[1]), ending, answer[0])
        if example is not None and ending.weights_version == answer[0]:
            self._buffer.add(example)

    def forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def closed(self) -> None:
        self._buffer.close()

    def _is_chosen(self, name: str, weights_version: int) -> bool:
        if name not in self._answers:
            is_chosen = self._draws.random() < self._config.share
            self._answers[name] = (weights_version, []) if is_chosen else None
        return self._answers[name] is not None


def runner_for(config: CollectConfig, runner: type[Any]) -> type[Any]:
    """Our V1 runner, or where hidden states are collected, one that does: no other step passes through here."""
    return type(f"Collecting{runner.__name__}", (CollectsHidden, runner), {}) if config.dir else runner


class CollectsHidden(_Base):
    """Mixed into our V1 runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._collect = config_of(vllm_config).collect
        self.collector: Collector | None = None
        self.use_aux_hidden_state_outputs = True

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """The layers whose inputs are handed out: the head's, if one is in use."""
        of_head = super()._get_eagle3_aux_layers_from_config()
        uses_head = self.speculative_config is not None and self.speculative_config.method == "eagle3"
        if of_head is None and uses_head:
            of_head = self.model.get_eagle3_default_aux_hidden_state_layers()
        wanted = self._collect.layers
        if of_head and wanted and tuple(of_head) != wanted:
            raise ConfigError(
                f"`collect.layers` is {list(wanted)}, and the head in use takes layers {list(of_head)}",
                "leave `collect.layers` out, or collect without a head",
            )
        depth = self.model_config.get_total_num_hidden_layers()
        if wanted and wanted[-1] > depth:
            raise ConfigError(f"`collect.layers` names {wanted[-1]}, the model has {depth} layers", "name lower ones")
        return tuple(of_head or wanted or layers_of(depth))

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        if not supports_eagle3(self.get_model()):
            raise UnsupportedError(
                f"`collect.dir` is set, and vLLM does not hand out hidden states of {type(self.get_model()).__name__}",
                "drop `collect`: no EAGLE-3 head could draft for this model",
            )
        super()._setup_eagle3_aux_hidden_state_outputs()
        if is_first_rank():
            config = self.model_config
            source = Source(config.model, self._get_eagle3_aux_layers_from_config() or (), config.get_hidden_size())
            buffer = BufferWriter(Path(self._collect.dir), source, self._collect.max_tokens)
            self.collector = Collector(buffer, self._collect, random.Random(0))
            self.spec_rollout.listeners.append(self.collector)

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        if self.collector is not None:
            self.collector.forget(req_id)

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if self.collector is not None and isinstance(output, ModelRunnerOutput) and output.req_ids:
            with self.spec_rollout.guard.over("collecting", _ENDS):
                self._collect_rows(state, output)
        return output

    def _collect_rows(self, state: Any, output: ModelRunnerOutput) -> None:
        assert self.collector is not None
        trees, sampled = self.step.trees, self.step.sampled
        result = None if sampled is None else VerifyResult(sampled.num_accepted, sampled.accepted)
        index, counts = rows_that_hold(self.query_start_loc.np[: len(output.req_ids) + 1], trees, result)
        rows = torch.from_numpy(index).to(self.device)
        layers = torch.cat([layer[rows] for layer in state.aux_hidden_states], dim=-1)
        columns = (self.positions[rows], self.input_ids.gpu[rows], layers, state.hidden_states[rows])
        self.collector.feed(output.req_ids, counts, columns, self.weights_version.number)


def layers_of(depth: int) -> tuple[int, ...]:
    """Low, middle and high layers, as EAGLE-3 takes them; shallow models have fewer than three."""
    wanted = (2, depth // 2, depth - 3) if depth > 6 else (1, depth // 2, depth - 1)
    return tuple(sorted({max(layer, 0) for layer in wanted}))


def _joined(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _example(part: Part, ending: FinishedRequest, weights_version: int) -> Example | None:
    """The answer's rows in order; what was computed twice counts once. None: too little is there."""
    tokens = np.concatenate([ending.prompt_ids, ending.token_ids])
    positions = part[0].numpy()
    order = np.argsort(positions, kind="stable")
    placed = positions[order]
    is_last = np.append(placed[1:] != placed[:-1], True) & (placed < len(tokens))
    order, placed = order[is_last], placed[is_last]
    # what the prefix cache already had is missing in front; from the last gap on, all is there
    gaps = np.flatnonzero(np.diff(placed) != 1)
    begin = int(gaps[-1]) + 1 if len(gaps) else 0
    order, placed = order[begin:], placed[begin:]
    if len(placed) < 2 or placed[-1] < len(ending.prompt_ids):
        return None
    index = torch.from_numpy(order)
    token_ids = part[1][index].long()
    if not np.array_equal(token_ids.numpy(), tokens[placed]):
        return None
    num_prompt = max(len(ending.prompt_ids) - int(placed[0]), 0)
    return Example(token_ids, part[2][index], part[3][index], num_prompt, weights_version)
