from typing import Any

import pytest

from tests.drafters import Says
from vllm_specrollout import drafters
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.config import SpecRolloutConfig, parse
from vllm_specrollout.drafters.base import Place
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.history.vocabulary import Vocabulary

HERE = __name__


class Own(Says):
    def __init__(self, place: Place, *, token: int = 1) -> None:
        super().__init__("whatever it calls itself", [token], source=place.source)
        self.place = place


class Double(Own):
    num_sources = 2


class Narrow(FixedBudget):
    def __init__(self, max_nodes: int, max_depth: int, *, most: int) -> None:
        super().__init__(min(max_nodes, most), max_depth)


def config_of(**given: Any) -> SpecRolloutConfig:
    config = parse(given)
    assert config is not None
    return config


def test_it_knows_its_place_and_is_called_as_the_configuration_does():
    config = config_of(drafters=["ngram", {"name": f"{HERE}:Own", "token": 9}], max_draft_tokens=5)
    _, own = drafters.build(config, Vocabulary("model", 512))
    assert isinstance(own, Own) and own.place == Place(source=1, max_draft_tokens=5, vocab_size=512)
    assert own.name == f"{HERE}:Own" == config.sources[1]
    assert own.tree.token_ids.tolist() == [9]


def test_a_budget_is_made_with_the_engines_limits_and_its_options():
    budget = make_budget(config_of(budget={"name": f"{HERE}:Narrow", "most": 3}, max_draft_tokens=8))
    assert isinstance(budget, Narrow) and budget.max_nodes == 3


def test_checking_imports_a_class_and_makes_none(monkeypatch):
    monkeypatch.setattr(Own, "__init__", lambda self, place, *, token=1: pytest.fail("made"))
    drafters.check_named(config_of(drafters=[{"name": f"{HERE}:Own", "token": 2}]))
    with pytest.raises(ConfigError, match="`tokens` that it does not take(?s:.*)did you mean `token`"):
        drafters.check_named(config_of(drafters=[{"name": f"{HERE}:Own", "tokens": 2}]))


def test_what_tells_kinds_of_nodes_apart_has_no_place_in_the_list():
    with pytest.raises(ConfigError, match="tells 2 kinds of nodes apart"):
        drafters.build(config_of(drafters=[f"{HERE}:Double"]))
