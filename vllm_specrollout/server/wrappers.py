"""Small wrappers of vLLM's methods, rebound by `patches/`: how it takes requests, pauses, stops at strings, and shows
workers."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_specrollout.config import parse_request
from vllm_specrollout.config.marking import check_mark
from vllm_specrollout.config.resuming import check_resume
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.scheduling.stop_strings import mark, marked
from vllm_specrollout.server import settings

_DROPPED = "wait_for_inflight_requests"


def accept_dropped_keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.pause_generation`: the keyword means what it meant in vLLM 0.31, where it was deprecated."""
    if _DROPPED in inspect.signature(original).parameters:
        return original

    @functools.wraps(original)
    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool | None = None, **kwargs: Any) -> None:
        if wait_for_inflight_requests:
            kwargs["mode"] = "wait"
        await original(self, **kwargs)

    return pause_generation


def stop_at_once(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Wrap a detokenizer's `update`: where there are stop strings, a step's tokens are looked at one by one.

    Before vLLM 0.32 its front end keeps the tokens that a step brings behind the one that completes a stop string.
    The list of new tokens is cut in place behind the one that completes a stop string: its owner, vLLM's output
    processor, goes on with that list.
    """

    @functools.wraps(original)
    def update(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop or len(new_token_ids) < 2:
            return original(self, new_token_ids, stop_terminated)
        last = len(new_token_ids) - 1
        for place, token in enumerate(list(new_token_ids)):
            found = original(self, [token], stop_terminated and place == last)
            if found is not None:
                del new_token_ids[place + 1 :]
                return found
        return None

    return update


def forget_what_was_cut(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a logprobs processor's `update_from_output`: tokens that `stop_at_once` has cut off have no logprobs."""

    @functools.wraps(original)
    def update_from_output(self: Any, output: Any) -> None:
        logprobs, kept = output.new_logprobs, len(output.new_token_ids)
        if logprobs is not None and len(logprobs.logprobs) > kept:
            output.new_logprobs = logprobs.slice_request(0, kept)
        original(self, output)

    return update_from_output


def tell_answers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `OutputProcessor.add_request`: from the first request with a stop string on, what that front end has the
    engine abort are answers, whose lengths go along.

    It finds stop strings, and nobody else does. Users' aborts take another way, and those of a session that is over are
    no answers.
    """

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        if getattr(request.sampling_params, "stop", None) and "process_outputs" not in vars(self):
            self.process_outputs = functools.partial(_with_lengths(self.process_outputs), self)

    return add_request


def _with_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    """A bound `OutputProcessor.process_outputs` that says how long the answers are that it has the engine abort."""
    guard = Guard()

    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        # it forgets those that end
        states = [self.request_states.get(one.request_id) for one in engine_core_outputs]
        processed = original(engine_core_outputs, *args, **kwargs)
        if processed.reqs_to_abort:
            with guard.over("telling the lengths of answers that end at a stop string", "they count as aborted"):
                ended = {one.request_id: one for one in states if one is not None}
                processed.reqs_to_abort += [
                    mark(name, one.detokenizer.num_output_tokens())
                    for name in processed.reqs_to_abort
                    if not (one := ended[name]).streaming_input
                ]
        return processed

    return process_outputs


def take_marks_along(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DPLBAsyncMPClient.abort_requests_async`, which sends an id to the engine that has its request."""

    @functools.wraps(original)
    async def abort_requests_async(self: Any, request_ids: list[str]) -> None:
        engines = self.reqs_in_flight
        marks = {one: engines[name] for one in request_ids if (name := marked(one)) in engines}
        engines.update(marks)
        try:
            await original(self, request_ids)
        finally:
            for one in marks:
                engines.pop(one, None)

    return abort_requests_async


def introduce_workers(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of `EngineCore` that is called once, and has its executor and its scheduler when it is done."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        meet_workers = getattr(self.scheduler, "meet_workers", None)
        if meet_workers is not None:
            meet_workers(self.model_executor)

    return initialize


def check_options(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `InputProcessor.process_inputs`, which makes what goes to the engine; it knows the prompt's tokens.

    A request's options are checked where it enters, so that a mistake is a 400 and not a dead engine.
    """

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        # before vLLM cuts the prompt, which it does in place
        given = _given_ids(kwargs.get("prompt", args[1] if len(args) > 1 else None))
        request = original(self, *args, **kwargs)
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra:
            try:
                check_mark(extra)
                if settings.KEY in extra:
                    _check(self.vllm_config, request, extra[settings.KEY], given)
                elif settings.is_on(self.vllm_config):
                    _check_names(extra)
            except SpecRolloutError as error:
                raise _client_error()(error.cause, error.hint) from None
        return request

    return process_inputs


def _given_ids(prompt: Any) -> Sequence[int] | None:
    """The token ids that a client hands to the engine; None: the front end has made them, and may have cut them."""
    is_raw = isinstance(prompt, Mapping) and "type" not in prompt
    return prompt.get("prompt_token_ids") if is_raw else None


def _check_names(extra: Mapping[str, Any]) -> None:
    """Others' options are none of ours; one that is ours but for its spelling would be ignored without a word."""
    for key in extra:
        if isinstance(key, str) and len(key) < 32 and re.sub("[^a-z]", "", key.lower()) == "specrollout":
            raise ConfigError(f"unknown key `{key}` in `extra_args`", f"did you mean `{settings.KEY}`?")


def _check(vllm_config: Any, request: Any, options: Any, given: Sequence[int] | None) -> None:
    is_on = settings.is_on(vllm_config)
    try:
        resume = parse_request(options).resume
    except ConfigError:
        if is_on:
            raise
        return  # switched off, options are accepted and ignored
    if resume is None:
        return
    if not is_on:
        raise UnsupportedError(
            "spec rollout is off in this engine, so no answer can be resumed", "start it with --spec-rollout"
        )
    check_resume(
        resume,
        request.sampling_params,
        request.prompt_token_ids if request.prompt_embeds is None else None,
        is_v2=vllm_config.use_v2_model_runner,
        is_whole=given is not None and list(given) == request.prompt_token_ids,
        is_session=request.resumable,
    )


@functools.cache
def _client_error() -> type[ConfigError]:
    # the server answers 400 to vLLM's own client errors only, and 500 to any other ValueError
    from vllm.exceptions import VLLMClientError

    return type("RequestOptionsError", (ConfigError, VLLMClientError), {"__doc__": "A request's options are wrong."})
