"""`specrollout schema`: all that can be set is in it, and what it refuses of single values an engine refuses too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.config import SpecRolloutConfig, parse
from vllm_specrollout.config.budgets import OPTIONS
from vllm_specrollout.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "config.md"


SCHEMA = json.loads(CliRunner().invoke(app, ["schema"], catch_exceptions=False).output)


def keys(node: dict[str, Any] = SCHEMA, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key under its name on the reference page, and what the schema says of it."""
    for name, own in node["properties"].items():
        yield prefix + name, own
        if "properties" in own:
            yield from keys(own, f"{prefix}{name}.")
        elif "properties" in own.get("items", {}):
            yield from keys(own["items"], f"{prefix}{name}[].")
        for one in own.get("anyOf", []):
            if "properties" in one:
                yield from keys(one, f"{prefix}{name}.")


BOUNDS = [(name, own["minimum"], own["maximum"]) for name, own in keys() if "minimum" in own]


def with_value(name: str, value: float) -> dict[str, Any]:
    """A configuration in which everything else lets the value be."""
    part, _, key = name.rpartition(".")
    if not part:
        return {key: value}
    if part == "budget":
        (budget,) = (n for n, kind in OPTIONS.items() if key in kind.__dataclass_fields__)
        return {"budget": {"name": budget, key: value}}
    around = {"decoupled": {"placement": "decoupled"}}
    return {**around.get(part, {}), part: {key: value}}


def test_every_key_of_the_reference_page_is_in_it_and_no_other():
    engine = PAGE.read_text(encoding="utf-8").partition("## Request")[0]
    documented = set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", engine, re.MULTILINE))
    assert {name for name, _ in keys()} - {"budget.name"} == documented


def test_every_key_says_what_it_means_and_what_it_is():
    for name, own in keys():
        assert "type" in own or "anyOf" in own or "const" in own, name
        assert "description" in own or name == "budget.name", name


def test_it_has_the_limits_of_numbers_and_the_names_of_choices():
    top = SCHEMA["properties"]
    assert (top["max_draft_tokens"]["minimum"], top["max_draft_tokens"]["maximum"]) == (1, 64)
    assert top["placement"]["enum"] == ["coupled", "decoupled", "auto"]
    assert top["train"]["properties"]["memory_gib"]["maximum"] == 4096.0
    assert top["record"]["type"] == ["string", "null"]
    assert top["decoupled"]["properties"]["drafters"]["items"]["required"] == ["model"]
    assert len(BOUNDS) > 15


@pytest.mark.parametrize(("name", "low", "high"), BOUNDS)
def test_beyond_the_limits_of_the_schema_an_engine_refuses_as_well(name, low, high):
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=rf"`{re.escape(name)}` .*, outside "):
            parse(with_value(name, value))


@pytest.mark.parametrize(
    "given",
    [
        SpecRolloutConfig().as_dict(),
        {"budget": {"name": "tlt", "threshold": 48}, "history": {"dir": "answers", "epochs": 3}},
        {"placement": "decoupled", "devices": ["cpu:2-3"], "decoupled": {"drafters": [{"model": "SMALL"}]}},
    ],
)
def test_a_configuration_that_an_engine_takes_fits_the_schema(given):
    jsonschema = pytest.importorskip("jsonschema")
    parse(given)
    jsonschema.validate(given, SCHEMA)


@pytest.mark.parametrize(
    "given",
    [{"max_draft_tokens": 65}, {"max_draft_token": 8}, {"shape": "bush"}, {"ngram": {"max_match": "1"}}, {"budget": 3}],
)
def test_what_an_engine_refuses_of_single_values_does_not_fit(given):
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(ConfigError):
        parse(given)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, SCHEMA)
