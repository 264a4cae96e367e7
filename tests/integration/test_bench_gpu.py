"""The rows of engines, on whatever device vLLM runs here: a tiny model, and no figure looked at."""

import json

import pytest

from bench.gpu import parts
from bench.gpu.engine_rows import EngineRows
from bench.gpu.parts import Options

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Every row of the dry walk's last step, by its name."""
    options = Options(work=tmp_path_factory.mktemp("work"), steps=("speed",), is_dry=True, taus=(4.0,))
    (part,) = parts.parts(options)
    tasks = json.loads(json.dumps([task.params for task in part.tasks]))
    with EngineRows(part.setup, tasks) as rows:
        return {task.name: rows.measure(params) for task, params in zip(part.tasks, tasks, strict=True)}


def test_all_engines_hold_equal_weights_and_say_what_they_are_made_of(measured):
    facts = measured["engines"]
    assert set(facts) == {"stock", "chain", "tree"}
    assert [name for name in facts if "SpecRollout" in facts[name]["runner"][0]] == ["chain", "tree"]
    assert all(one["attention"] == ["CPU_ATTN"] and one["start_s"] > 0 and one["log"] for one in facts.values())


@pytest.mark.parametrize("arm", ["chain", "tree"])
def test_ours_yields_stocks_tokens_in_fewer_steps(measured, arm):
    values = measured[f"{arm}, 4 a step, 2 x 64"]
    assert values["is_right"] and values["row"]["identical"], values["row"]["difference"]
    assert (values["parted"], values["stale"]) == (0, 0)
    assert values["row"]["steps"] < values["row"]["stock_steps"] == 24
    assert values["row"]["speedup"] > 0 and values["split"]["accepted"] > 0


@pytest.mark.parametrize("name", ["stock, 2 x 64", "tree, 4 a step, 2 x 64"])
def test_a_step_is_split_into_what_the_device_works_and_what_it_idles(measured, name):
    values = measured[f"device, {name}"]
    assert values["is_right"] and values["busy_ms"] > 0 and values["step_ms"] > 0
    assert values["idle_ms"] == pytest.approx(values["step_ms"] - values["busy_ms"])
    assert 0 < len(values["kernels"]) <= 12
    assert [ms for _, ms, _ in values["kernels"]] == sorted((ms for _, ms, _ in values["kernels"]), reverse=True)
