"""How often the policy has changed: every way in which trainers bring new weights into a running engine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_specrollout.worker.packed_weights import PackedWeights

_Base: Any = object
if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base


class WeightsVersion:
    """Counts from 0. Weights that arrive in many pieces between two steps are one change."""

    def __init__(self) -> None:
        self.number = 0
        """The version that the next forward pass computes with."""
        self.is_open = False
        """Whether weights were written since the last step began."""
        self.computed = 0
        """The version that the last step computed with, or the one that now begins."""
        self.of_endings = 0
        """The version of the step before: what was reported to have ended with this step was computed with it."""
        self._packed: PackedWeights | None = None

    def touch(self) -> None:
        """Weights were written."""
        self.number += not self.is_open
        self.is_open = True

    def close(self) -> None:
        """A step begins, which ends a change. The runner says so before it computes.

        Raises:
            UnsupportedError: the new weights cannot be used.
        """
        if self.is_open and self._packed is not None:
            self._packed.end()
        self.is_open = False
        self.of_endings, self.computed = self.computed, self.number

    def watch(self, model: Any, packed: PackedWeights | None = None) -> None:
        """Notice calls of `model.load_weights`, which trainers make directly, one per parameter.

        Args:
            packed: how weights get into this model, where its own `load_weights` cannot bring them in.
        """
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
        return result

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().update_weights(*args, **kwargs)

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.weights_version.touch()
        return super().finish_weight_update(*args, **kwargs)

    def wake_up(self, tags: list[str] | None = None) -> None:
        # after sleep level 2 the weights come anew; "kv_cache" and "scheduling" alone bring none
        if tags is None or "weights" in tags:
            self.model_runner.weights_version.touch()
        super().wake_up(tags)
