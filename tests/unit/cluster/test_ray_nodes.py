"""A group on two nodes of Ray: one dies amid a batch, and another takes its place."""

import threading
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from tests.unit.cluster.standin import generated
from tests.waiting import until
from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray import group as module

pytestmark = pytest.mark.nightly

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 1 << 27}


def test_a_node_that_dies_costs_no_token_and_one_that_comes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLICA", "tests.unit.cluster.standin:Replica")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    asked = [{"seed": i, "max_tokens": 600} for i in range(8)]
    try:
        with SpecGroup("model", ladder="move", max_restarts=-1) as group:
            assert len({one["host"] for one in group.status()["engines"].values()}) == 2
            death = threading.Timer(1.0, cluster.remove_node, (second,), {"allow_graceful": False})
            death.start()
            generated(group, asked)
            death.join()
            cluster.add_node(**NODE)
            until(lambda: all(one["is_up"] for one in group.status()["engines"].values()), 120.0)
            assert len({one.engine for one in generated(group, asked)}) == 2 and group.status()["lost"] >= 1
    finally:
        ray.shutdown()
        cluster.shutdown()
