"""What may be drafted, and the reason where it is less than trees."""

import pytest

from vllm_specrollout.scheduling.support import TABLE, RequestTraits, model_shape, request_shape
from vllm_specrollout.types import DraftMode


@pytest.mark.parametrize(
    ("traits", "shape"),
    [
        (RequestTraits(), DraftMode.TREE),
        (RequestTraits(has_grammar=True), DraftMode.CHAIN),
        (RequestTraits(is_enabled=False), DraftMode.OFF),
        (RequestTraits(has_thinking_budget=True, has_grammar=True), DraftMode.OFF),
        (RequestTraits(has_prompt_embeds=True), DraftMode.OFF),
        (RequestTraits(is_watermarked=True), DraftMode.OFF),
        (RequestTraits(is_trace_replay=True), DraftMode.OFF),
        (RequestTraits(ends_amid_drafts=True, has_grammar=True), DraftMode.OFF),
    ],
)
def test_a_request_gets_what_can_be_done_exactly_and_a_reason(traits: RequestTraits, shape: DraftMode) -> None:
    found, reason = request_shape(traits)
    assert found is shape
    assert bool(reason) == (shape is not DraftMode.TREE)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 4}, DraftMode.TREE),
        ({"model_type": "mistral", "sliding_window": 64}, DraftMode.TREE),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}, DraftMode.CHAIN),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, DraftMode.OFF),
        ({"model_type": "mamba2", "state_size": 128}, DraftMode.OFF),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, DraftMode.OFF),
        ({"model_type": "whisper", "is_encoder_decoder": True}, DraftMode.OFF),
        ({"model_type": "llava", "vision_config": {"depth": 2}, "text_config": {}}, DraftMode.TREE),
        ({"vision_config": {"depth": 2}, "text_config": {"layer_types": ["linear_attention"]}}, DraftMode.OFF),
    ],
)
def test_a_model_is_judged_from_its_config(config: dict[str, object], shape: DraftMode) -> None:
    assert model_shape(config)[0] is shape


def test_every_rule_says_why() -> None:
    assert all(rule.reason for rule in TABLE)
    assert {rule.shape for rule in TABLE} == set(DraftMode)
