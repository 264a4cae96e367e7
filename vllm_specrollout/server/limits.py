"""Limits: what does not go together with speculation. Each is one line of a table: what, why, the way out.

Nothing here imports vLLM: the rules look at attributes, so they are tested without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specrollout.config import DRAFTERS, SpecRolloutConfig
from vllm_specrollout.config.keys import check_keys
from vllm_specrollout.config.places import check_places
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.patches.features import TABLE, Features
from vllm_specrollout.server.engines import Engine

LEAVE_OUT = "or leave spec rollout off"


@dataclass(frozen=True, slots=True)
class Limit:
    """One unsupported combination."""

    applies: Callable[[Any], bool]
    cause: str
    """May refer to the object looked at as `{0}`."""
    hint: str

    def check(self, subject: Any) -> None:
        """Raise if the combination is there."""
        if self.applies(subject):
            raise UnsupportedError(self.cause.format(subject), self.hint)


def _returns_experts(args: Any) -> bool:
    given = getattr(args, "aux_output_config", None)
    return bool(args.enable_return_routed_experts or getattr(given, "enable_return_routed_experts", False))


def _returns_masks(args: Any) -> bool:
    return bool(args.return_sampling_mask)


ENGINE_ARGS_LIMITS = (
    Limit(
        lambda args: args.pipeline_parallel_size > 1,
        "`--pipeline-parallel-size` is {0.pipeline_parallel_size}; spec rollout supports 1",
        f"use `--tensor-parallel-size` instead, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: args.prefill_context_parallel_size > 1,
        "`--prefill-context-parallel-size` is {0.prefill_context_parallel_size}; spec rollout supports 1",
        f"set it to 1, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: args.decode_context_parallel_size > 1,
        "`--decode-context-parallel-size` is {0.decode_context_parallel_size}; spec rollout supports 1",
        f"set it to 1, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: args.enable_dbo or args.ubatch_size > 1,
        "dual-batch overlap (`--enable-dbo`, `--ubatch-size`) splits a batch; spec rollout verifies it in one piece",
        f"drop both flags, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: bool(args.kv_offloading_size),
        "`--kv-offloading-size` is {0.kv_offloading_size}; it stores blocks while drafts in them are not verified yet",
        f"drop `--kv-offloading-size`, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: bool(args.kv_sharing_fast_prefill),
        "`--kv-sharing-fast-prefill` skips rows whose logits spec rollout needs",
        f"drop `--kv-sharing-fast-prefill`, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: bool(args.use_fp64_gumbel),
        "`--use-fp64-gumbel` draws noise that spec rollout cannot replay",
        f"drop `--use-fp64-gumbel`, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: getattr(args, "watermark_config", None) is not None,
        "`--watermark-config` replaces sampling, which spec rollout must repeat exactly",
        f"drop `--watermark-config`, {LEAVE_OUT}",
    ),
    Limit(
        lambda args: args.diffusion_config is not None,
        "`--diffusion-config` is for diffusion language models, which do not decode token by token",
        f"drop `--diffusion-config`, {LEAVE_OUT}",
    ),
)

# of the V1 runner alone, which is for CPUs
V1_LIMITS = (
    Limit(
        _returns_experts,
        "`--enable-return-routed-experts` is set; spec rollout returns experts on vLLM's V2 model runner only",
        "drop the flag, or run on a GPU",
    ),
    Limit(
        _returns_masks,
        "`--return-sampling-mask` is set; vLLM returns masks on its V2 model runner only",
        "drop the flag, or run on a GPU",
    ),
    # branches are laid out in blocks, and no attention of vLLM's on CPU has others
    Limit(
        lambda args: args.block_size is not None and args.block_size % 32 != 0,
        "`--block-size` is {0.block_size}, not a multiple of 32, which branches need",
        "use `--block-size 32` (the default with spec rollout), 64 or 128",
    ),
)

# of the V2 runner alone
V2_LIMITS = (
    Limit(
        lambda args: bool(getattr(args, "enable_batch_sharded_sampling", False)),
        "`--enable-batch-sharded-sampling` splits the rows of a draft between ranks",
        f"drop the flag, {LEAVE_OUT}",
    ),
)


VLLM_CONFIG_LIMITS = (
    Limit(
        lambda config: config.model_config.runner_type != "generate",
        "the runner is `{0.model_config.runner_type}`; spec rollout speeds up generation only",
        "drop `--runner`, or leave spec rollout off for pooling and embedding models",
    ),
    Limit(
        lambda config: config.model_config.is_diffusion,
        "the model is a diffusion language model, which does not decode token by token",
        "leave spec rollout off for this model",
    ),
    Limit(
        lambda config: config.speculative_config is not None,
        "the model's own configuration switches on vLLM's speculative decoding (a speculators checkpoint)",
        f"serve the target model itself, {LEAVE_OUT}",
    ),
)


def check_engine_args(args: Any, config: SpecRolloutConfig, engine: Engine) -> None:
    """Refuse what can be refused before the model's configuration is read.

    Raises:
        ConfigError, UnsupportedError: the first combination that does not go.
    """
    for limit in (*ENGINE_ARGS_LIMITS, *(V2_LIMITS if engine.uses_v2 else V1_LIMITS)):
        limit.check(args)
    check_connector(args.kv_transfer_config)
    _check_class("--worker-cls", args.worker_cls, ("auto", engine.worker), " (`--worker-extension-cls` stays free)")
    _check_class("--scheduler-cls", args.scheduler_cls, (None, engine.scheduler, engine.async_scheduler or None))
    if not config.sources:
        raise ConfigError("`drafters` is empty", f"name at least one of: {', '.join(DRAFTERS)}")
    # these import numpy, which nobody needs who imports us
    from vllm_specrollout.budgets.registry import make_budget
    from vllm_specrollout.drafters import check_named

    check_named(config)
    make_budget(config)
    check_places(config)
    check_keys(config)


# what comes with the tokens, and the field of `Features` that says whether it comes out right with drafts
_BESIDE_TOKENS = (
    (_returns_experts, "--enable-return-routed-experts", "returns_experts"),
    (_returns_masks, "--return-sampling-mask", "returns_masks"),
)


def check_version(args: Any, known: Features, version: str) -> None:
    """Refuse what comes out wrong on this version of vLLM, once drafts are accepted.

    Raises:
        UnsupportedError: the first option that does.
    """
    for is_asked, flag, field in _BESIDE_TOKENS:
        if is_asked(args) and not getattr(known, field):
            able = ", ".join(name for name, row in TABLE.items() if getattr(row, field))
            raise UnsupportedError(
                f"`{flag}` is set, and vLLM {version} is installed: with drafts it is right on {able} only",
                f"take one of these versions, drop the flag, {LEAVE_OUT}",
            )


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse what only the finished configuration shows.

    Raises:
        UnsupportedError: the first combination that does not go.
    """
    for limit in VLLM_CONFIG_LIMITS:
        limit.check(vllm_config)
    check_connector(vllm_config.kv_transfer_config)


