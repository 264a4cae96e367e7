"""Which models may draft: their layers must not lose blocks while rows wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.worker.models.proposing import check_layers


def runner(**windows: int | None) -> SimpleNamespace:
    layers = {name: SimpleNamespace(sliding_window=window) for name, window in windows.items()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_a_model_with_a_sliding_window_does_not_draft() -> None:
    with pytest.raises(UnsupportedError, match="sliding window"):
        check_layers(runner(first=None, second=128), ["first", "second"])


def test_the_targets_own_windows_do_no_harm() -> None:
    check_layers(runner(target=128, head=None), ["head"])
    check_layers(runner(target=128), [])
