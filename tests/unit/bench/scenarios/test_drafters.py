"""What the comparison of drafters asks of engines, and what it makes of their sums."""

from pathlib import Path

import pytest
from vllm_specrollout.bench.policy import CHECKPOINT

from bench.runner.models import shipped_drafters
from bench.scenarios.drafters import COMB, GREEDY, UNION, Drafters, _met
from vllm_specrollout.config import parse
from vllm_specrollout.errors import ConfigError

HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}


def test_the_model_drafts_alone_but_in_the_union():
    plan = Drafters(drafters={"head": HEAD})
    assert parse(plan.spec_rollout(HEAD, COMB)).sources == ("model", "model_alternatives")
    assert parse(plan.spec_rollout(HEAD, UNION)).sources == ("ngram", "model", "model_alternatives")
    assert plan.spec_rollout(HEAD, GREEDY)["speculative_config"] == HEAD


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"head": "HEAD"}, "`--drafters` has 'head': 'HEAD'\n\nhint: give it a `speculative_config`"),
        ({"head": {"method": "eagle3"}}, "`--drafters` has 'head': {'method': 'eagle3'}"),
    ],
)
def test_what_names_no_model_is_refused(given, told):
    with pytest.raises(ConfigError) as error:
        Drafters(drafters=given)
    assert told in str(error.value)


def test_another_model_has_no_drafters_of_its_own():
    with pytest.raises(ConfigError, match="names no model that drafts for `other`\n\nhint: give one, as in"):
        Drafters(model=Path("other"))


def test_sums_become_shares_of_the_positions():
    sums = {
        "positions": 200,
        "first": {"greedy": 100, "shared": 120, "learned": 130},
        "best_two": {"greedy": 150, "shared": 160, "learned": 170},
        "overlap": 140.0,
        "sharpness": 2.0,
        "draft_ms": 50.0,
    }
    met = _met("head", 1.0, sums)
    assert (met.greedy, met.shared, met.learned) == (0.5, 0.6, 0.65)
    assert (met.greedy_two, met.shared_two, met.learned_two) == (0.75, 0.8, 0.85)
    assert (met.overlap, met.draft_ms, met.sharpness) == (0.7, 0.25, 2.0)


def test_the_policys_head_is_asked_for_as_many_levels_as_are_named(tmp_path):
    (one, other) = shipped_drafters(CHECKPOINT, None, tmp_path, (4, 10)).items()
    assert (one[0], one[1]["num_speculative_tokens"]) == ("head, 4 levels", 4)
    assert (other[0], other[1]["num_speculative_tokens"]) == ("head, 10 levels", 10)
    assert set(shipped_drafters(CHECKPOINT, None, tmp_path)) == {"head", "draft"}
