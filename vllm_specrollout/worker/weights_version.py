"""Version of the policy: every way in which trainers bring new weights into a running engine.

Where vLLM is given weights, or an adapter in another's place, that is a change. What may only mean one (a sign from the
scheduler, a call by name, waking up) has a few weights looked at before the next step: an empty sign changes nothing,
and a silent change is noticed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_specrollout.errors import logger
from vllm_specrollout.history.problems import policy_line
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.worker.packed_weights import PackedWeights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu_worker import Worker as _Base


MOST_NAMES = 4096
"""Names remembered, and numbers; those given first go first."""


class Adapters:
    """Of one worker."""

    def __init__(self) -> None:
        # name -> (number, path) that it was given with last, and the other way round
        self._by_name: dict[str, tuple[int, str]] = {}
        self._names: dict[int, str] = {}
        # the lines that had one
        self._lines: dict[str, None] = {}
        # numbers that were taken back
        self._removed: dict[int, None] = {}

    def given(self, request: Any, *, is_loaded: bool) -> bool:
        """An adapter was added; whether it takes the place of another one, or is the next of its line.

        Args:
            request: vLLM's `LoRARequest`.
            is_loaded: its number was loaded before it came: vLLM then keeps what it has, unless it is told to reload.
        """
        if is_loaded and not request.load_inplace:
            return False
        name, number, own = request.lora_name, request.lora_int_id, (request.lora_int_id, request.lora_path)
        line = policy_line(name)
        is_known = is_loaded or line in self._lines or number in self._names or number in self._removed
        is_back = (
            self._by_name.get(name) == own
            and self._names.get(number) == name
            and number not in self._removed
            and not request.load_inplace
        )
        self._removed.pop(number, None)
        _remember(self._by_name, name, own)
        _remember(self._names, number, name)
        _remember(self._lines, line, None)
        return is_known and not is_back

    def asked_for(self, request: Any) -> bool:
        """A request came with an adapter, which may be loaded for it; whether that is the next of its line."""
        return request.lora_name not in self._by_name and self.given(request, is_loaded=False)

    def removed(self, number: int, *, is_loaded: bool) -> None:
        """An adapter is taken back: what comes under its number is another one."""
        if is_loaded or number in self._names:
            _remember(self._removed, number, None)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MOST_NAMES:
        del known[next(iter(known))]


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


_Base: Any = object

_NAMES = re.compile("update|refit|load|weight", re.IGNORECASE)
"""In the names of methods by which trainers bring weights."""


class WeightsVersion:
    """Counts from 0. Weights that arrive in many pieces between two steps are one change."""

    def __init__(self) -> None:
        self.number = 0
        """The version that the next forward pass computes with."""
        self.computed = 0
        """The version that the last one computed with."""
        self.is_open = False
        """Whether weights were written since the last step began."""
        self.may_differ = True
        """Whether weights were, or may have been, written since the last step began."""
        self._look: Callable[[], bytes] | None = None
        # of the weights that the last step computed with; None: none did
        self._seen: bytes | None = None
        self._packed: PackedWeights | None = None
        self.adapters = Adapters()

    def touch(self) -> None:
        """Weights were written."""
        self.number += not self.is_open
        self.is_open = self.may_differ = True

    def suspect(self) -> None:
        """Weights may have been written: they are looked at when the next step begins."""
        self.may_differ = True

    def close(self) -> None:
        """A change ends; what may be one is looked into.

        Raises:
            UnsupportedError: the new weights cannot be used.
        """
        if self.is_open and self._packed is not None:
            self._packed.end()
        if self._look is not None:
            seen = self._look()
            self.number += not self.is_open and self._seen not in (None, seen)
            self._seen = seen
        self.is_open = self.may_differ = False
        self.computed = self.number

    def watch(self, model: Any, packed: PackedWeights | None = None) -> None:
        """Notice calls of `model.load_weights`, which trainers make directly, one per parameter.

        Args:
            packed: how weights get into this model, where its own `load_weights` cannot bring them in.
        """
        self._look = Fingerprint(model).take
        load_weights = getattr(model, "load_weights", None)
        if load_weights is None:
            return
        self._packed = packed
        load = load_weights if packed is None else functools.partial(packed.load, load_weights)

        @functools.wraps(load_weights)
        def load_and_tell(*args: Any, **kwargs: Any) -> Any:
            self.touch()
            return load(*args, **kwargs)

        model.load_weights = load_and_tell


class WeightsMixin(_Base):
    """Mixed into vLLM's workers, whose model runner has a `weights_version`."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        self.model_runner.weights_version.watch(model, PackedWeights.of(model, self.vllm_config))
        self._watch_calls()
        return result

    def _watch_calls(self) -> None:
        """Methods that trainers call by name, a worker extension's above all, may write weights in place."""
        for name in dir(type(self)):
            if name.startswith(("_", "spec_rollout_")) or name == "load_model" or not _NAMES.search(name):
                continue
            if callable(getattr(type(self), name)):
                setattr(self, name, _then(getattr(self, name), self.model_runner.weights_version.suspect))

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().update_weights(*args, **kwargs)

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().finish_weight_update(*args, **kwargs)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        # an adapter's weights are none of the model's parameters, so no look at these would tell
        version, is_loaded = self.model_runner.weights_version, lora_request.lora_int_id in self.list_loras()
        is_added = super().add_lora(lora_request)
        if version.adapters.given(lora_request, is_loaded=is_loaded):
            version.touch()
        return is_added

    def remove_lora(self, lora_id: int) -> bool:
        is_loaded = lora_id in self.list_loras()
        self.model_runner.weights_version.adapters.removed(lora_id, is_loaded=is_loaded)
        return super().remove_lora(lora_id)

    def wake_up(self, tags: list[str] | None = None) -> None:
        # after sleep level 2 the weights come anew, after level 1 they are the old ones
        self.model_runner.weights_version.suspect()
        super().wake_up(tags)


def _then(method: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    """The method, and whatever comes of it, then the other."""

    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            after()

    return both
