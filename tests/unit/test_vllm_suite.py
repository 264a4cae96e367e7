"""What the comparison of vLLM's own tests, with stock and with drafts, says of two runs."""

from collections import Counter
from pathlib import Path

import pytest

from tests.vllm_suite.run import Arm, outcomes, worse
from tests.vllm_suite.table import FILES, File

LOG = Path("log.txt")
FILE = File("tests/some.py", passed=2, drafted=3)


def arm(drafted: int = 3, **tests: str) -> Arm:
    return Arm(tests, Counter(requests=drafted), LOG)


STOCK = arm(0, a="passed", b="passed", c="failure")


def test_what_passes_with_both_or_fails_with_stock_is_no_finding():
    assert worse(STOCK, arm(a="passed", b="passed", c="failure"), FILE) == []
    assert worse(STOCK, arm(a="passed", b="passed", c="passed"), FILE) == []


@pytest.mark.parametrize("became", ["failure", "error", "skipped"])
def test_what_passes_with_stock_alone_is_one(became):
    assert worse(STOCK, arm(a="passed", b=became), FILE) == [f"b: {became}"]


def test_a_test_that_never_ran_with_drafts_is_one():
    assert worse(STOCK, arm(a="passed"), FILE) == ["b: did not run"]


def test_a_file_that_passes_less_with_stock_or_is_drafted_less_is_one():
    (fewer,) = worse(arm(0, a="passed"), arm(a="passed"), FILE)
    assert fewer.startswith("1 pass with stock, where 2 did")
    (undrafted,) = worse(STOCK, arm(2, a="passed", b="passed"), FILE)
    assert undrafted.startswith("2 requests had drafts, where at least 3 did")


def test_outcomes_are_read_from_a_report_and_none_from_one_that_is_not_there(tmp_path):
    report = tmp_path / "report.xml"
    assert outcomes(report) == {}
    report.write_text(
        '<suite><testcase classname="x" name="a"/><testcase classname="x" name="b"><failure/></testcase></suite>'
    )
    assert outcomes(report) == {"x::a": "passed", "x::b": "failure"}


def test_every_file_of_the_table_must_pass_and_be_drafted_for():
    assert FILES and all(one.passed > 0 and one.drafted > 0 for one in FILES)
