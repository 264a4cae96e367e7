"""Per-request options are checked where the request enters, so that a mistake is a 400 and not a dead engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_specrollout.config import parse_request
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server import settings


def check_options(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `InputProcessor._validate_params`; with speculation off, options are accepted and ignored."""

    @functools.wraps(original)
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(params, "extra_args", None)
        if extra and settings.KEY in extra and settings.is_on(self.vllm_config):
            try:
                parse_request(extra[settings.KEY])
            except ConfigError as error:
                raise _client_error()(error.cause, error.hint) from None
        return original(self, params, *args, **kwargs)

    return _validate_params


@functools.cache
def _client_error() -> type[ConfigError]:
    # the server answers 400 to vLLM's own client errors only, and 500 to any other ValueError
    from vllm.exceptions import VLLMClientError

    return type("RequestOptionsError", (ConfigError, VLLMClientError), {"__doc__": "A request's options are wrong."})
