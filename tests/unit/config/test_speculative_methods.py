from dataclasses import replace

import pytest

from vllm_specrollout.config import SpecRolloutConfig, parse
from vllm_specrollout.config.drafters import DecoupledConfig
from vllm_specrollout.config.speculative_methods import METHODS, check, check_auto, check_begun, check_decoupled, moved
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError

EAGLE = {"method": "eagle", "model": "head", "num_speculative_tokens": 4}


def test_a_model_that_drafts_stands_beside_the_drafters() -> None:
    config = moved(SpecRolloutConfig(), EAGLE)
    assert config.speculative_config == EAGLE
    assert config.sources == ("history", "ngram", "model", "model_alternatives")


def test_a_model_may_draft_alone() -> None:
    assert moved(SpecRolloutConfig(drafters=(), speculative_config=EAGLE), EAGLE).sources == (
        "model",
        "model_alternatives",
    )


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


def test_the_configuration_survives_its_way_to_the_worker() -> None:
    from vllm_specrollout.config import parse

    config = moved(SpecRolloutConfig(), EAGLE)
    assert parse(config.as_dict()) == config


def checked(name: str, **given: object) -> None:
    check(name, given, **on())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_each_method_drafts_or_is_refused_with_the_ones_that_do(method) -> None:
    if method.is_supported:
        checked(method.name)
        return
    with pytest.raises(UnsupportedError, match=f"`{method.name}`.*draft_model, eagle, eagle3") as refusal:
        checked(method.name)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"use_heterogeneous_vocab": True}, UnsupportedError),
        ({"use_local_argmax_reduction": True}, UnsupportedError),
        ({"enable_adaptive_verification": True}, UnsupportedError),
        ({"draft_sample_method": "probabilistic"}, ConfigError),
        ({"rejection_sample_method": "standard"}, ConfigError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_what_has_no_meaning_under_exact_verification_is_refused(
    given: dict[str, object], error: type[SpecRolloutError]
) -> None:
    with pytest.raises(error, match=next(iter(given))) as refusal:
        checked("eagle", **given)
    assert next(iter(given)) in refusal.value.hint


def on(**where: object) -> dict[str, object]:
    return {"is_v2": False, "tensor_parallel_size": 1, **where}


def test_where_no_model_drafts_yet_it_is_said() -> None:
    check("eagle", EAGLE, **on(is_v2=True))
    for is_v2 in (False, True):
        check("eagle", EAGLE, **on(is_v2=is_v2, tensor_parallel_size=2))
    check("eagle3", {**EAGLE, "parallel_drafting": True}, **on())
    with pytest.raises(UnsupportedError, match="shared by data-parallel engines"):
        check("mtp", {}, **on(is_v2=True, steps_together=True))
    with pytest.raises(UnsupportedError, match="takes more than text") as refusal:
        check("eagle", EAGLE, **on(is_v2=True, is_multimodal=True))
    assert "decoupled" in refusal.value.hint
    with pytest.raises(UnsupportedError, match="`draft_model`, which the installed vLLM itself does not run"):
        check("draft_model", {}, **on(is_v2=True, is_lacking=True))
    check("dflash", EAGLE, **on(is_v2=True))
    for name, given in (("medusa", EAGLE), ("eagle3", {**EAGLE, "parallel_drafting": True})):
        with pytest.raises(UnsupportedError, match="on vLLM's V1 runner only"):
            check(name, given, **on(is_v2=True))
    with pytest.raises(UnsupportedError, match="`draft_tensor_parallel_size` 1, and `--tensor-parallel-size` is 2"):
        check("eagle", {**EAGLE, "draft_tensor_parallel_size": 1}, **on(tensor_parallel_size=2))


def test_a_decoupled_model_is_a_source_of_its_own_and_none_of_vllms() -> None:
    model = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    config = SpecRolloutConfig(drafters=("ngram",), speculative_config=model, placement="decoupled")
    assert config.sources == ("ngram", "decoupled", "decoupled_alternatives")
    assert config.coupled_model is None
    assert SpecRolloutConfig(speculative_config=model).coupled_model == model
    check_decoupled(model)
    check_decoupled({"model": "small"})


def test_auto_has_both_drafters_and_their_sources() -> None:
    model = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    config = SpecRolloutConfig(drafters=("ngram",), speculative_config=model, placement="auto", devices=("cpu:1",))
    assert config.sources == ("ngram", "model", "model_alternatives", "decoupled", "decoupled_alternatives")
    assert config.coupled_model == model and config.is_decoupled
    check_auto(config)
    check_auto(replace(config, devices=(), decoupled=DecoupledConfig(address="ipc:///tmp/drafter")))


def test_auto_without_anything_to_choose_between_is_refused() -> None:
    model = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="no model drafts"):
        check_auto(SpecRolloutConfig(placement="auto", devices=("cpu:1",)))
    with pytest.raises(ConfigError, match="names none"):
        check_auto(SpecRolloutConfig(placement="auto", speculative_config=model))


def test_a_decoupled_engine_needs_no_model_of_its_own_and_may_have_several() -> None:
    check_decoupled(None)
    assert SpecRolloutConfig(placement="decoupled").sources[-2:] == ("decoupled", "decoupled_alternatives")
    given = {
        "placement": "decoupled",
        "decoupled": {"drafters": [{"model": "small", "devices": ["cpu:1"]}, {"model": "tiny", "name": "quick"}]},
    }
    config = parse(given)
    assert config is not None and parse(config.as_dict()) == config
    named = [(drafter.name, drafter.model, drafter.devices) for drafter in config.decoupled.drafters]
    assert named == [("drafter-1", "small", ("cpu:1",)), ("quick", "tiny", ())]


@pytest.mark.parametrize(("given", "word"), [(EAGLE, "hidden states"), ({}, "no `model`")])
def test_what_cannot_draft_in_a_process_of_its_own_is_refused(given: dict, word: str) -> None:
    with pytest.raises(SpecRolloutError, match=word):
        check_decoupled(given)


MODEL = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}


def begun(*devices: str, **args: float) -> SpecRolloutConfig:
    own = DecoupledConfig(engine_args=args)
    return SpecRolloutConfig(placement="decoupled", speculative_config=MODEL, devices=devices, decoupled=own)


def test_the_users_length_of_drafts_reaches_a_drafter_elsewhere_unless_its_engine_is_told_another() -> None:
    for args, most in (({}, 96), ({"max_model_len": 64}, 64)):
        (one,) = replace(begun(**args), speculative_config={**MODEL, "max_model_len": 96}).begun
        assert one.engine_args == {"max_model_len": most}
    assert begun().begun[0].engine_args == {}


def test_drafters_are_begun_on_cores_only_where_vllm_has_kernels_for_them() -> None:
    started = parse({"placement": "decoupled", "decoupled": {"drafters": [{"model": "small"}]}})
    assert started is not None
    for config in (begun(), begun("cpu:1"), started):
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
    given = {
        "placement": "decoupled",
        "decoupled": {"drafters": [{"model": name, "devices": ["cuda:3"]} for name in "ab"]},
    }
    both = parse(given)
    assert both is not None
    with pytest.raises(ConfigError, match="which drafter `drafter-1` has"):
        check_begun(both, has_cpu_kernels=False, gpus=2)
