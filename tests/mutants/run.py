"""Put faults into the engine, one at a time, and see that the tests that must notice do.

    python -m tests.mutants.run [--only NAME ...] [--selection EXPRESSION] [--jobs N]

A fault is noticed if each test of its row in `table.py` fails, and its code ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

SITE = Path(__file__).parent / "site"
EVERY_CHANGE = "not identity and not nightly and not gpu and not trainers and not versions"
OF_THE_FAULT_ITSELF = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "AttributeError")
"""Not what a test says that has noticed something."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a mutant."""

    mutant: Mutant
    tests: int
    # test, or something else, -> why it does not count as noticed
    missed: Mapping[str, str]
    seconds: float


def run(mutant: Mutant, selection: str, output: Path) -> Outcome:
    """Its tests, in a process of their own."""
    begin = time.monotonic()
    report, marks = output / "report.xml", output / "marks"
    marks.mkdir(parents=True)
    # as tests that run side by side do
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **threads, "PYTHONPATH": path, "MUTANT": mutant.name, "MUTANT_MARKS": str(marks)}
    left_out = [f"--deselect={test}" for test in mutant.left_out]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", selection, f"--junitxml={report}"]
    with (output / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *left_out, *mutant.tests],
            env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    found = outcomes(report) if report.exists() else {}
    missed = {test: why for test, why in found.items() if why}
    if not list(marks.iterdir()):
        missed["the fault"] = "its code never ran"
    for test in mutant.tests:
        if not any(name.startswith(test) for name in found):
            missed[test] = f"did not run, see {log.name}"
    return Outcome(mutant, len(found), missed, time.monotonic() - begin)


def outcomes(report: Path) -> dict[str, str]:
    """Test -> why it has noticed nothing; empty: it has."""
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        failure = case.find("failure")
        if failure is not None:
            said = failure.get("message", "")
            found[name] = f"failed by {said}" if said.startswith(OF_THE_FAULT_ITSELF) else ""
        else:
            other = next((one.tag for one in case if one.tag in ("error", "skipped")), "passed")
            found[name] = other
    return found


def table(results: Sequence[Outcome]) -> str:
    rows = [("mutant", "tests", "noticed", "seconds")]
    for one in results:
        noticed = "yes" if not one.missed else "NO"
        rows.append((one.mutant.name, str(one.tests), noticed, f"{one.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in MUTANTS], help="these faults alone")
    parser.add_argument("--selection", default=EVERY_CHANGE, help="marked tests, as in `pytest -m`")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at once")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if not given.only or one.name in given.only]
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def tried(mutant: Mutant) -> Outcome:
        outcome = run(mutant, given.selection, folder / str(MUTANTS.index(mutant)))
        for what, why in outcome.missed.items():
            print(f"NOT NOTICED: {mutant.name}: {what}: {why}", flush=True)
        return outcome

    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(tried, chosen))
    print(f"{table(results)}\n\nlogs: {folder}")
    return int(any(one.missed for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
