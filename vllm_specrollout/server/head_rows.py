"""Hidden states of answers, computed by an engine of `train-head`'s own: each answer is a prompt of one pass.

What belongs here: that engine, and how rows of its passes become answers again. It is stock vLLM without graphs, so a
hook on the target sees each pass. Layers' states are asked for after loading, which an uncompiled target allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.training.answers import KeptAnswer
from vllm_specrollout.training.rows import Rows

_AT_ONCE = 64
"""Answers that are asked for before their rows are handed on."""
Part = tuple[torch.Tensor, ...]
"""Consecutive rows of one answer: [n] positions, [n] tokens, [n, layers + 1, width]."""


class PrefillEngine:
    """Called with a target, layers and answers, computes rows; the engine stays until it is closed.

    Args:
        memory: share of a GPU's memory that the engine takes; the head is trained beside it.
        given: further arguments of the `LLM`.
    """

    def __init__(self, memory: float = 0.5, **given: Any) -> None:
        self._given = {"gpu_memory_utilization": memory, **given}
        self._llm: Any = None
        self._length = 0
        self._parts = _Parts()

    def __call__(self, target: Path, layers: tuple[int, ...], answers: Sequence[KeptAnswer]) -> Iterator[Rows]:
        """Rows of the answers, in some order; one that is longer than the target's context lacks its end.

        Raises:
            UnsupportedError: vLLM does not hand out hidden states of the target's layers.
        """
        longest = max(len(one.token_ids) for one in answers)
        if self._llm is None or longest >= self._length:
            self._start(target, layers, longest + 1)
        for begin in range(0, len(answers), _AT_ONCE):
            some = {tuple(one.token_ids[: self._length - 1].tolist()): one for one in answers[begin : begin + _AT_ONCE]}
            found = self._compute(list(some))
            for missing in [ids for ids in some if ids not in found]:
                # in one pass with others, parts could not be told apart
                found |= self._compute([missing])
            if len(found) < len(some):
                raise RuntimeError(f"vLLM's passes held the rows of {len(found)} of {len(some)} answers")
            for ids, hidden in found.items():
                answer = some[ids]
                tokens = torch.tensor(ids, dtype=torch.int32)
                yield Rows(tokens, min(answer.prompt_tokens, len(ids)), answer.version, hidden)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def _start(self, target: Path, layers: tuple[int, ...], length: int) -> None:
        # the hook hands tensors over, so the engine is in this process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.model_executor.models.interfaces import supports_eagle3

        self.close()
        config = AutoConfig.from_pretrained(str(target))
        most = getattr(getattr(config, "text_config", config), "max_position_embeddings", length)
        # room for longer answers than are there yet
        self._length = min(most, max(2 * length, 4096))
        llm = LLM(
            str(target),
            max_model_len=self._length,
            enforce_eager=True,
            enable_prefix_caching=False,
            **self._given,
        )

        def put(model: Any) -> None:
            if layers:
                if not supports_eagle3(model):
                    raise UnsupportedError(
                        f"vLLM does not hand out hidden states of {type(model).__name__}",
                        "train a head over the last layer alone: --method eagle",
                    )
                model.set_aux_hidden_state_layers(layers)
            model.register_forward_hook(self._parts.take, with_kwargs=True)

        llm.apply_model(put)
        self._llm = llm

    def _compute(self, sequences: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        from vllm import SamplingParams

        self._parts.begin()
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._llm.generate([{"prompt_token_ids": list(one)} for one in sequences], params, use_tqdm=False)
        wanted = set(sequences)
        return {ids: hidden for ids, hidden in self._parts.end() if ids in wanted}


class _Parts:
    """Puts the rows of passes together. A pass holds runs of consecutive positions: one that begins at 0 is a new
    answer, another goes on where an earlier one ended."""

    def __init__(self) -> None:
        self._open: list[list[Part]] | None = None

    def begin(self) -> None:
        self._open = []

    def end(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        parts, self._open = self._open or [], None
        for own in parts:
            _, tokens, hidden = (torch.cat(column) for column in zip(*own, strict=True))
            yield tuple(tokens.tolist()), hidden

    def take(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """A hook on the target: keeps a pass's rows, and returns what its runner expects."""
        last, layers = output if isinstance(output, tuple) else (output, [])
        if self._open is None:
            return last
        # the next pass has the same buffers
        positions, tokens = (kwargs[name].to("cpu", copy=True) for name in ("positions", "input_ids"))
        hidden = torch.stack([*layers, last], dim=1).cpu()
        jumps = (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1
        bounds = [0, *jumps.tolist(), len(positions)]
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            part = (positions[begin:end], tokens[begin:end], hidden[begin:end])
            first = int(part[0][0])
            if first == 0:
                self._open.append([part])
                continue
            before = [own for own in self._open if int(own[-1][0][-1]) + 1 == first]
            if len(before) == 1:
                before[0].append(part)
        return last
