"""Ray places engines and their drafters on accelerators that it counts; none has to be there."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

import ray

from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray import group as module
from vllm_specrollout.cluster.ray.placement import _LOCAL


def test_each_engine_sees_gpus_of_its_own_and_its_drafter_the_one_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLICA", "tests.unit.cluster.standin:Replica")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init("local", num_cpus=2, num_gpus=6, **_LOCAL)
    try:
        settings = {"tensor_parallel_size": 2}
        with SpecGroup("model", cpus=0.4, drafters=["small"], ladder="attach", engine=settings) as group:
            seen = [own[0]["CUDA_VISIBLE_DEVICES"].split(",") for own in group.collective_rpc("env")]
            assert sorted(gpu for own in seen for gpu in own) == ["0", "1", "2", "3", "4", "5"]
            assert [len(own) for own in seen] == [3, 3]
            assert [list(own) for own in group._placement.drafters.values()] == [["cuda:2"], ["cuda:2"]]
    finally:
        ray.shutdown()
