"""What the fresh environments are made of, without making any."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tests.trainers import fresh


@pytest.mark.parametrize("name", fresh.TRAINERS)
def test_every_trainer_has_one_pinned_version(name: str) -> None:
    # and nothing behind it: pip is given it as one word
    assert re.fullmatch(rf"{name}==[0-9.]+", fresh.pin(name))


def test_a_wheel_asks_for_what_is_no_extra(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    asked = ("numpy>=2", 'uvloop; sys_platform == "linux"', 'pytest; extra == "dev"', "flash-attn==2.8", "vllm>=0.20")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("one-1.0.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in asked))
    assert fresh.required(wheel) == [*asked[:2], *asked[3:]]
    assert [line for line in asked if fresh.CUDA_ONLY.match(line)] == [*asked[3:]]
