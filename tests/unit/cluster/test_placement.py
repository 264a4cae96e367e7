"""What a group's engines need of Ray."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from vllm_specrollout.cluster.ray.placement import Needs, _gpus
from vllm_specrollout.errors import ConfigError


def needs(**given: Any) -> Needs:
    more: dict[str, Any] = {"engine": {}, "gpus": None, **given}
    return Needs(replica="", models=(), count=2, devices=None, cpus=1.0, max_restarts=0, **more)


def test_of_rays_gpus_each_rank_has_one_and_without_them_engines_have_cores() -> None:
    own = needs(engine={"tensor_parallel_size": 2})
    assert (_gpus(own, has_gpus=True), _gpus(own, has_gpus=False), own.environment(1)) == (2.0, 0.0, {})
    half = needs(gpus=0.5)
    assert _gpus(half, has_gpus=True) == 0.5
    with pytest.raises(ConfigError, match=r"`gpus` is 0\.5, and Ray counts no GPU"):
        _gpus(half, has_gpus=False)
