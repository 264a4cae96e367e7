"""Placement of a group's engines: what each process sees, and what no cluster of Ray could ever have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray.placement import Needs, _check_room, _places
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


@pytest.mark.parametrize(
    ("bundles", "cause"),
    [
        ([{"CPU": 1.0, "GPU": 16.0}], "an engine has 16 GPUs, and no host of Ray's has more than 8"),
        ([{"CPU": 1.0, "GPU": 8.0}] * 3, "needs 3 CPU and 24 GPU of Ray, which has 32 CPU and 16 GPU in all"),
        ([{"CPU": 12.0}] * 3, "needs 36 CPU and 0 GPU"),
    ],
)
def test_what_the_whole_cluster_could_not_meet_is_refused_whatever_is_free(bundles: Any, cause: str) -> None:
    nodes = [{"CPU": 16.0, "GPU": 8.0}] * 2
    _check_room([{"CPU": 1.0, "GPU": 8.0}] * 2, nodes)
    with pytest.raises(ConfigError, match=cause) as error:
        _check_room(bundles, nodes)
    assert error.value.hint


WRONG: dict[str, dict[str, Any]] = {
    "names 1 places for 2 engines": {"devices": ["cuda:0"]},
    "gives cuda:1 to two engines": {"devices": ["cuda:0,1", "cuda:1"]},
    "names 'tpu:1'": {"devices": ["tpu:1", "tpu:2"]},
}


@pytest.mark.parametrize("cause", WRONG)
def test_devices_that_make_no_sense_are_refused_before_anything_starts(cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        SpecGroup("model", drafters=["small"], ladder="attach", **WRONG[cause])
    assert error.value.hint
