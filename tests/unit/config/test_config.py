import dataclasses
import json
from pathlib import Path

import pytest

from vllm_specrollout.config import BUDGETS, NgramConfig, RequestOptions, SpecRolloutConfig, parse, parse_request
from vllm_specrollout.config.budgets import OPTIONS, BudgetOptions, TltOptions
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import ConfigError

HERE = Path(__file__).parent
REFUSED_CONFIGS = {
    "a key with a typo": {"max_draft_token": 3},
    "a key nothing resembles": {"zzz": 1},
    "a nested key with a typo": {"ngram": {"max_mach": 3}},
    "a nested object that is a number": {"ngram": 3},
    "a number as text": {"max_draft_tokens": "8"},
    "a bool where a number belongs": {"max_draft_tokens": True},
    "a fraction where a whole number belongs": {"max_depth": 1.5},
    "too many draft tokens": {"max_draft_tokens": 65},
    "no draft tokens": {"max_draft_tokens": 0},
    "too deep": {"max_depth": 100},
    "a drafter with a typo": {"drafters": ["ngrm"]},
    "a drafter nothing resembles": {"drafters": ["zzz"]},
    "a drafter twice": {"drafters": ["ngram", "ngram"]},
    "a drafter outside a list": {"drafters": "ngram"},
    "an unknown shape": {"shape": "bush"},
    "an unknown placement": {"placement": "elsewhere"},
    "a device that is no core": {"placement": "decoupled", "devices": ["gpu:0"]},
    "devices that nothing is started on": {"devices": ["cpu:1"]},
    "devices of a drafter that runs elsewhere": {
        "placement": "decoupled",
        "devices": ["cpu:1"],
        "decoupled": {"address": "tcp://10.0.0.2:7777"},
    },
    "a dotted key": {"history.dir": "x"},
    "a key of vLLM's own": {"method": "ngram"},
    "a key that resembles none": {"temperature": 1.0},
    "a window below nothing": {"decoupled": {"window": -1}},
    "no token for a position": {"decoupled": {"fan_out": 0}},
    "a decoupled drafter without a model": {"placement": "decoupled", "decoupled": {"drafters": [{"name": "a"}]}},
    "a decoupled drafter with an empty model": {"placement": "decoupled", "decoupled": {"drafters": [{"model": ""}]}},
    "a decoupled drafter that is a text": {"placement": "decoupled", "decoupled": {"drafters": ["small"]}},
    "a decoupled drafter with a typo": {"placement": "decoupled", "decoupled": {"drafters": [{"modle": "small"}]}},
    "decoupled drafters outside a list": {"placement": "decoupled", "decoupled": {"drafters": {"model": "small"}}},
    "decoupled drafters of one name": {
        "placement": "decoupled",
        "decoupled": {"drafters": [{"model": "small", "name": "a"}, {"model": "tiny", "name": "a"}]},
    },
    "a decoupled drafter on no core": {
        "placement": "decoupled",
        "decoupled": {"drafters": [{"model": "small", "devices": ["gpu:0"]}]},
    },
    "decoupled drafters of an engine that has none": {"decoupled": {"drafters": [{"model": "small"}]}},
    "an address of nothing": {"decoupled": {"address": "drafter.example:7777"}},
    "an unknown budget": {"budget": "always"},
    "a budget that is a number": {"budget": 3},
    "a budget without a name": {"budget": {"threshold": 48}},
    "an unknown budget in an object": {"budget": {"name": "tlts"}},
    "an option of another budget": {"budget": {"name": "tlt", "alpha": 2.0}},
    "an option of a budget without any": {"budget": {"name": "auto", "threshold": 48}},
    "a budget option out of range": {"budget": {"name": "tlt", "top_k": 0}},
    "a budget option as text": {"budget": {"name": "tlt", "threshold": "48"}},
    "what follows from the budget": {"budget_options": {"threshold": 48}},
    "an unknown profile": {"profile": "always"},
    "a recording into a folder": {"record": "traces/"},
    "a recording that is a number": {"record": 3},
    "a key that there was": {"block_size": 64},
    "a key that there was, in an object": {"history": {"reward_priority": True}},
    "an option that a budget had": {"budget": {"name": "das", "medium": 0.4}},
    "ngram minimum above its maximum": {"ngram": {"min_match": 9, "max_match": 8}},
    "ngram out of range": {"ngram": {"max_match": 0}},
    "no tokens of a step of prefill": {"train": {"prefill_tokens": 0}},
}
REFUSED_TEXTS = {
    "neither JSON nor a file": "no/such/file.json",
    "broken JSON": '{"max_draft_tokens": }',
    "JSON with single quotes": "{'max_draft_tokens': 8}",
    "a JSON list": "[1, 2]",
    "a JSON string": '"yes"',
}
REFUSED_REQUESTS = {
    "broken JSON over HTTP": "{enabled}",
    "a number": 3,
    "a list as JSON": "[]",
    "an unknown key": {"problem": "aime-7"},
    "problem_id as a number": {"problem_id": 7},
    "enabled as text": {"enabled": "no"},
    "too many draft tokens": {"max_draft_tokens": 65},
    "draft tokens below zero": {"max_draft_tokens": -1},
}


