"""Everything that is installed is pinned, and known by its hash."""

import re
import runpy
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCK = runpy.run_path(str(REQUIREMENTS / "lock.py"))
SOURCES = sorted(REQUIREMENTS.glob("*.in"))
# those of one environment
TOGETHER = ("cpu", "torch", "dev", "trainers")


def pins(path: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    return list(LOCK["pins"](path.read_text(encoding="utf-8")))


def pinned(*names: str) -> list[tuple[str, str]]:
    return [(name, version) for one in names for name, version, _ in pins(REQUIREMENTS / f"{one}.in")]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_pin_has_hashes(source):
    locked = pins(source.with_suffix(".txt"))
    assert [pin[:2] for pin in locked] == [pin[:2] for pin in pins(source)], "run `make lock`"
    for name, version, hashes in locked:
        assert version and hashes, name
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), name
        assert len(set(hashes)) == len(hashes), name


def test_no_package_of_an_environment_is_pinned_twice():
    names = [name.lower() for name, _ in pinned(*TOGETHER)]
    assert sorted(set(names)) == sorted(names)


def test_what_is_installed_is_what_is_pinned():
    wrong = {
        name: metadata.version(name)
        for name, version in pinned("cpu", "torch", "dev")
        if version != metadata.version(name)
    }
    assert not wrong, "run `make setup`"


@pytest.mark.parametrize("path", ["pyproject.toml", "requirements/vllm_alias/pyproject.toml"])
def test_what_builds_is_what_is_pinned(path):
    requires = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["build-system"]["requires"]
    assert requires and {tuple(one.split("==")) for one in requires} <= set(pinned("cpu", "dev"))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_nothing_comes_from_an_index_without_a_known_hash_and_no_two_indices_are_mixed():
    targets = [".venv/.installed", ".tools/.installed", ".trainers/.installed", ".triton/.installed"]
    command = ["make", "--dry-run", "--always-make", *targets]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    installs = re.findall(r"\S*pip install (.*?)(?=\|\||\n)", said.replace("\\\n", " "))
    fetches = [options for options in installs if re.search(r"(^|\s)-r\s", options)]
    assert len(fetches) == 6 and "--extra-index-url" not in said
    assert all("--require-hashes" in options and "--no-deps" in options for options in fetches)
    # what is left is here: no index is asked
    local = [options.split()[-1] for options in installs if options not in fetches]
    assert set(local) == {"./requirements/vllm_alias", "."}
    assert all("--no-build-isolation" in options for options in installs if options not in fetches)
    # torch alone may come from its own index
    assert [options.split()[-1] for options in fetches if "--index-url" in options] == ["requirements/torch.txt"]


def test_a_wheel_is_locked_where_it_can_be_installed_and_nowhere_else():
    good = "py3-none-any cp311-cp311-manylinux_2_28_x86_64 cp38-abi3-manylinux_2_17_aarch64"
    bad = "cp310-cp310-manylinux_2_28_x86_64 cp313-abi3-linux_x86_64 cp311-cp311-win_amd64"
    bad += " cp311-cp311-musllinux_1_2_x86_64 cp312-cp312-macosx_11_0_arm64"
    found = {tag for tag in f"{good} {bad}".split() if LOCK["_fits"](f"a-1-{tag}.whl")}
    assert found == set(good.split())
