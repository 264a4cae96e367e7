"""Earlier answers on the device: the buffer of their tokens, and where in it each problem's lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import PIN_MEMORY

from vllm_specrollout.history.texts import Texts


class DeviceTexts:
    """Does what `Texts` says, on a stream of its own. Its two tensors take `history.max_mib` together, at most.

    Args:
        stream: that copies; None: the current one. Nobody waits for it: who reads early finds what was there before.
    """

    def __init__(self, texts: Texts, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.plan, self._stream = texts, stream
        # [most tokens] int32; zeros, since who reads early is to find tokens that the model has
        self.texts = torch.zeros(texts.most_tokens, dtype=torch.int32, device=device)
        # [most problems, past, 3] int32: begin, end, eighths of the weight's base-2 logarithm
        self.spans = torch.zeros(texts.most_problems, texts.past, 3, dtype=torch.int32, device=device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))

    def apply(self) -> None:
        """Send what has changed; the host goes on at once."""
        changes = self.plan.take()
        if changes is None:
            return
        with torch.cuda.stream(self._stream):  # None: the current one
            for begin, tokens in changes.pieces:
                self.texts[begin : begin + len(tokens)].copy_(_pinned(tokens), non_blocking=True)
            rows, spans = (
                _pinned(array).to(self.spans.device, non_blocking=True) for array in (changes.rows, changes.spans)
            )
            self.spans.index_copy_(0, rows, spans)


def _pinned(array: npt.NDArray[np.signedinteger[Any]]) -> torch.Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory() if PIN_MEMORY else host
