"""What `pip install` of the wheel brings, away from the checkout: all that the code reads, and commands that work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("vllm_specrollout", "kernels", "patches", "bench", "packages", "csrc")
MAPPED = {"kernels": "kernels", "patches": "patches", "bench": "bench", "packages": "bench"}
POLICY = ROOT / "packages" / "policy"
# for readers, and for a machine that has the checkout
UNREAD = (".md", ".sh", ".so")
RECIPE = ("__main__", "train")
WEIGHTS = ("checkpoint", "draft", "head")
CHECKOUT_ONLY = (
    *("bench/soak/", "bench/studies/", *(f"bench/policy/{name}.py" for name in RECIPE)),
    *(f"bench/policy/{name}/" for name in WEIGHTS),
)
# the others are parts of these
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*/*.py")) if "__main__" in path.read_text(encoding="utf-8")]
MODULES = """
import vllm_specrollout, vllm_specrollout._core, vllm_specrollout.bench.policy as policy
assert not policy.CHECKPOINT.exists()
print(vllm_specrollout.__file__, vllm_specrollout._core.__file__, policy.__file__, sep="\\n")
"""
BENCHES = """
from typer.testing import CliRunner
from vllm_specrollout.cli.commands import BENCHES, app
for name in BENCHES:
    done = CliRunner().invoke(app, ["bench", name, "--help"])
    print(name, done.exit_code, "" if "Usage" in done.output else repr(done.exception))
"""


def read_by_code(folder: Path) -> set[str]:
    """Paths below a package's folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in files if path.suffix not in UNREAD}


def test_every_file_that_the_code_reads_is_packed(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packed = read_by_code(tmp_path / "vllm_specrollout")
    assert read_by_code(ROOT / "vllm_specrollout") <= packed
    for top, inner in MAPPED.items():
        for init in ROOT.glob(f"{top}/*/__init__.py"):
            name = f"{inner}/{init.parent.name}"
            files = {f"{name}/{path}" for path in read_by_code(init.parent)}
            assert {path for path in files if not path.startswith(CHECKOUT_ONLY)} <= packed
    assert not [path for path in packed if path.startswith(CHECKOUT_ONLY)]
    assert "bench/policy/tasks.py" in packed and "patches/supported_vllm.toml" in packed


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and with all packages of this one but ours."""

    folder: Path
    site: Path
    # variables of its commands
    more: Mapping[str, str] = field(default_factory=dict)

    def run(self, *command: str | Path, status: int = 0) -> str:
        """What a command of the environment writes, begun where nothing of ours lies; errors, if it is to fail."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment |= {"SPECROLLOUT_STRICT": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HOME": str(self.folder)}
        environment |= self.more
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, f"{program} {arguments}: {done.stdout[-3000:]}{done.stderr[-5000:]}"
        return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    scratch = tmp_path_factory.mktemp("wheel")
    source, folder = scratch / "source", scratch / "environment"
    # a copy: what was built in the checkout before does not get into the wheel
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(scratch), str(source)]
    subprocess.run([*pip, *wheel], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    into = ["--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *into, *map(str, scratch.glob("*.whl"))], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # a folder that is named so has its own .pth files passed over, and with them the checkout
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(folder, site)


@pytest.mark.nightly
def test_the_package_and_its_extension_are_those_that_were_installed_and_there_are_no_weights(
    installed: Installed,
) -> None:
    places = installed.run("python", "-c", MODULES).splitlines()
    assert len(places) == 3 and all(Path(place).is_relative_to(installed.site) for place in places)


@pytest.mark.nightly
def test_doctor_finds_nothing_wrong(installed: Installed) -> None:
    assert "spec rollout works here" in installed.run("specrollout", "doctor")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_short_rollout_of_the_policy_has_stocks_tokens(installed: Installed) -> None:
    report = installed.folder / "report.json"
    size = ("--prompts", "2", "--samples", "2", "--batch", "2", "--max-tokens", "24", "--rounds", "1")
    refused = installed.run("specrollout", "bench", "rollout", *size, status=2)
    assert "the project's policy is not there" in refused and "SPECROLLOUT_POLICY" in refused
    of_checkout = replace(installed, more={"SPECROLLOUT_POLICY": str(POLICY)})
    of_checkout.run("specrollout", "bench", "rollout", *size, "--dtype", "float32", "--out", report)
    rows = json.loads(report.read_text())["rows"]
    assert rows and all(row["identical"] for row in rows)


@pytest.mark.nightly
def test_every_benchmark_can_be_loaded(installed: Installed) -> None:
    lines = [line.split(maxsplit=2) for line in installed.run("python", "-c", BENCHES).splitlines()]
    left = {name: said for name, *said in lines if said != ["0"]}
    assert len(lines) > 10 and set(left) == {"soak", "study"}, lines
    assert all("is not part of the installed package" in said for _, said in left.values())


@pytest.mark.nightly
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_begin_where_there_is_no_checkout(installed: Installed, path: Path) -> None:
    folder = installed.folder / "examples" / path.parent.name
    shutil.copytree(path.parent, folder, dirs_exist_ok=True)
    assert "--model" in installed.run("python", folder / path.name, "--help")
