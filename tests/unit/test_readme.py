"""README is read first: it is short, its figures are measured ones, and its links lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES, MOST_WORDS = 110, 30


def sentences(text: str) -> list[str]:
    """Of prose: without code, headings, and with the cells of tables and the items of lists apart."""
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    parts = re.split(r"\n\n|\n(?=[-#|])|\|", re.sub(r"\]\([^)]*\)", "]", bare))
    return [one for part in parts for one in re.split(r"(?<=[.:;?!*])\s", " ".join(part.split())) if one]


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_readme_has_at_most_110_lines():
    assert len(TEXT.splitlines()) <= MOST_LINES


def test_no_sentence_of_the_readme_is_long():
    assert not [one for one in sentences(TEXT) if len(one.split()) > MOST_WORDS]


def test_the_readmes_speeds_are_in_the_results():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = re.findall(r"\d\.\d\dx(?: \(\d\.\d\d to \d\.\d\d\))?", TEXT)
    assert len(told) > 7
    assert not [one for one in told if one not in page]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_a_link_of_the_readme_leads_to_a_page_and_its_heading(link):
    name, _, anchor = link.partition("#")
    path = ROOT / name
    assert path.exists()
    assert not anchor or anchor in anchors(path)


def test_the_readme_names_the_pythons_that_the_package_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least, below = re.findall(r"\d\.\d+", project["requires-python"])
    assert f"Python {least} or later and below {below}" in TEXT
