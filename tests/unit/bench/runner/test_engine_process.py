"""What an engine process finds in its environment."""

from bench.runner.engine_process import EngineSpec, child_environment

STOCK = EngineSpec(name="stock", arguments={}, kv_gib=2)
OURS = EngineSpec(name="ours", arguments={}, kv_gib=2, has_plugin=True, spec_rollout={})


def test_stock_never_loads_our_plugin():
    assert "spec_rollout" not in child_environment({}, STOCK)["VLLM_PLUGINS"].split(",")
    given = {"VLLM_PLUGINS": "other,spec_rollout"}
    assert child_environment(given, STOCK)["VLLM_PLUGINS"] == "other"
    assert child_environment({"VLLM_PLUGINS": "spec_rollout"}, STOCK)["VLLM_PLUGINS"] == "none"


def test_ours_keeps_the_callers_plugins():
    assert child_environment({"VLLM_PLUGINS": "spec_rollout"}, OURS)["VLLM_PLUGINS"] == "spec_rollout"
    assert "VLLM_PLUGINS" not in child_environment({}, OURS)


def test_both_get_the_same_cache_and_row_invariant_attention():
    for spec in (STOCK, OURS):
        changed = child_environment({"VLLM_CPU_ATTN_SPLIT_KV": "1", "KEPT": "yes"}, spec)
        assert changed["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
        assert changed["VLLM_CPU_KVCACHE_SPACE"] == "2"
        assert changed["VLLM_LOGGING_LEVEL"] == "ERROR"
        assert changed["KEPT"] == "yes"


def test_drafts_switched_on_by_the_environment_reach_no_engine():
    for spec in (STOCK, OURS):
        assert "VLLM_SPEC_ROLLOUT" not in child_environment({"VLLM_SPEC_ROLLOUT": "1"}, spec)


def test_an_engines_own_variables_stand_above_all_others():
    spec = EngineSpec(name="stock", arguments={}, environment={"VLLM_LOGGING_LEVEL": "INFO"})
    assert child_environment({"VLLM_LOGGING_LEVEL": "DEBUG"}, spec)["VLLM_LOGGING_LEVEL"] == "INFO"
