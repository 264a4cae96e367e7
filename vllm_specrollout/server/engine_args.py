"""`EngineArgs` learns `spec_rollout`: as a keyword, as a flag, and when the engine's configuration is made."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_specrollout.config import SpecRolloutConfig, envs, speculative_methods
from vllm_specrollout.errors import ConfigError, UnsupportedError, logger, shown
from vllm_specrollout.patches import features, supported
from vllm_specrollout.server import engines, limits, settings
from vllm_specrollout.server.settings import FLAG, add_flag, readable_errors

_set_here: set[str] = set()
"""Variables that a configuration of ours has set: one of stock's after it finds them unset again."""
_CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""vLLM's own capture sizes, up to its bound on Hopper: beyond, arithmetic hides launches."""


def accept_keyword(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `EngineArgs.__init__`: one more keyword."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, spec_rollout: Any = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if spec_rollout is not None:
            settings.fold(self, spec_rollout, "spec_rollout")

    return __init__


def accept_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineArgs.add_cli_args`: one more flag."""

    @functools.wraps(original)
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        return add_flag(original(parser, *args, **kwargs))

    return add_cli_args


def read_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineArgs.from_cli_args`: hand the flag's value on."""

    @functools.wraps(original)
    def from_cli_args(cls: type, args: Any) -> Any:
        engine_args = original(cls, args)
        value = getattr(args, "spec_rollout", None)
        if value is not None:
            with readable_errors():
                settings.fold(engine_args, value, FLAG)
            # further API processes are handed the parsed flags, and read them before plugins are loaded there
            args.additional_config = engine_args.additional_config
        return engine_args

    return from_cli_args


def create(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineArgs.create_engine_config`: check the combination and name our worker and scheduler."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        def make() -> Any:
            return original(self, *args, **kwargs)

        with readable_errors():
            config, is_wish = settings.requested(self)
            _make_variable_known()
            if config is not None:
                _require_core()
                engine = _choose_engine()
                try:
                    return _configured(self, config, engine, make)
                except UnsupportedError as error:
                    # the variable reaches all engines of a run, those of judges and reward models too
                    if not is_wish:
                        raise
                    logger.warning(
                        "Spec rollout is off in this engine, which runs as stock vLLM: %s. Only `%s` asked for it;"
                        " `%s` makes this an error",
                        error.cause,
                        envs.SPEC_ROLLOUT,
                        FLAG,
                    )
        with _off(self):
            return make()

    return create_engine_config


def _configured(engine_args: Any, config: SpecRolloutConfig, engine: engines.Engine, make: Callable[[], Any]) -> Any:
    """vLLM's configuration of an engine of ours.

    Raises:
        UnsupportedError: spec rollout does not run on such an engine.
    """
    if (given := _speculative_config(engine_args)) is not None:
        config = speculative_methods.moved(config, given)
    if config.train.mode == "auto":
        from vllm_specrollout.server.learning import prepared

        config = prepared(config, engine_args.model)
    limits.check_engine_args(engine_args, config, engine)
    limits.check_version(engine_args, features.installed(), str(supported.installed_vllm()))
    with _on(engine_args, config, engine):
        vllm_config = make()
    limits.check_vllm_config(vllm_config)
    engines.check_runner(engine, bool(vllm_config.use_v2_model_runner))
    if config.is_decoupled:
        _check_decoupled(config, engine, vllm_config)
    if config.placement == "auto":
        speculative_methods.check_auto(config)
    if config.coupled_model is not None:
        _check_model(vllm_config, config.coupled_model, engine)
    if engine.uses_v2 and not _names_capture_sizes(engine_args):
        _capture_drafts(vllm_config, config)
    _share_compiled_models(vllm_config)
    scheduler_config = vllm_config.scheduler_config
    scheduler_config.scheduler_cls = engine.scheduler_for(bool(scheduler_config.async_scheduling))
    return vllm_config


_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def _speculative_config(engine_args: Any) -> dict[str, Any] | None:
    """What the user says of a model that drafts, in vLLM's flags; None: nothing."""
    given = {key.replace("-", "_"): value for key, value in (engine_args.speculative_config or {}).items()}
    for name, key in _SPECULATIVE.items():
        value = getattr(engine_args, name)
        if value is not None and given.setdefault(key, value) != value:
            raise ConfigError(
                f"`--{name.replace('_', '-')}` is {shown(value)}, and `{key}` in `--speculative-config` is"
                f" {shown(given[key])}",
                "give one of the two",
            )
    return given or None


def _check_decoupled(config: SpecRolloutConfig, engine: engines.Engine, vllm_config: Any) -> None:
    on_cpu = engine in (engines.CPU_V1, engines.CPU_V2)
    speculative_methods.check_decoupled(config.speculative_config)
    # beside kernels for AVX-512, every wheel for CPU on x86 has these; elsewhere the name is that of CUDA's own
    has_cpu_kernels = on_cpu or importlib.util.find_spec("vllm._C_AVX2") is not None
    gpus = None if on_cpu else int(vllm_config.parallel_config.world_size)
    speculative_methods.check_begun(config, has_cpu_kernels=has_cpu_kernels, gpus=gpus)


def _check_model(vllm_config: Any, given: Mapping[str, Any], engine: engines.Engine) -> None:
    from vllm.config import SpeculativeConfig

    parallel = vllm_config.parallel_config
    resolved = SpeculativeConfig(**given, target_model_config=vllm_config.model_config, target_parallel_config=parallel)
    speculative_methods.check(
        str(resolved.method),
        given,
        is_v2=engine.uses_v2,
        steps_together=parallel.data_parallel_size > 1 and bool(vllm_config.model_config.is_moe),
        tensor_parallel_size=parallel.tensor_parallel_size,
        is_multimodal=vllm_config.model_config.is_multimodal_model,
        is_lacking=engine.uses_v2 and resolved.method == "draft_model" and not features.installed().has_v2_models,
    )


def _names_capture_sizes(engine_args: Any) -> bool:
    """Whether the user said which sizes to capture as CUDA graphs, or up to which."""
    return any(
        getattr(given, name) is not None
        for given in (engine_args, engine_args.compilation_config)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )


def capture_sizes(stock: Sequence[int], max_num_reqs: int, max_draft_tokens: int, max_tokens: int) -> list[int]:
    """vLLM's capture sizes, continued until they hold steps with drafts.

    vLLM stops at twice the requests it runs at once: its configuration learns of drafts in the worker alone.

    Args:
        stock: what vLLM would capture, ascending; empty: nothing, and so it stays.
        max_draft_tokens: most nodes of a request.
        max_tokens: most rows of any step.

    Returns:
        Sizes in ascending order. All of stock's are among them and none between them, so steps that stock would capture
        are captured as ever.
    """
    rows = min(max_num_reqs * (1 + max_draft_tokens), _CAPTURED[-1], max_tokens)
    if not stock or stock[-1] >= rows:
        return list(stock)
    more = _CAPTURED[: bisect_left(_CAPTURED, rows) + 1]
    return [*stock, *(min(size, max_tokens) for size in more if size > stock[-1])]


def _capture_drafts(vllm_config: Any, config: SpecRolloutConfig) -> None:
    """Have vLLM capture steps with as many rows as drafts bring; where it captures none, none."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    sizes = capture_sizes(
        compilation.cudagraph_capture_sizes or (),
        scheduler.max_num_seqs,
        config.max_draft_tokens,
        scheduler.max_num_batched_tokens,
    )
    if sizes:
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = sizes[-1]


def _share_compiled_models(vllm_config: Any) -> None:
    """Have vLLM find the model that it compiled before, with other settings of ours or with none.

    Not where there are entries of others: some models of vLLM's read theirs of a dict only. And not where vLLM reuses
    the measured size of the KV cache by the same hash (`VLLM_ENABLE_STARTUP_PLAN`): how many graphs we capture counts.
    """
    given = vllm_config.additional_config
    is_alone = set(given) <= {settings.KEY, settings.REQUEST_METRICS_KEY}
    if is_alone and os.environ.get("VLLM_ENABLE_STARTUP_PLAN", "0") == "0":
        vllm_config.additional_config = settings.Hashed(given)


def _make_variable_known() -> None:
    # vLLM warns of every VLLM_* variable that its table does not list, or refuses to start
    if envs.SPEC_ROLLOUT in os.environ:
        import vllm.envs

        vllm.envs.environment_variables.setdefault(envs.SPEC_ROLLOUT, envs.spec_rollout)


def _choose_engine() -> engines.Engine:
    version = supported.installed_vllm()
    problem = supported.version_problem(version)
    if problem is None and version is not None:
        problem = supported.drift_problem(version)
    if problem is not None:
        raise problem
    from vllm.platforms import current_platform

    engine = engines.choose(
        is_cpu=current_platform.is_cpu(),
        is_cuda=current_platform.is_cuda(),
        platform=current_platform.device_name,
    )
    engines.check_version(engine, features.installed(), str(version))
    return engine


@contextmanager
def _on(engine_args: Any, config: SpecRolloutConfig, engine: engines.Engine) -> Iterator[None]:
    """Set what our engine needs while its configuration is made, and no longer: a second call starts afresh."""
    # a number of blocks is meant in vLLM's blocks: of smaller ones it would be a smaller cache
    own_size = engine.block_size if engine_args.num_gpu_blocks_override is None else None
    request_metrics = engine_args.per_request_spec_decode_metrics
    travelling = {} if request_metrics == "none" else {settings.REQUEST_METRICS_KEY: request_metrics}
    changes = {
        "worker_cls": engine.worker,
        "block_size": engine_args.block_size or own_size,
        # the scheduler and the front end go on as without a model: only the worker knows of it
        "speculative_config": None,
        **dict.fromkeys(_SPECULATIVE),
        "per_request_spec_decode_metrics": "none",
        "additional_config": {**settings.additional(engine_args), settings.KEY: config.as_dict(), **travelling},
    }
    if not engine.async_scheduler:
        changes |= {"scheduler_cls": engine.scheduler, "async_scheduling": False}
    if config.train.mode == "auto" and not config.train.devices and engine is engines.GPU_V2:
        from vllm.platforms import current_platform

        share = config.train.memory_gib * (1 << 30) / current_platform.get_device_total_memory()
        changes["gpu_memory_utilization"] = engine_args.gpu_memory_utilization - share
    _set_row_invariant_attention()
    if engine is engines.CPU_V1 and engines.wants_v2() is None and engines.prefers_v2():
        _set(envs.USE_V2_MODEL_RUNNER, "0")
        logger.info("Spec rollout runs vLLM's V1 model runner on CPU (`%s=0`)", envs.USE_V2_MODEL_RUNNER)
    with _replaced(engine_args, changes):
        yield


@contextmanager
def _off(engine_args: Any) -> Iterator[None]:
    """Leave no trace of `spec_rollout=False`, so that vLLM sees exactly the stock configuration."""
    while _set_here:
        os.environ.pop(_set_here.pop(), None)
    given = engine_args.additional_config
    if not isinstance(given, Mapping) or settings.KEY not in given:
        yield
        return
    stock = {key: value for key, value in given.items() if key != settings.KEY}
    with _replaced(engine_args, {"additional_config": stock}):
        yield


@contextmanager
def _replaced(engine_args: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(engine_args, name) for name in changes}
    for name, value in changes.items():
        setattr(engine_args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(engine_args, name, value)


def _set(name: str, value: str) -> None:
    """Set a variable, which workers inherit."""
    os.environ[name] = value
    _set_here.add(name)


def _set_row_invariant_attention() -> None:
    """A row's attention must not depend on the rows beside it: drafts are rows."""
    value = os.environ.get(envs.CPU_ATTN_SPLIT_KV)
    if value is None:
        _set(envs.CPU_ATTN_SPLIT_KV, "0")
    elif value != "0":
        logger.warning(
            "%s=%s splits a row's keys by what else is in the batch: near ties may fall differently with drafts than"
            " without; unset it for bitwise equal output",
            envs.CPU_ATTN_SPLIT_KV,
            value,
        )


def _require_core() -> None:
    """Raises: our C++ module cannot be loaded, without which nothing is drafted or verified."""
    try:
        importlib.import_module("vllm_specrollout._core")
    except ImportError as error:
        raise UnsupportedError(
            f"the C++ module `vllm_specrollout._core` cannot be loaded: {error}",
            "install a wheel, or build it from a checkout: pip install --no-build-isolation -e .",
        ) from error
