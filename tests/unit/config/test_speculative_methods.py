from collections.abc import Mapping
from dataclasses import replace

import pytest

from vllm_specrollout.config import SpecRolloutConfig, parse
from vllm_specrollout.config.drafters import DecoupledConfig
from vllm_specrollout.config.speculative_methods import METHODS, check, check_auto, check_begun, check_decoupled, moved
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError

EAGLE = {"method": "eagle", "model": "head", "num_speculative_tokens": 4}
MODEL = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}


def test_a_model_that_drafts_stands_beside_the_drafters_or_alone_also_in_the_worker() -> None:
    config = moved(SpecRolloutConfig(), EAGLE)
    assert config.speculative_config == EAGLE and parse(config.as_dict()) == config
    assert config.sources == ("history", "ngram", "model", "model_alternatives")
    alone = moved(SpecRolloutConfig(drafters=(), speculative_config=EAGLE), EAGLE)
    assert alone.sources == ("model", "model_alternatives")


@pytest.mark.parametrize(("given", "drafters"), [("ngram", ("ngram", "history")), ("suffix", ("history", "ngram"))])
def test_a_method_without_a_model_becomes_a_drafter_of_ours(given: str, drafters: tuple[str, ...]) -> None:
    config = moved(SpecRolloutConfig(drafters=("history",)), {"method": given, "num_speculative_tokens": 3})
    assert config.drafters == drafters and config.speculative_config is None


def test_how_many_tokens_are_drafted_is_taken_over_unless_spec_rollout_was_told() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert moved(SpecRolloutConfig(), ngram).max_draft_tokens == 3
    assert moved(SpecRolloutConfig(max_draft_tokens=8), ngram).max_draft_tokens == 8
    assert moved(SpecRolloutConfig(), {"method": "suffix"}).max_draft_tokens == 24


def test_two_models_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        moved(SpecRolloutConfig(speculative_config=EAGLE), {**EAGLE, "model": "another"})


def checked(name: str, given: Mapping[str, object] = EAGLE, **where: object) -> None:
    check(name, given, **{"is_v2": False, "tensor_parallel_size": 1, **where})


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_each_method_drafts_or_is_refused_with_the_ones_that_do(method) -> None:
    if method.is_supported:
        checked(method.name)
        return
    with pytest.raises(UnsupportedError, match=f"`{method.name}`.*draft_model, eagle, eagle3") as refusal:
        checked(method.name)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("use_heterogeneous_vocab", True, UnsupportedError),
        ("use_local_argmax_reduction", True, UnsupportedError),
        ("enable_adaptive_verification", True, UnsupportedError),
        ("draft_sample_method", "probabilistic", ConfigError),
        ("rejection_sample_method", "standard", ConfigError),
    ],
)
def test_what_has_no_meaning_under_exact_verification_is_refused(key: str, value: object, error: type) -> None:
    with pytest.raises(error, match=key) as refusal:
        checked("eagle", {key: value})
    assert key in refusal.value.hint


def test_where_no_model_drafts_yet_it_is_said() -> None:
    parallel = {**EAGLE, "parallel_drafting": True}
    checked("eagle3", parallel)
    for name, where in (("eagle", {}), ("eagle", {"tensor_parallel_size": 2}), ("dflash", {})):
        checked(name, is_v2=True, **where)
    checked("eagle", tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match="shared by data-parallel engines"):
        checked("mtp", {}, is_v2=True, steps_together=True)
    with pytest.raises(UnsupportedError, match="takes more than text") as refusal:
        checked("eagle", is_v2=True, is_multimodal=True)
    assert "decoupled" in refusal.value.hint
    with pytest.raises(UnsupportedError, match="`draft_model`, which the installed vLLM itself does not run"):
        checked("draft_model", {}, is_v2=True, is_lacking=True)
    for name, given in (("medusa", EAGLE), ("eagle3", parallel)):
        with pytest.raises(UnsupportedError, match="on vLLM's V1 runner only"):
            checked(name, given, is_v2=True)
    with pytest.raises(UnsupportedError, match="`draft_tensor_parallel_size` 1, and `--tensor-parallel-size` is 2"):
        checked("eagle", {**EAGLE, "draft_tensor_parallel_size": 1}, tensor_parallel_size=2)


