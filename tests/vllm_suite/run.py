"""vLLM's own tests with stock vLLM and with drafts: what passes with the one passes with the other.

    python -m tests.vllm_suite.run [FILE ...]

Each file of `table.py` runs twice. Its row says how many requests must have been drafted for at least. A file without a
row is tried, so that its row can be written from what it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.vllm_suite.table import FILES, File
from tests.vllm_suite.tree import HUB, PACKAGES, SUITE

SITE = Path(__file__).parent / "site"
BEGIN = "[pytest]\nasyncio_default_fixture_loop_scope = function\naddopts = --import-mode=prepend\n"
MINUTES = 20


class Arm(NamedTuple):
    """What one way of running a file gave."""

    # test -> passed, failure, error or skipped
    outcomes: dict[str, str]
    # requests with drafts, draft tokens, accepted ones
    counts: Counter[str]
    log: Path


def arm(file: File, is_ours: bool, folder: Path) -> Arm:
    """One file, in a process of its own with the servers that it leaves behind."""
    folder.mkdir(parents=True)
    report, log = folder / "report.xml", folder / "log.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, PACKAGES))),
        "HF_HOME": str(HUB),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # no plugin has this name
        "VLLM_PLUGINS": "spec_rollout" if is_ours else "none",
    }
    if file.is_unskipped:
        environment["VLLM_SUITE_UNSKIPPED"] = "1"
    if is_ours:
        given = {"VLLM_SPEC_ROLLOUT": '{"budget": "fixed"}', "SPECROLLOUT_STRICT": "1"}
        environment |= {**given, "VLLM_SUITE_COUNTS": str(folder)}
    left_out = [f"--deselect={file.path}::{name}" for name in file.left_out]
    options = ["-q", "-c", "suite.ini", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "--timeout=300", *left_out, file.path],
            cwd=SUITE, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(60 * MINUTES)
        except subprocess.TimeoutExpired:
            print(f"{file.path}: not done in {MINUTES} minutes", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    counts: Counter[str] = Counter()
    for one in folder.glob("*.json"):
        counts.update(json.loads(one.read_text()))
    return Arm(outcomes(report), counts, log)


def outcomes(report: Path) -> dict[str, str]:
    """Test -> what became of it."""
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase") if report.exists() else ():
        bad = next((one.tag for one in case if one.tag in ("failure", "error", "skipped")), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = bad
    return found


def worse(stock: Arm, ours: Arm, file: File) -> list[str]:
    """What passes with stock alone; or that a file says nothing of drafts."""
    passed = [name for name, outcome in stock.outcomes.items() if outcome == "passed"]
    found = [
        f"{name}: {ours.outcomes.get(name, 'did not run')}" for name in passed if ours.outcomes.get(name) != "passed"
    ]
    if len(passed) < file.passed:
        found.append(f"{len(passed)} pass with stock, where {file.passed} did; see {stock.log}")
    if ours.counts["requests"] < file.drafted:
        found.append(
            f"{ours.counts['requests']} requests had drafts, where at least {file.drafted} did; see {ours.log}"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", help="paths in vLLM's tests, such as tests/detokenizer/test_stop_strings.py"
    )
    asked = parser.parse_args().files
    (SUITE / "suite.ini").write_text(BEGIN + _markers())
    folder, is_bad = Path(tempfile.mkdtemp(prefix="vllm-suite-")), False
    rows = {file.path: file for file in FILES}
    for number, path in enumerate(asked or rows):
        file = rows.get(path, File(path, passed=1, drafted=0))
        stock, ours = (arm(file, is_ours, folder / f"{number}-{is_ours}") for is_ours in (False, True))
        found = worse(stock, ours, file)
        is_bad |= bool(found)
        said = [dict(Counter(one.outcomes.values())) for one in (stock, ours)]
        print(f"{file.path}: stock {said[0]}, ours {said[1]}, {dict(ours.counts)}", flush=True)
        print("".join(f"  WORSE {line}\n" for line in found), end="", flush=True)
    print(f"logs: {folder}")
    return int(is_bad)


def _markers() -> str:
    """vLLM's own, so that its marked tests are no unknown ones."""
    import tomllib

    theirs = tomllib.loads((SUITE / "theirs.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    return "markers =\n" + "".join(f"    {one}\n" for one in theirs)


if __name__ == "__main__":
    raise SystemExit(main())
