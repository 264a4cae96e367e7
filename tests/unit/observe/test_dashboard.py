"""The dashboard in the docs asks for metrics and labels that engines show."""

import json
import re
from pathlib import Path

import pytest

from vllm_specrollout.observe.metrics import METRICS, PREFIX

BOARD = json.loads((Path(__file__).parents[3] / "docs" / "guides" / "grafana.json").read_text())
SERIES = {
    PREFIX + metric.name + ending: {"model_name", "engine", *metric.labels, *(["le"] if ending == "_bucket" else [])}
    for metric in METRICS
    for ending in {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket"]}[metric.kind]
}
QUERIES = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_panel_asks_for_series_and_labels_that_there_are(title: str, target: dict[str, str]) -> None:
    expression = target["expr"]
    asked = re.findall(rf"{PREFIX}\w+", expression)
    assert asked and set(asked) <= set(SERIES)
    labels = set.intersection(*(SERIES[name] for name in asked))
    by = [label for group in re.findall(r"by \((.*?)\)", expression) for label in group.split(", ")]
    assert set(by) <= labels
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(by)
    assert expression.count("(") == expression.count(")")


def test_panels_have_names_of_their_own_and_stand_beside_each_other() -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}
    assert len(places) == len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
