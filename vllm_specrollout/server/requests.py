"""Per-request options are checked where the request enters, so that a mistake is a 400 and not a dead engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_specrollout.config import parse_request
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError
from vllm_specrollout.resuming import check_resume
from vllm_specrollout.server import settings


def check_options(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `InputProcessor.process_inputs`, which makes what goes to the engine; it knows the prompt's tokens."""

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra and settings.KEY in extra:
            try:
                _check(self.vllm_config, request, extra[settings.KEY])
            except SpecRolloutError as error:
                raise _client_error()(error.cause, error.hint) from None
        return request

    return process_inputs


def _check(vllm_config: Any, request: Any, given: Any) -> None:
    is_on = settings.is_on(vllm_config)
    try:
        resume = parse_request(given).resume
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
        is_session=request.resumable,
    )


@functools.cache
def _client_error() -> type[ConfigError]:
    # the server answers 400 to vLLM's own client errors only, and 500 to any other ValueError
    from vllm.exceptions import VLLMClientError

    return type("RequestOptionsError", (ConfigError, VLLMClientError), {"__doc__": "A request's options are wrong."})
