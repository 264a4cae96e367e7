"""What runs on a host of the repository: workflows, hooks and forms name what is there."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_checks_a_nightly_run_and_one_for_drift_are_there_and_may_not_write():
    may = {name: one["permissions"] for name, one in WORKFLOWS.items()}
    assert may == dict.fromkeys(("checks", "drift", "nightly"), {"contents": "read"})


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_command_of_a_workflow_is_one_of_ours(name):
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        words = command.split()
        if words[0] == "make":
            targets = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            assert targets and all(re.search(rf"^{target}:", MAKE, re.MULTILINE) for target in targets)
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
        else:
            assert (ROOT / words[0]).exists()


def test_checks_run_on_every_python_that_the_environment_is_made_for():
    jobs = WORKFLOWS["checks"]["jobs"].values()
    (matrix,) = [job["strategy"]["matrix"]["python"] for job in jobs if "strategy" in job]
    tried = re.search(r"for python in (.*) python3;", MAKE)[1].split()
    assert [f"python{version}" for version in matrix] == tried
    told = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert told == set(re.search(r"^PYTHONS \?= (.*)$", MAKE, re.MULTILINE)[1].replace("python", "").split())


def test_hooks_run_the_tools_that_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    tools = [hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks]
    assert tools and all(f"$(BIN)/{tool}" in MAKE for tool in tools)


def test_the_version_is_the_same_wherever_it_stands():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    assert cited == PROJECT["version"]
    assert f"\n## {cited}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
