"""How an engine begins what is elsewhere: what was left behind by engines before it goes."""

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.cluster import segment
from vllm_specrollout.config import DECOUPLED_SOURCES
from vllm_specrollout.worker.models import decoupled
from vllm_specrollout.worker.models.decoupled import V1Noise


def test_an_engine_removes_the_shared_memory_of_engines_that_were_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{segment.PREFIX}spec-rollout-{os.getpid()}-{time.monotonic_ns():x}"
    left = segment.FOLDER / name
    left.write_bytes(segment.HEADER.pack(segment.MAGIC, segment.VERSION, 0, segment.PAGE))
    own = SimpleNamespace(address="", window=4, fan_out=4, drafters=())
    config = SimpleNamespace(
        is_decoupled=True, decoupled=own, sources=DECOUPLED_SOURCES, speculative_config=None, devices=()
    )
    monkeypatch.setattr(decoupled, "config_of", lambda _: config)
    monkeypatch.setattr(decoupled, "is_first_rank", lambda: True)
    model: Any = SimpleNamespace(get_vocab_size=lambda: 50)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    drafter = decoupled.begin(runner, V1Noise(runner))
    assert drafter is not None and not drafter.links
    assert not left.exists()
