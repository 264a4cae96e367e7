"""New weights for layers that vLLM keeps packed: on CPU a linear layer has no weight that could be written to.

vLLM packs it once it is loaded, and leaves an empty parameter. So `model.load_weights` fails on a running engine, and
trainers call just that. vLLM's own reloading knows the way; what belongs here is when it begins, and when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from vllm_specrollout.errors import UnsupportedError

Weights = Iterable[tuple[str, torch.Tensor]]


class PackedWeights:
    """One model's. Loads between two forward passes are one reload; what none of them names keeps its weights."""

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        self._model, self._config = model, vllm_config
        self._is_open = False
        self._loaded: set[str] = set()  # names, since the reload began

    @classmethod
    def of(cls, model: Any, vllm_config: VllmConfig) -> PackedWeights | None:
        """None: weights are as they were loaded, so vLLM's own `load_weights` does."""
        return cls(model, vllm_config) if current_platform.is_cpu() else None

    def load(self, load_weights: Any, weights: Weights, *args: Any, **kwargs: Any) -> Any:
        """What `load_weights` returns, called with these weights in a reload of ours, or in vLLM's if that is on.

        It is called once, or once more at each name that was loaded before: it looks at the layers when it begins, and
        what was packed meanwhile has to be opened first.
        """
        if not self._is_open and any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
            return load_weights(weights, *args, **kwargs)
        rest = iter(weights)
        ahead = list(islice(rest, 1))
        found: list[Any] = []
        with set_current_vllm_config(self._config), torch.no_grad():
            while ahead or not found:
                if ahead and ahead[0][0] in self._loaded:
                    self._begin_again(ahead[0][0])
                elif not self._is_open:
                    self._begin()
                found.append(load_weights(self._kept(ahead, rest), *args, **kwargs))
        return found[0] if len(found) == 1 else set().union(*filter(None, found))

    def _begin(self) -> None:
        initialize_layerwise_reload(self._model)
        self._is_open = True

    def _kept(self, ahead: list[tuple[str, torch.Tensor]], rest: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Up to the next name that was loaded before: that one is left in `ahead`."""
        first = ahead.pop() if ahead else None
        # a layer of several weights waits for the last one, and senders write the next weights where the last ones were
        for name, weight in chain([first] if first is not None else [], rest):
            if name in self._loaded:
                ahead.append((name, weight))
                return
            self._loaded.add(name)
            yield name, weight.clone()

    def _begin_again(self, name: str) -> None:
        """Another push, and nobody asked for an answer after the last one, so what that one packed is opened anew.

        This push may be amid a layer itself: what such a layer was given, it keeps.

        Raises:
            UnsupportedError: the last one ended amid a layer that the name may belong to.
        """
        parts = [(part, layer) for part, layer in self._model.named_modules() if _is_part(layer)]
        if any(_may_be_of(name, part) for part, _ in parts):
            self.end()  # raises
        loaded = {one for one in self._loaded if any(_may_be_of(one, part) for part, _ in parts)}
        given = [(layer, _taken_back(layer)) for _, layer in parts]
        self.end()
        self._begin()
        self._loaded = loaded
        for layer, (count, weights) in given:
            info = get_layerwise_info(layer)
            info.load_numel = count
            info.loaded_weights.extend(weights)

    def end(self) -> None:
        """Make what was loaded, here or by vLLM's own reloading, the weights of the next forward pass.

        Raises:
            UnsupportedError: a layer got only a part of its weights, and the rest of them can no longer be read. It
                keeps its old ones.
        """
        parts: list[str] = []
        with set_current_vllm_config(self._config), torch.no_grad():
            if self._is_open:
                self._is_open = False
                self._loaded.clear()
                for name, layer in self._model.named_modules():
                    if _is_part(layer):
                        total = get_layerwise_info(layer).load_numel_total
                        parts.append(f"`{name}` got {_taken_back(layer)[0]} of its {total}")
                finalize_layerwise_reload(self._model, self._config.model_config)
            pack_tied_head(self._model)
        if parts:
            raise UnsupportedError(
                f"{parts[0]} weights before the next step, and on CPU the others are packed already",
                "load all weights of a layer (such as q, k and v) before you ask for the next answers",
            )


def pack_tied_head(model: torch.nn.Module) -> None:
    """An output head that is the embedding was packed by itself, and a reload brings the embedding alone."""
    embeddings = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in embeddings:
        if not isinstance(head, ParallelLMHead) or not isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            continue
        if any(layer is not head and layer.weight is head.weight for layer in embeddings):
            head.quant_method.process_weights_after_loading(head)


def _may_be_of(weight: str, layer: str) -> bool:
    """Whether a weight may be one of a layer's: not where their names say that they are of different blocks."""
    blocks = [next((part for part in name.split(".") if part.isdigit()), None) for name in (weight, layer)]
    return None in blocks or blocks[0] == blocks[1]


def _is_part(layer: torch.nn.Module) -> bool:
    # other layers may be padded, and then are never full
    if not isinstance(layer, LinearBase) or not isinstance(layer.quant_method, UnquantizedLinearMethod):
        return False
    info = get_layerwise_info(layer)
    return info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)


def _taken_back(layer: torch.nn.Module) -> tuple[int, list[Any]]:
    """Forget what the layer was given, so that it gets its old weights back: how many elements, and how to load."""
    info = get_layerwise_info(layer)
    given = info.load_numel, list(info.loaded_weights)
    info.load_numel = 0
    info.loaded_weights.clear()
    return given
