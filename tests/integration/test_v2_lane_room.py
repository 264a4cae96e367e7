"""How many drafts the V2 lane leaves room for."""

from types import SimpleNamespace

import pytest

from vllm_specrollout.worker import common


def config(head_size, group, **options):
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 2 * group,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: head_size,
    )
    options = {"max_draft_tokens": 32, "max_depth": 16, **options}
    return SimpleNamespace(model_config=model, parallel_config=None, additional_config={"spec_rollout": options})


@pytest.fixture(autouse=True)
def stock(monkeypatch):
    monkeypatch.setattr(common, "speculative_config", lambda config, given: SimpleNamespace(**given))


def room(made):
    return common.with_lane(made).speculative_config.num_speculative_tokens


@pytest.mark.parametrize(("head_size", "group", "nodes"), [(64, 7, 8), (64, 4, 15), (64, 8, 7), (128, 7, 16)])
def test_batch_invariant_chains_keep_to_the_tile_of_a_plain_row(monkeypatch, head_size, group, nodes):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert room(config(head_size, group, shape="chain")) == nodes


def test_without_it_chains_are_as_deep_as_configured(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert room(config(64, 7, shape="chain")) == 16
    assert room(config(64, 7)) == 32
