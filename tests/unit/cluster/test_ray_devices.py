"""Ray places engines on accelerators that it counts, and drafters beside them; none has to be there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from tests.unit.cluster.standin import answer
from tests.waiting import until
from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray import group as module
from vllm_specrollout.cluster.ray.placement import _LOCAL
from vllm_specrollout.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REPLICA", "tests.unit.cluster.beside:Engine")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init("local", num_cpus=2, num_gpus=4, **_LOCAL)
        yield
        ray.shutdown()


def test_a_freed_engines_drafter_wakes_on_its_own_gpu_and_sleeps_before_the_next_prefill(tmp_path: Path) -> None:
    """Four engines and four drafters on four GPUs."""

    def diary(gpu: str) -> list[str]:
        return (tmp_path / gpu).read_text().splitlines()

    settings = {"diary": str(tmp_path), "max_num_seqs": 1}
    with SpecGroup("model", engines=4, cpus=0.25, drafters=["small"], ladder="attach", engine=settings) as group:
        (gpus,) = zip(*([own[0]["CUDA_VISIBLE_DEVICES"]] for own in group.collective_rpc("env")), strict=True)
        assert sorted(gpus) == ["0", "1", "2", "3"]

        def awake() -> set[str]:
            standing = group.collective_rpc("spec_rollout_standing")
            return {gpu for gpu, own in zip(gpus, standing, strict=True) if own[0]["drafter"]}

        until(lambda: len(awake()) == 4)  # nobody works
        asked = [{"seed": i, "max_tokens": 4000 if i == 2 else 5} for i in range(4)]
        found: list[list[int]] = []
        prompts = [[i] for i in range(4)]
        batch = threading.Thread(
            target=lambda: found.extend(list(one.token_ids) for one in group.generate(prompts, asked))
        )
        batch.start()
        until(lambda: "prefill" in "".join(map("".join, map(diary, gpus))) and len(awake()) == 3)
        (busy,) = set(gpus) - awake()
        assert diary(busy)[-1] == "prefill"
        assert all(diary(gpu)[-1] == f"awake on {gpu}" for gpu in gpus if gpu != busy)
        batch.join()
        assert found == [answer(one) for one in asked]
        for gpu in gpus:
            said = diary(gpu)
            assert said[:4] == [f"asleep on {gpu}", f"awake on {gpu}", f"asleep on {gpu}", "prefill"], "in this order"
            assert {line.rpartition(" ")[2] for line in said} == {gpu, "prefill"}, "and on no other"


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"engine": {"tensor_parallel_size": 8}}, "an engine has 8 GPUs, and no host of Ray's has more than 4"),
        ({"engine": {"tensor_parallel_size": 4}}, "needs 0.5 CPU and 8 GPU of Ray, which has 2 CPU and 4 GPU in all"),
        ({"gpus": 2.5}, "needs 0.5 CPU and 5 GPU of Ray, which has 2 CPU and 4 GPU in all"),
        ({"devices": ["cuda:0", "cuda:1"]}, "names cuda:0, and this host has no GPUs"),
    ],
)
def test_what_the_whole_cluster_cannot_meet_is_refused_at_once(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        SpecGroup("model", engines=2, cpus=0.25, **given)
