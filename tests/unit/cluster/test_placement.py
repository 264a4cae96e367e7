"""Placement of a group's engines: what each process sees, and what no cluster of Ray could ever have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from vllm_specrollout.cluster.ray.placement import Needs, _gpus
from vllm_specrollout.config.devices import parse_devices
from vllm_specrollout.errors import ConfigError


def needs(count: int, devices: list[str] | None, **more: Any) -> Needs:
    given: dict[str, Any] = {"gpus": None, "cpus": 1.0, "max_restarts": 0, "engine": {}, **more}
    places = None if devices is None else [parse_devices("devices", name) for name in devices]
    return Needs(replica="", models=(), count=count, devices=places, **given)


def test_each_process_sees_the_devices_that_are_named_for_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10")
    own = needs(2, ["cpu:0-1", "cuda:1,2"], engine={"pipeline_parallel_size": 2})
    assert own.environment(0)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert own.environment(1)["CUDA_VISIBLE_DEVICES"] == "9,10" and _gpus(own, has_gpus=True) == 0.0


def test_of_rays_gpus_each_rank_has_one_and_without_them_engines_have_cores() -> None:
    own = needs(2, None, engine={"tensor_parallel_size": 2})
    assert (_gpus(own, has_gpus=True), _gpus(own, has_gpus=False), own.environment(1)) == (2.0, 0.0, {})
    half = needs(1, None, gpus=0.5)
    assert _gpus(half, has_gpus=True) == 0.5
    with pytest.raises(ConfigError, match=r"`gpus` is 0\.5, and Ray counts no GPU"):
        _gpus(half, has_gpus=False)
