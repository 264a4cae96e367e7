"""A cheap look at a model's weights: a few elements of a few parameters, which tells whether they were written.

Of weights in bfloat16, an update of usual size changes about one element in a hundred (the others round to what they
were). So thousands are looked at: that none of them changes is then as good as impossible. It is a hint alone, so what
cannot be looked at is left out.
"""

from __future__ import annotations

import hashlib
import logging

import torch

from vllm_specrollout.guard import CONTAINED

logger = logging.getLogger("vllm.specrollout")

MOST_PARAMETERS = 32
MOST_ELEMENTS = 128  # of each


class Fingerprint:
    """One model's.

    Args:
        model: its parameters may be replaced later, but not renamed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # where the parameters are that are looked at; none yet: it is not known which have elements
        self._chosen: list[tuple[torch.nn.Module, str]] = []
        self._has_told = False

    def take(self) -> bytes:
        """[16] bytes: equal ones mean equal weights, as far as was looked; takes a fraction of a millisecond."""
        if not self._chosen:
            own = [
                (module, name)
                for module in self._model.modules()
                for name, parameter in module.named_parameters(recurse=False)
                if _has_elements(parameter) and self._seen(parameter) is not None
            ]
            count = min(len(own), MOST_PARAMETERS)
            self._chosen = [own[i * len(own) // count] for i in range(count)]
        found = [getattr(module, name, None) for module, name in self._chosen]
        parts = [
            part
            for parameter in found
            if parameter is not None and _has_elements(parameter) and (part := self._seen(parameter)) is not None
        ]
        digest = hashlib.blake2b(digest_size=16)
        # one transfer per device, however many parameters
        for device in dict.fromkeys(part.device for part in parts):
            digest.update(torch.cat([part for part in parts if part.device == device]).cpu().numpy().tobytes())
        return digest.digest()

    def _seen(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Some of its bytes; None: its tensors lack what is needed, as those of some quantised weights do."""
        try:
            return _some(parameter.data)
        except CONTAINED as error:
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "Spec rollout: parameters of type %s cannot be looked at (%s). That such weights are written in "
                    "place goes unnoticed; weights that come through vLLM are noticed all the same",
                    type(parameter.data).__name__,
                    error,
                )
            return None


def _has_elements(parameter: torch.Tensor) -> bool:
    # vLLM leaves empty ones behind where it has packed the weights
    return parameter.numel() > 0 and parameter.device.type != "meta"


def _some(values: torch.Tensor) -> torch.Tensor:
    """The bytes of at most MOST_ELEMENTS evenly spaced elements, in the order in which they lie in memory."""
    step = max(values.numel() // MOST_ELEMENTS, 1)
    some = values.as_strided((min(values.numel(), MOST_ELEMENTS),), (step,), values.storage_offset())
    found = some.contiguous().view(torch.uint8)
    if type(found) is not torch.Tensor:
        raise TypeError(f"a part of it is no plain tensor, but a {type(found).__name__}")
    return found
