"""Placement of a group's engines: what each process sees, and what no cluster of Ray could ever have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from vllm_specrollout.cluster.ray.placement import Needs, _places
from vllm_specrollout.config.devices import parse_devices
from vllm_specrollout.errors import ConfigError


def needs(count: int, devices: list[str] | None, **more: Any) -> Needs:
    given: dict[str, Any] = {"gpus": None, "cpus": 1.0, "max_restarts": 0, "engine": {}, **more}
    places = None if devices is None else [parse_devices("devices", name) for name in devices]
    return Needs(replica="", models=(), count=count, devices=places, **given)


def test_each_process_sees_the_devices_that_are_named_for_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cores, gpus = _places(needs(2, ["cpu:0-1", "cuda:2,3"]), has_gpus=True)
    assert cores.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1" and gpus.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert cores.gpus == gpus.gpus == 0.0 and not cores.sharers
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10")
    (own,) = _places(needs(1, ["cuda:1,2"]), has_gpus=True)
    assert own.environment["CUDA_VISIBLE_DEVICES"] == "9,10"


def test_of_rays_gpus_each_rank_has_one_and_a_drafter_none() -> None:
    first, second = _places(needs(2, None, engine={"tensor_parallel_size": 2}), has_gpus=True)
    assert (first.gpus, first.environment) == (2.0, {}) and second == first
    (half,) = _places(needs(1, None, gpus=0.5), has_gpus=True)
    assert half.gpus == 0.5


def test_without_gpus_engines_have_their_own_hosts_cores() -> None:
    found = _places(needs(2, None, engine={"tensor_parallel_size": 3}), has_gpus=False)
    assert [(one.sharers, one.gpus, one.environment) for one in found] == [(3, 0.0, {})] * 2
    with pytest.raises(ConfigError, match=r"`gpus` is 1\.0, and Ray counts no GPU"):
        _places(needs(1, None, gpus=1.0), has_gpus=False)
