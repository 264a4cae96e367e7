from types import SimpleNamespace

import pytest

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server.wrappers import check_options


def validate(extra_args, is_on=True, prompt=None, **params):
    from vllm import SamplingParams

    request = SimpleNamespace(
        sampling_params=SamplingParams(extra_args=extra_args, **params),
        prompt_token_ids=[4, 5, 6],
        prompt_embeds=None,
        resumable=False,
    )
    wrapped = check_options(lambda self, request_id, prompt: request)
    entry = {"spec_rollout": SpecRolloutConfig().as_dict()} if is_on else {}
    processor = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=entry, use_v2_model_runner=False))
    return wrapped(processor, "name", prompt) is wrapped(processor, "name", prompt=prompt) is request


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {"other": 1},
        {"spec_rollout": None},
        {"spec_rollout": '{"problem_id": "aime-7"}'},
        {"spec_rollout": {"enabled": False, "max_draft_tokens": 0}},
        {"spec_rollout": {"resume": {"prompt_tokens": 2, "answer_tokens": 1}}},
    ],
    ids=str,
)
def test_a_request_without_options_or_with_good_ones_goes_to_the_engine(extra_args):
    assert validate(extra_args, seed=1)


@pytest.mark.parametrize(
    ("prompt", "is_whole"),
    [
        ({"prompt_token_ids": [4, 5, 6]}, True),
        ({"prompt_token_ids": (4, 5, 6)}, True),
        # vLLM cut it, and filled it up
        ({"prompt_token_ids": [3, 4, 5, 6]}, False),
        ({"prompt_token_ids": [7, 4, 5]}, False),
        # the front end was here before
        ({"prompt_token_ids": [4, 5, 6], "type": "token"}, False),
        ({"prompt": "text"}, False),
        ("text", False),
    ],
)
def test_without_its_answers_length_only_token_ids_that_came_as_they_were_given_are_resumed(prompt, is_whole):
    options = {"spec_rollout": {"resume": {"prompt_tokens": 2}}}
    if is_whole:
        assert validate(options, prompt=prompt, seed=1)
    else:
        with pytest.raises(ConfigError, match="`resume.answer_tokens` is not given"):
            validate(options, prompt=prompt, seed=1)


def test_where_spec_rollout_is_off_no_answer_is_resumed_in_silence():
    with pytest.raises(ConfigError, match="spec rollout is off"):
        validate({"spec_rollout": {"resume": {"prompt_tokens": 2}}}, is_on=False, seed=1)


@pytest.mark.parametrize("options", [{"problem": "x"}, {"max_draft_tokens": 1000}, {"resume": {"prompt_tokens": 2}}])
def test_a_mistake_in_a_request_is_answered_with_400_before_it_reaches_the_engine(options):
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    with pytest.raises(ConfigError) as raised:
        validate({"spec_rollout": options})
    assert isinstance(raised.value, ValueError)
    answer = create_error_response(raised.value)
    assert answer.error.code == 400 and "hint:" in answer.error.message


def test_switched_off_options_are_accepted_and_ignored():
    assert validate({"spec_rollout": {"problem": "x"}}, is_on=False)


@pytest.fixture
def prometheus():
    """Sums in a registry without vLLM's metrics, before and after."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    def total(name):
        return sum(sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name)

    unregister_vllm_metrics()
    yield total
    unregister_vllm_metrics()


def test_switched_on_vllms_own_counters_count_our_drafts(make, prometheus):
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    logger = PrometheusStatLogger(make(spec_rollout={"max_draft_tokens": 8}).create_engine_config())
    stats = SpecDecodingStats.new(8)
    stats.observe_draft(num_draft_tokens=8, num_accepted_tokens=3)
    logger.record(SchedulerStats(spec_decoding_stats=stats), None)
    counts = {"drafts": 1, "draft_tokens": 8, "accepted_tokens": 3, "accepted_tokens_per_pos": 3}
    assert {name: prometheus(f"vllm:spec_decode_num_{name}_total") for name in counts} == counts


def test_switched_off_there_are_no_such_counters(make, prometheus):
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    logger = PrometheusStatLogger(make().create_engine_config())
    assert not logger.spec_decoding_prom.spec_decoding_enabled


@pytest.mark.parametrize("key", ["spec-rollout", "specrollout", "SpecRollout", "SPEC_ROLLOUT"])
def test_a_key_that_is_ours_but_for_its_spelling_is_an_error_where_drafts_are_on(key):
    with pytest.raises(ConfigError, match=f"unknown key `{key}`") as error:
        validate({key: {"enabled": False}})
    assert error.value.hint == "did you mean `spec_rollout`?"
    assert validate({key: {"enabled": False}}, is_on=False)
