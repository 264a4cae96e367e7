"""Devices of a process: how they are named, and what a process sees of them."""

from __future__ import annotations

import pytest

from vllm_specrollout.config.devices import Devices, check_apart, parse_devices, shares, together
from vllm_specrollout.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("cpu:2", "cpu", (2,)),
        ("cpu:0-3", "cpu", (0, 1, 2, 3)),
        ("cpu:0,2-3", "cpu", (0, 2, 3)),
        ("cuda:1", "cuda", (1,)),
        ("cuda:2,1", "cuda", (2, 1)),
    ],
)
def test_cores_and_gpus_are_named_by_number(text: str, kind: str, numbers: tuple[int, ...]) -> None:
    found = parse_devices("devices", text)
    assert found == Devices(kind, numbers) and parse_devices("devices", str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu:", "cpu:a", "gpu:0", "cuda:-1", "cuda:1,1", "cpu:3-2", "cpu:0-99999", "cpu:1;2", 7, None]
)
def test_what_is_no_device_is_one_clear_error(text: object) -> None:
    with pytest.raises(ConfigError, match="`devices` names") as error:
        parse_devices("devices", text)  # type: ignore[arg-type]
    assert error.value.hint


def test_devices_of_one_process_are_of_one_kind() -> None:
    assert together("devices", ["cpu:1", "cpu:0-1"]) == Devices("cpu", (1, 0))
    assert together("devices", []) is None
    with pytest.raises(ConfigError, match="cores beside GPUs"):
        together("devices", ["cpu:1", "cuda:0"])


def test_two_engines_share_cores_but_no_gpu() -> None:
    check_apart("devices", [Devices("cpu", (0,)), Devices("cpu", (0,)), Devices("cuda", (0,)), Devices("cuda", (1,))])
    with pytest.raises(ConfigError, match="gives cuda:1 to two engines"):
        check_apart("devices", [Devices("cuda", (0, 1)), Devices("cuda", (1,))])


def test_cores_are_shared_out_evenly_or_in_turns() -> None:
    assert [one.numbers for one in shares([0, 1, 2, 3, 4], 2)] == [(0, 1, 2), (3, 4)]
    assert [one.numbers for one in shares([5, 6], 3)] == [(5,), (6,), (5,)]


def test_a_process_sees_its_own_gpus_by_the_hosts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Devices("cuda", (1, 2)).environment()["CUDA_VISIBLE_DEVICES"] == "1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    assert Devices("cuda", (2, 0)).environment()["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-a"
    with pytest.raises(ConfigError, match="3 GPUs are visible"):
        _ = Devices("cuda", (3,)).environment()
    assert Devices("cpu", (2, 3)).environment() == {"VLLM_CPU_OMP_THREADS_BIND": "2,3", "OMP_NUM_THREADS": "2"}
    three = Devices("cpu", (2, 3, 5)).environment(2)
    assert three == {"VLLM_CPU_OMP_THREADS_BIND": "2,3|5", "OMP_NUM_THREADS": "2"}
    assert Devices("cpu", (4,)).environment(2)["VLLM_CPU_OMP_THREADS_BIND"] == "4|4"