def test_every_refusal_reads_as_recorded(recorded, render_refusals):
    cases = {
        **{f"config: {k}": lambda v=v: parse(v, "--spec-rollout") for k, v in REFUSED_CONFIGS.items()},
        **{f"text: {k}": lambda v=v: parse(v, "--spec-rollout") for k, v in REFUSED_TEXTS.items()},
        "config: not an object": lambda: parse(3, "spec_rollout"),
        **{f"request: {k}": lambda v=v: parse_request(v) for k, v in REFUSED_REQUESTS.items()},
    }
    said = render_refusals(cases)
    assert said == recorded(HERE.parent / "refusals" / "config.txt", said)


def test_a_broken_file_is_named_with_line_and_column(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n"max_depth": }')
    with pytest.raises(ConfigError, match=r"config.json` is not valid JSON: .* line 2, column 14"):
        parse(str(path))


def test_short_words_mean_the_defaults_or_off():
    for value in (True, "1", "true", "ON", " yes ", {}, "{}", SpecRolloutConfig()):
        assert parse(value) == SpecRolloutConfig(), value
    for value in (None, False, "0", "false", "OFF", "no"):
        assert parse(value) is None, value


def test_a_mapping_its_json_and_its_file_mean_the_same(tmp_path):
    given = {"max_draft_tokens": 8, "ngram": {"max_match": 4}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    expected = SpecRolloutConfig(max_draft_tokens=8, ngram=NgramConfig(max_match=4))
    assert parse(given) == parse(json.dumps(given)) == parse(str(path)) == expected


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(AttributeError):
        SpecRolloutConfig().max_depth = 3  # type: ignore[misc]


def test_options_of_a_request_may_come_as_json_or_be_one_word():
    for value in (None, {}, "{}", True, "true"):
        assert parse_request(value) == RequestOptions()
    assert parse_request(False) == RequestOptions(enabled=False) == parse_request("false")
    options = parse_request('{"problem_id": "aime-7", "enabled": false, "max_draft_tokens": 0}')
    assert options == RequestOptions(problem_id="aime-7", enabled=False, max_draft_tokens=0)


def test_a_budget_is_a_name_or_an_object_with_options():
    plain, given = parse({"budget": "tlt"}), parse({"budget": {"name": "tlt", "threshold": 48, "noise": True}})
    assert plain.budget == given.budget == "tlt"
    assert plain.budget_options == TltOptions()
    assert given.budget_options == TltOptions(threshold=48, noise=True)
    assert SpecRolloutConfig(budget={"name": "tlt", "threshold": 48, "noise": True}) == given


@pytest.mark.parametrize(
    "budget", [*BUDGETS, {"name": "fastgrpo", "c_peak": 200}, {"name": "my.module:Budget", "rows": [1, 2]}]
)
def test_a_config_survives_the_trip_through_json(budget):
    drafters = ["ngram", {"name": "my.module:Drafter", "levels": 4}]
    config = parse({"budget": budget, "max_depth": 7, "drafters": drafters})
    assert parse(json.loads(json.dumps(config.as_dict()))) == config
    assert "budget_options" not in config.as_dict()


def test_a_budget_without_set_options_stays_a_name_in_json():
    assert parse({"budget": {"name": "tlt", "threshold": 32}}).as_dict()["budget"] == "tlt"
    assert parse({"budget": {"name": "tlt", "threshold": 48}}).as_dict()["budget"]["threshold"] == 48


def test_another_budget_in_the_place_of_one_has_its_own_options():
    tlt = parse({"budget": {"name": "tlt", "threshold": 48}})
    assert dataclasses.replace(tlt, max_depth=7).budget_options == TltOptions(threshold=48)
    assert dataclasses.replace(tlt, budget="das").budget_options == BudgetOptions()


def test_two_budgets_bring_their_papers_drafters_and_the_others_leave_them_alone():
    histospec = HistoryConfig(min_match=3, max_match=7, epochs=1, reward_weight=255.0, siblings=False)
    das = HistoryConfig(epochs=2, siblings=False, decay=1.0, reward_weight=0.0)
    brought = {
        "histospec": {"history": histospec, "drafters": ("history",), "max_draft_tokens": 32, "max_depth": 32},
        "das": {"history": das, "drafters": ("history",)},
    }
    for name in BUDGETS:
        assert parse({"budget": name}) == SpecRolloutConfig(budget=name, **brought.get(name, {}))


def test_what_the_user_set_outranks_what_a_budget_brings():
    given = {"budget": "histospec", "drafters": ["ngram", "history"], "max_depth": 8, "history": {"siblings": True}}
    config = parse(given)
    assert config.drafters == ("ngram", "history") and config.max_depth == 8
    assert config.history.siblings and config.history.min_match == 3
    assert given["history"] == {"siblings": True}


@pytest.mark.parametrize("name", BUDGETS)
def test_the_default_of_every_option_is_one_that_may_be_set(name):
    defaults = dataclasses.asdict(OPTIONS[name]())
    assert parse({"budget": {"name": name, **defaults}}).budget_options == OPTIONS[name]()
    assert bool(defaults) == (OPTIONS[name] is not BudgetOptions)
