import json
import sys
from types import SimpleNamespace

import pytest

from vllm_specrollout.cli import doctor
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.patches import supported


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setattr(supported, "installed_vllm", lambda: None)


def test_a_host_without_vllm_is_unhealthy_and_told_what_to_install_as_text_and_as_json(without_vllm):
    report = doctor.examine(with_rows=True)
    assert not report.is_healthy and report.rows == ()
    assert report.as_text().startswith("spec rollout does not work here")
    assert 'hint: vllm: run `pip install "vllm==' in report.as_text()
    data = json.loads(report.as_json())
    assert data["is_healthy"] is False
    assert {entry["name"] for entry in data["findings"]} == {finding.name for finding in report.findings}


def test_an_unsupported_vllm_is_a_problem_and_nothing_else_is_asked_of_it(monkeypatch):
    monkeypatch.setattr(supported, "installed_vllm", lambda: "0.31.2")
    problems = [finding.name for finding in doctor.examine().findings if finding.is_problem]
    assert [name for name in problems if name != "C++ core"] == ["vllm"]


@pytest.mark.parametrize(
    "config, shape",
    [
        ({"model_type": "qwen3"}, "tree"),
        ({"model_type": "gemma3", "layer_types": ["sliding_attention", "full_attention"]}, "chain"),
        ({"model_type": "mamba2", "layer_types": ["mamba"]}, "off"),
    ],
)
def test_a_model_is_told_what_may_be_drafted_for_it(without_vllm, tmp_path, config, shape):
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = doctor.examine(str(tmp_path)).drafted[-1]
    assert line.name == f"this model ({config['model_type']})" and line.value.startswith(shape)


def test_a_model_without_config_is_named(without_vllm, tmp_path):
    with pytest.raises(ConfigError, match="whose config.json cannot be read"):
        doctor.examine(str(tmp_path))


def test_a_models_name_on_the_hub_will_do(without_vllm, monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")

    def downloaded(name, file):
        assert (name, file) == ("Qwen/Qwen3-0.6B", "config.json")
        (tmp_path / file).write_text('{"model_type": "qwen3"}', encoding="utf-8")
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "hf_hub_download", downloaded)
    assert doctor.examine("Qwen/Qwen3-0.6B").drafted[-1].name == "this model (qwen3)"


def test_environment_variables_that_matter_are_shown(without_vllm, monkeypatch):
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", '{"max_depth": 3}')
    shown = {finding.name: finding.value for finding in doctor.examine().variables}
    assert shown["VLLM_SPEC_ROLLOUT"] == '{"max_depth": 3}' and shown["VLLM_USE_V2_MODEL_RUNNER"] == "unset"


def test_plugins_that_vllm_may_load_have_to_name_this_one(without_vllm, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (finding,) = [one for one in doctor.examine().findings if one.name == "plugin"]
    assert finding.is_problem and finding.hint == "add it: VLLM_PLUGINS=other,spec_rollout"
    for named in ("spec_rollout", "other,spec_rollout"):
        monkeypatch.setenv("VLLM_PLUGINS", named)
        assert not [one for one in doctor.examine().findings if one.name == "plugin"]


def test_rows_that_cost_what_one_does_are_free(monkeypatch):
    times = {1: 10.0, 2: 10.1, 4: 10.9, 8: 14.0, 64: 80.0}
    monkeypatch.setitem(sys.modules, "vllm_specrollout.worker.rows", SimpleNamespace(time_rows=lambda: times))
    report = doctor.HostReport((), (), (), rows=tuple(doctor.row_costs()))
    lines = report.as_text().splitlines()
    assert lines[2].startswith("rows of a step") and len(lines) == 3 + len(times) + 1
    assert lines[6].split() == ["rows:", "8", "14.00", "ms", "1.40", "times", "one", "row"]
    assert "3 draft rows: 4 rows cost at most 1.1 times one row" in lines[-1]
