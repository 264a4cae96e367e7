"""Placement of a group's engines and drafters: which devices each process sees, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ray.placement import Needs, _places
from vllm_specrollout.config.devices import Devices, parse_devices
from vllm_specrollout.errors import ConfigError


def needs(
    count: int, has_drafters: bool, devices: list[str] | None, beside: list[str] | None = None, **more: Any
) -> Needs:
    def parsed(names: list[str] | None) -> list[Devices] | None:
        return None if names is None else [parse_devices("devices", name) for name in names]

    given: dict[str, Any] = {"gpus": None, "cpus": 1.0, "max_restarts": 0, "engine": {}, **more}
    return Needs(
        replica="",
        count=count,
        has_drafters=has_drafters,
        devices=parsed(devices),
        drafter_devices=parsed(beside),
        **given,
    )


def test_on_cores_a_drafter_shares_its_engines() -> None:
    first, second = _places(needs(2, True, ["cpu:0-1", "cpu:2,3"]), has_gpus=True)
    assert first.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1" and first.drafter == ["cpu:0", "cpu:1"]
    assert second.drafter == ["cpu:2", "cpu:3"] and first.gpus == second.gpus == 0.0
    assert not any(own.drafter for own in _places(needs(2, False, ["cpu:0-1", "cpu:2,3"]), has_gpus=True))
    (own,) = _places(needs(1, True, ["cpu:0"], ["cpu:5"]), has_gpus=False)
    assert own.drafter == ["cpu:5"]


def test_a_process_sees_its_engines_gpus_first_and_then_its_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = _places(needs(2, True, ["cuda:0,1", "cuda:2,3"], ["cuda:4", "cuda:6,7"]), has_gpus=True)
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0,1,4" and first.drafter == ["cuda:2"]
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "2,3,6,7" and second.drafter == ["cuda:2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10")
    (own,) = _places(needs(1, True, ["cuda:1"], ["cuda:2"]), has_gpus=True)
    assert own.environment["CUDA_VISIBLE_DEVICES"] == "9,10" and own.drafter == ["cuda:1"]


def test_of_rays_gpus_each_rank_has_one_and_a_drafter_one_more() -> None:
    first, second = _places(needs(2, True, None, engine={"tensor_parallel_size": 2}), has_gpus=True)
    assert (first.gpus, first.drafter, first.environment) == (3.0, ["cuda:2"], {}) and second == first
    (alone,) = _places(needs(1, False, None, engine={"tensor_parallel_size": 2}), has_gpus=True)
    assert (alone.gpus, alone.drafter) == (2.0, [])
    (half,) = _places(needs(1, False, None, gpus=0.5), has_gpus=True)
    assert half.gpus == 0.5


def test_what_cannot_be_placed_is_one_clear_error() -> None:
    for given, cause in (
        (needs(1, True, None, gpus=0.5), "`gpus` is 0.5"),
        (needs(1, True, ["cuda:0"]), "none of their drafters"),
    ):
        with pytest.raises(ConfigError, match=cause) as error:
            _places(given, has_gpus=True)
        assert error.value.hint


WRONG: dict[str, dict[str, Any]] = {
    "names 1 places for 2 engines": {"devices": ["cuda:0"]},
    "`drafter_devices` names 1 places": {"devices": ["cuda:0", "cuda:1"], "drafter_devices": ["cuda:2"]},
    "gives cuda:1 to two engines": {"devices": ["cuda:0", "cuda:1"], "drafter_devices": ["cuda:1", "cuda:3"]},
    "`drafter_devices` is given, and `devices` is not": {"drafter_devices": ["cuda:0", "cuda:1"]},
    "names 'tpu:1'": {"devices": ["tpu:1", "tpu:2"]},
}


@pytest.mark.parametrize("cause", WRONG)
def test_devices_that_make_no_sense_are_refused_before_anything_starts(cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        SpecGroup("model", drafters=["small"], ladder="attach", **WRONG[cause])
    assert error.value.hint
