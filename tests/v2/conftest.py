"""The V2 model runner on CPU. What that takes would change what other tests run, so these tests have a process of their
own (tests/conftest.py): `pytest tests/v2`."""

from __future__ import annotations

from typing import Any

import pytest

import tests.v2.interpreter  # noqa: F401 - before vLLM is imported


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling, which vLLM switches off on CPU although its engine can do it there."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_async(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
