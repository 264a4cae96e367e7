"""Names rebound in the process that takes requests: each entry only says what is put where, and why."""

from functools import partial

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.engine_args import accept_flag, accept_keyword, create, read_flag
from vllm_specrollout.server.learning import attend
from vllm_specrollout.server.metrics import count_drafts
from vllm_specrollout.server.wrappers import (
    accept_dropped_keyword,
    check_options,
    forget_what_was_cut,
    stop_at_once,
    take_marks_along,
    tell_answers,
)

UPSTREAM = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm"
UPSTREAM_0_31 = "https://github.com/vllm-project/vllm/blob/v0.31.0/vllm"
_patch = partial(Patch, process="frontend")
_argument = partial(
    _patch,
    upstream=f"{UPSTREAM}/engine/arg_utils.py",
    versions=features.ALL,
    remove_when="vLLM lets a plugin declare engine arguments",
)
# answers that end with a stop string: the engine is told that they are answers, and how long
_answer = partial(
    _patch,
    versions=features.ALL,
    remove_when="vLLM tells the engine why a request is taken back, and with how many tokens",
)
# answers that end with a stop string, on versions that keep what the same step brought behind it
_stop = partial(
    _patch,
    versions=features.until("0.31.0"),
    remove_when="vLLM 0.31 is supported no more: 0.32 drops those tokens itself",
)

PATCHES = (
    # `LLM(MODEL, spec_rollout=...)`, `EngineArgs(spec_rollout=...)`
    *(
        _argument(
            target=f"vllm.engine.arg_utils:{name}.__init__",
            wrap=accept_keyword,
            why="one more keyword; both dataclasses have an `__init__` of their own, generated",
        )
        for name in ("EngineArgs", "AsyncEngineArgs")
    ),
    # `--spec-rollout` on every command that takes engine arguments
    _argument(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        wrap=accept_flag,
        why="one more flag; `AsyncEngineArgs.add_cli_args` loads plugins, then calls this one by name",
    ),
    _argument(
        target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
        wrap=read_flag,
        why="it copies dataclass fields only, and the flag is none",
    ),
    # where engine arguments become the engine's configuration: the one place that knows them all
    _patch(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        wrap=create,
        why="names our worker and scheduler and refuses what does not go together, before any worker is started",
        upstream=f"{UPSTREAM}/engine/arg_utils.py",
        versions=features.ALL,
        remove_when="vLLM calls a plugin with the engine arguments before it makes the configuration",
        guards_unsupported=True,
    ),
    # a request's own options are checked at the door
    _patch(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        wrap=check_options,
        why="vLLM passes `extra_args` on unseen; a mistake found in the worker would kill the engine",
        upstream=f"{UPSTREAM}/v1/engine/input_processor.py",
        versions=features.ALL,
        remove_when="vLLM lets a plugin validate sampling parameters",
    ),
    # trainers that pause an engine with a keyword of earlier vLLMs
    _patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
        wrap=accept_dropped_keyword,
        why="vLLM 0.32 dropped `wait_for_inflight_requests`, with which verl 0.9 and AReaL 1.0 abort what runs before"
        " they bring new weights",
        upstream=f"{UPSTREAM}/v1/engine/async_llm.py",
        versions=features.since("0.32.0"),
        remove_when="those trainers ask for a pause mode",
    ),
    # a head that goes on learning
    _patch(
        target="vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",
        wrap=attend,
        why="with `train`, a task attends to the engine; this is called once its event loop runs, and by every request",
        upstream=f"{UPSTREAM}/v1/engine/async_llm.py",
        versions=features.ALL,
        remove_when="vLLM calls a plugin when an engine begins and when a request comes",
    ),
    # vLLM's spec-decode counters in /metrics
    _patch(
        target="vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        wrap=count_drafts,
        why="the stock counters exist only with a `speculative_config`, which our engine does not have",
        upstream=f"{UPSTREAM}/v1/metrics/loggers.py",
        versions=features.ALL,
        remove_when="vLLM makes the counters when the scheduler reports drafts",
    ),
    _answer(
        target="vllm.v1.engine.output_processor:OutputProcessor.add_request",
        wrap=tell_answers,
        why="it finds stop strings and has the engine abort the request, which then looks like a user's own abort",
        upstream=f"{UPSTREAM}/v1/engine/output_processor.py",
    ),
    _answer(
        target="vllm.v1.engine.core_client:DPLBAsyncMPClient.abort_requests_async",
        wrap=take_marks_along,
        why="it drops ids that no engine of the data-parallel group has, such as that which carries the length",
        upstream=f"{UPSTREAM}/v1/engine/core_client.py",
    ),
    _stop(
        target="vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
        wrap=stop_at_once,
        why="a step with drafts brings several tokens; it looks for stop strings behind the last of them alone",
        upstream=f"{UPSTREAM_0_31}/v1/engine/detokenizer.py",
    ),
    _stop(
        target="vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output",
        wrap=forget_what_was_cut,
        why="it takes the logprobs of all tokens that the step brought",
        upstream=f"{UPSTREAM_0_31}/v1/engine/logprobs.py",
    ),
)