def test_a_decoupled_model_is_a_source_of_its_own_and_none_of_vllms() -> None:
    config = SpecRolloutConfig(drafters=("ngram",), speculative_config=MODEL, placement="decoupled")
    assert config.sources == ("ngram", "decoupled", "decoupled_alternatives")
    assert config.coupled_model is None
    assert SpecRolloutConfig(speculative_config=MODEL).coupled_model == MODEL
    for given in (MODEL, {"model": "small"}, None):
        check_decoupled(given)


def test_auto_has_both_drafters_and_their_sources() -> None:
    config = SpecRolloutConfig(drafters=("ngram",), speculative_config=MODEL, placement="auto", devices=("cpu:1",))
    assert config.sources == ("ngram", "model", "model_alternatives", "decoupled", "decoupled_alternatives")
    assert config.coupled_model == MODEL and config.is_decoupled
    check_auto(config)
    check_auto(replace(config, devices=(), decoupled=DecoupledConfig(address="ipc:///tmp/drafter")))
    with pytest.raises(ConfigError, match="no model drafts"):
        check_auto(replace(config, speculative_config=None))
    with pytest.raises(ConfigError, match="names none"):
        check_auto(replace(config, devices=()))


def drafters(*given: Mapping[str, object]) -> SpecRolloutConfig:
    config = parse({"placement": "decoupled", "decoupled": {"drafters": given}})
    assert config is not None and parse(config.as_dict()) == config
    return config


def test_a_decoupled_engine_needs_no_model_of_its_own_and_may_have_several() -> None:
    assert SpecRolloutConfig(placement="decoupled").sources[-2:] == ("decoupled", "decoupled_alternatives")
    config = drafters({"model": "small", "devices": ["cpu:1"]}, {"model": "tiny", "name": "quick"})
    named = [(drafter.name, drafter.model, drafter.devices) for drafter in config.decoupled.drafters]
    assert named == [("drafter-1", "small", ("cpu:1",)), ("quick", "tiny", ())]


@pytest.mark.parametrize(("given", "word"), [(EAGLE, "hidden states"), ({}, "no `model`")])
def test_what_cannot_draft_in_a_process_of_its_own_is_refused(given: dict, word: str) -> None:
    with pytest.raises(SpecRolloutError, match=word):
        check_decoupled(given)


def begun(*devices: str, **args: float) -> SpecRolloutConfig:
    own = DecoupledConfig(engine_args=args)
    return SpecRolloutConfig(placement="decoupled", speculative_config=MODEL, devices=devices, decoupled=own)


def test_the_users_length_of_drafts_reaches_a_drafter_elsewhere_unless_its_engine_is_told_another() -> None:
    for args, most in (({}, 96), ({"max_model_len": 64}, 64)):
        (one,) = replace(begun(**args), speculative_config={**MODEL, "max_model_len": 96}).begun
        assert one.engine_args == {"max_model_len": most}
    assert begun().begun[0].engine_args == {}


def test_drafters_are_begun_on_cores_only_where_vllm_has_kernels_for_them() -> None:
    for config in (begun(), begun("cpu:1"), drafters({"model": "small"})):
        check_begun(config, has_cpu_kernels=True, gpus=None)
        with pytest.raises(UnsupportedError, match="no kernels for that") as refused:
            check_begun(config, has_cpu_kernels=False, gpus=1)
        assert "`decoupled.address`" in refused.value.hint
    elsewhere = replace(begun(), decoupled=DecoupledConfig(address="ipc:///tmp/drafter"))
    for config in (elsewhere, SpecRolloutConfig(placement="decoupled"), SpecRolloutConfig()):
        check_begun(config, has_cpu_kernels=False, gpus=1)


def test_drafters_on_gpus_have_gpus_of_their_own_unless_both_say_what_they_take() -> None:
    for config in (begun("cuda:2"), begun("cuda:2,3"), begun("cuda:1", gpu_memory_utilization=0.2)):
        check_begun(config, has_cpu_kernels=False, gpus=2)
    with pytest.raises(ConfigError, match="on `cuda:1`, which the target has"):
        check_begun(begun("cuda:1"), has_cpu_kernels=False, gpus=2)
    with pytest.raises(UnsupportedError, match="on `cuda:1`, and the installed vLLM runs on no GPU"):
        check_begun(begun("cuda:1"), has_cpu_kernels=True, gpus=None)
    both = drafters(*({"model": name, "devices": ["cuda:3"]} for name in "ab"))
    with pytest.raises(ConfigError, match="which drafter `drafter-1` has"):
        check_begun(both, has_cpu_kernels=False, gpus=2)
