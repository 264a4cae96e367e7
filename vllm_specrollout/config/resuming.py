"""Going on with an answer that was interrupted: what a request says of it, and which requests cannot.

What belongs here: what clients and the server need. How an engine takes such a request up is in `worker/arriving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from vllm_specrollout.config.checks import Range, check_fields
from vllm_specrollout.errors import ConfigError, UnsupportedError

KEY = "spec_rollout"  # ours, in `SamplingParams.extra_args`
_GREEDY = 1e-5  # below this temperature vLLM samples greedily


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The request's prompt ends with the answer so far, and the answer goes on as if it had never been interrupted.

    Raises:
        ConfigError: a value out of range.
    """

    prompt_tokens: Annotated[int, Range(1, 1 << 30)]
    """Tokens of the prompt itself, at least 1; those behind them are the answer so far."""
    answer_tokens: Annotated[int | None, Range(0, 1 << 30)] = None
    """Tokens of the answer so far. Needed wherever vLLM may cut a prompt before it comes to the engine."""
    drawn: Annotated[int | None, Range(0, 1 << 30)] = None
    """Tokens of the answer so far that were sampled, and so took noise; unset: all of them. V1 runner only."""

    def __post_init__(self) -> None:
        check_fields(self, "resume.")


def resumed(params: Any, prompt_token_ids: Sequence[int], answer: Sequence[int]) -> tuple[list[int], Any]:
    """The prompt and the parameters of the request that goes on with an answer.

    Args:
        params: the `SamplingParams` of the interrupted request. `max_tokens` and `min_tokens` are of the whole answer.
        answer: its tokens so far; none: the very same request.

    Returns:
        The new prompt, and a copy of the parameters.

    Raises:
        ConfigError: the answer has `max_tokens` tokens already.
    """
    clone, count = params.clone(), len(answer)
    if not count:
        return list(prompt_token_ids), clone
    if clone.max_tokens is not None:
        if clone.max_tokens <= count:
            raise ConfigError(
                f"the answer has {count} tokens, and `max_tokens` is {clone.max_tokens}", "it is complete: keep it"
            )
        clone.max_tokens -= count
    clone.min_tokens = max(clone.min_tokens - count, 0)
    extra = dict(clone.extra_args or {})
    options = extra.get(KEY)
    if isinstance(options, str):
        options = json.loads(options)
    if isinstance(options, bool):
        options = {"enabled": options}
    extra[KEY] = {**(options or {}), "resume": {"prompt_tokens": len(prompt_token_ids), "answer_tokens": count}}
    clone.extra_args = extra
    return [*prompt_token_ids, *answer], clone


def check_resume(
    resume: Resume,
    params: Any,
    prompt_token_ids: Sequence[int] | None,
    *,
    is_v2: bool,
    is_whole: bool = False,
    is_session: bool = False,
) -> None:
    """Refuse what could not go on with the very same tokens.

    Args:
        params: its `SamplingParams`.
        prompt_token_ids: prompt and answer so far, as they come to the engine; None: the prompt is given otherwise.
        is_v2: the engine has vLLM's V2 runner, where a token's noise goes by its position alone.
        is_whole: they are known to be what the client gave.
        is_session: the prompt goes on to grow.

    Raises:
        ConfigError: the lengths do not fit, or there is no seed.
        UnsupportedError: it uses what cannot be resumed.
    """
    lacking = _not_resumable(params, has_token_ids=prompt_token_ids is not None, is_session=is_session)
    if lacking or prompt_token_ids is None:
        raise UnsupportedError(
            f"a request that uses {', '.join(lacking)} cannot be resumed", "leave that out, or ask for the whole answer"
        )
    count = _answer_length(resume, len(prompt_token_ids), is_whole)
    drawn = count if resume.drawn is None else resume.drawn
    if drawn > count:
        raise ConfigError(
            f"`resume.drawn` is {drawn}, and the answer so far has {count} tokens",
            "leave it out: then each token of the answer was sampled",
        )
    if params.temperature < _GREEDY:
        return
    if params.seed is None:
        raise ConfigError(
            "a request without `seed` cannot be resumed: nobody knows the noise it began with",
            "give it a seed from the first, or resume greedy requests only",
        )
    if is_v2 and drawn != count:
        raise UnsupportedError(
            f"`resume.drawn` is {drawn} of {count} tokens, and vLLM's V2 runner draws noise by position",
            "leave it out",
        )


def _answer_length(resume: Resume, length: int, is_whole: bool) -> int:
    """Tokens of the answer so far. A prompt that was cut has fewer, and would go on at a wrong place in silence."""
    count = length - resume.prompt_tokens
    if resume.answer_tokens is None and not is_whole:
        raise ConfigError(
            "`resume.answer_tokens` is not given, and nothing else tells whether the prompt was cut",
            "say how many tokens of the answer are behind the prompt, as `resumed` does",
        )
    if resume.answer_tokens not in (None, count):
        raise ConfigError(
            f"`resume` says {resume.prompt_tokens} tokens of prompt and {resume.answer_tokens} of answer,"
            f" and {length} came",
            "leave out `truncate_prompt_tokens` and the like, and give the whole prompt and answer so far",
        )
    if count < 0:
        raise ConfigError(
            f"`resume.prompt_tokens` is {resume.prompt_tokens}, and the prompt has {length} tokens",
            "give the prompt and behind it the answer so far, and the length of the first alone",
        )
    return count


def _not_resumable(params: Any, *, has_token_ids: bool, is_session: bool) -> list[str]:
    """What of a request keeps state that its tokens alone do not bring back."""
    uses = {
        "a prompt without token ids": not has_token_ids,
        "a prompt that grows": is_session,
        "structured outputs": params.structured_outputs is not None,
        "`stop` strings": bool(params.stop),
        "`prompt_logprobs`": params.prompt_logprobs is not None,
        "`n` above 1": params.n > 1,
        "`thinking_token_budget`": params.thinking_token_budget is not None,
        "watermarking": asks_for_watermark(params),
        "trace replay": bool(params.trace_decode_token_ids),
    }
    return [name for name, is_used in uses.items() if is_used]


def asks_for_watermark(params: Any) -> bool:
    """Whether a request asks for the engine's watermark.

    Older versions of vLLM set this on every request, and some have no such field. An engine with a watermark is
    refused, so what a request has without asking means nothing.
    """
    value = getattr(params, "watermarking", None)
    # only built where there is a value to compare: that costs microseconds, once per request
    return bool(value) and value != type(params)().watermarking
