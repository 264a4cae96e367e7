"""The device by nvidia-smi, and the code by its digest."""

import os

import pytest

from bench.gpu import machine, source


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An `nvidia-smi` that says what the test wants."""

    def answer(gpu):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nprintf '{gpu}'\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return answer


def test_the_device_is_described_by_its_driver(smi):
    smi("NVIDIA H200, 580.159.04, 143771, 5\\n")
    assert machine.describe() == {
        "gpu": "NVIDIA H200",
        "driver": "580.159.04",
        "gpu_memory_mib": 143771,
        "gpu_memory_used_mib": 5,
    }


def test_a_driver_that_says_nonsense_or_is_not_there_describes_no_device(smi, monkeypatch, tmp_path):
    smi("No devices were found\\n")
    assert machine.describe() == {"gpu": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe() == {"gpu": None}


def test_the_codes_digest_changes_with_the_code_and_with_nothing_else(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernel.py").write_text("x = 1")
    before = source.digest(tmp_path)
    (tmp_path / "kernels" / "kernel.pyc").write_text("whatever")
    (tmp_path / "README.md").write_text("words")
    assert source.digest(tmp_path) == before
    (tmp_path / "kernels" / "kernel.py").write_text("x = 2")
    assert source.digest(tmp_path) != before
