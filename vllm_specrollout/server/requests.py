"""Per-request options are checked where the request enters, so that a mistake is a 400 and not a dead engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_specrollout.config import parse_request
from vllm_specrollout.config.resuming import check_resume
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError
from vllm_specrollout.server import settings


def check_options(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `InputProcessor.process_inputs`, which makes what goes to the engine; it knows the prompt's tokens."""

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        # before vLLM cuts the prompt, which it does in place
        given = _given_ids(kwargs.get("prompt", args[1] if len(args) > 1 else None))
        request = original(self, *args, **kwargs)
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra and settings.KEY in extra:
            try:
                _check(self.vllm_config, request, extra[settings.KEY], given)
            except SpecRolloutError as error:
                raise _client_error()(error.cause, error.hint) from None
        return request

    return process_inputs


def _given_ids(prompt: Any) -> Sequence[int] | None:
    """The token ids that a client hands to the engine; None: the front end has made them, and may have cut them."""
    is_raw = isinstance(prompt, Mapping) and "type" not in prompt
    return prompt.get("prompt_token_ids") if is_raw else None


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