CONNECTORS = ("ExampleConnector",)
"""Those of vLLM's that read and write slots of confirmed tokens only, and were run with drafts."""
_STORES_DRAFTS = {"OffloadingConnector"}


def check_connector(given: Any) -> None:
    """Refuse connectors that may move keys and values of drafts.

    Args:
        given: vLLM's `KVTransferConfig`, or a mapping like it; None: no connector.

    Raises:
        UnsupportedError: it is none of `CONNECTORS`.
    """
    get = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
    name = get("kv_connector")
    if given is None or name is None:
        return
    if module := get("kv_connector_module_path"):
        name = f"{module}.{name}"
    if name in CONNECTORS:
        return
    why = "stores blocks while drafts in them are not verified yet" if name in _STORES_DRAFTS else "is not among them"
    raise UnsupportedError(
        f"the KV connector is `{name}`; spec rollout runs with connectors that touch confirmed tokens only"
        f" ({', '.join(CONNECTORS)}), and this one {why}",
        f"drop the connector, {LEAVE_OUT}",
    )


def _check_class(flag: str, value: Any, allowed: tuple[Any, ...], more: str = "") -> None:
    if value not in allowed:
        shown = value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)
        raise UnsupportedError(
            f"`{flag}` is `{shown}`, but spec rollout brings its own",
            f"drop `{flag}`{more}, {LEAVE_OUT}",
        )
