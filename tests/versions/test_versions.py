"""The supported vLLM versions: their source is the known one, and ours yields stock's tokens on each.

The source of a version is compared wherever its tree is. What runs one is left out of `make test`, by the marker
`versions`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.versions import trees
from tests.versions.suite import FEATURES, SHAPES, models_of
from vllm_specrollout import patches
from vllm_specrollout.config import envs
from vllm_specrollout.patches import features, supported
from vllm_specrollout.server.wrappers import accept_dropped_keyword, stop_at_once

TESTED = Path(__file__).with_name("tested.json")
RUNS = [(version, runner) for version, row in features.TABLE.items() for runner in row.runners]
WITH_MODELS = [(version, runner) for version, runner in RUNS if models_of(features.TABLE[version], runner)]
SUITES = [*((*run, "shapes") for run in RUNS), *((*run, "models") for run in WITH_MODELS)]


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Path | None:
    """Where that version's source is; None: it is the installed one."""
    version: str = request.getfixturevalue("version")
    if reason := trees.missing(version):
        pytest.skip(reason)
    return None if version == supported.installed_vllm() else trees.FOLDER / version


def test_making_the_trees_and_testing_them_leaves_nothing_out() -> None:
    """Where there is no tree yet, `make test` skips the source of a version: so whoever builds it has to look."""
    recipe = trees.ROOT.joinpath("Makefile").read_text(encoding="utf-8").partition("\nversions-test: versions\n")[2]
    command, _trainers = [line for line in recipe.partition("\n\n")[0].splitlines() if "pytest" in line]
    assert command.endswith(" --update-snapshots tests/versions") and " -m pytest " in command
    assert " -m versions" not in command and " -k " not in command


def test_every_version_but_the_installed_one_has_a_pinned_tree() -> None:
    pytest.importorskip("vllm")
    assert {*trees.pins(), supported.installed_vllm()} == set(features.TABLE)


def test_the_tables_of_versions_agree() -> None:
    assert list(supported.table()) == list(features.TABLE)
    assumed = [set(entry["assumed"]) for entry in supported.table().values()]
    assert all(own == assumed[0] for own in assumed)


@pytest.mark.parametrize("version", features.TABLE)
def test_what_a_version_rebinds_is_recorded_and_nothing_else_is(version: str) -> None:
    targets = [patch.target for patch in patches.load_all(version)]
    assert sorted(supported.table()[version]["patched"]) == sorted(targets)
    assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("version", features.TABLE)
def test_every_definition_of_a_version_is_as_recorded(version: str, tree: Path | None) -> None:
    assert supported.mismatches(version, tree) == []
    entry = supported.table()[version]
    recorded = {**entry["patched"], **entry["assumed"]}
    assert supported.fingerprints(recorded, tree) == recorded
    found = [target for target, value in recorded.items() if value != supported.NOT_FOUND]
    assert set(entry["files"]) == {target.partition(":")[0] for target in found}


@pytest.mark.versions
@pytest.mark.parametrize("version", trees.pins())
def test_signatures_and_patches_of_a_version_are_those_that_we_count_on(version: str, tree: Path) -> None:
    run = _python(version, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/patches/test_drift.py")
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("version", features.TABLE)
def test_the_tables_columns_name_what_that_version_has(version: str, tree: Path | None) -> None:
    root = tree or Path(str(supported._module_file("vllm"))).parents[1]
    row = features.TABLE[version]

    def source(module: str) -> str:
        return root.joinpath("vllm", *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")

    assert ("fused_gumbel_argmax" in source("v1.sample.ops.topk_topp_sampler")) == (row.cpu_noise == "integer")
    assert ("murmur3_uniform32" in source("v1.worker.gpu.sample.gumbel")) == (row.v2_noise == "murmur")
    asks_config = "use_spec_decode = self.speculative_config is not None" in source("v1.worker.gpu_model_runner")
    assert asks_config == (row.speculates_by == "config")
    stats = source("v1.metrics.stats")
    assert f"    {row.counts_field}: dict[str, int]" in stats[stats.index("class SchedulerStats:") :]
    assert f"self.{row.places_field} = " in source("v1.core.sched.scheduler")
    assert ("mask_stride = max_num_spec_tokens" in source("v1.structured_output.__init__")) == (
        row.mask_stride == "fixed"
    )
    trims_itself = "_trim_surplus_tokens" in source("v1.engine.output_processor")
    assert trims_itself != any(patch.wrap is stop_at_once for patch in patches.load_all(version))
    pausing = source("v1.engine.async_llm").partition("def pause_generation")[2].partition('"""')[0]
    is_accepted = any(patch.wrap is accept_dropped_keyword for patch in patches.load_all(version))
    assert is_accepted != ("wait_for_inflight_requests" in pausing)


def _python(version: str, *arguments: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], trees.environment(version, **chosen)
    return subprocess.run(command, env=environment, cwd=trees.ROOT, capture_output=True, text=True, timeout=1500)


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("version", "runner", "what"), SUITES)
def test_whatever_drafts_the_tokens_are_those_of_that_versions_stock(
    version: str, runner: str, what: str, tree: Path | None, request: pytest.FixtureRequest
) -> None:
    chosen = {"VLLM_PLUGINS": "spec_rollout", envs.STRICT: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    run = _python(version, "-m", "tests.versions.suite", runner, what, **chosen)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    kinds = models_of(features.TABLE[version], runner) if what == "models" else SHAPES
    assert (result["vllm"], result["runner"]) == (version, runner)
    assert result["failures"] == []
    assert set(result["accepted"]) == set(kinds) and min(result["accepted"].values()) > 0 and result["branches"] > 0
    if request.config.getoption("--update-snapshots"):
        row = {"kinds": list(kinds)} if what == "models" else {"features": result["features"]}
        row |= {"requests": result["requests"], "tokens": result["tokens"], "ties": len(result["ties"])}
        _remember(version, runner if what == "shapes" else f"{runner} models", row)


def _remember(version: str, what: str, row: dict[str, Any]) -> None:
    known = json.loads(TESTED.read_text(encoding="utf-8")) if TESTED.exists() else {}
    known.setdefault(version, {})[what] = row
    ordered = {one: dict(sorted(known[one].items())) for one in sorted(known)}
    TESTED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def test_a_runner_is_called_supported_where_the_suite_has_passed_and_nowhere_else() -> None:
    known = json.loads(TESTED.read_text(encoding="utf-8"))
    with_models = {(version, f"{runner} models") for version, runner in WITH_MODELS}
    assert {(version, what) for version, rows in known.items() for what in rows} == {*RUNS, *with_models}
    assert all(known[version][runner]["features"] == list(FEATURES) for version, runner in RUNS)
    for version, runner in WITH_MODELS:
        assert known[version][f"{runner} models"]["kinds"] == list(models_of(features.TABLE[version], runner))
