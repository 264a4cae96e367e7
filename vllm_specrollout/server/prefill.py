"""Prefill of finished answers, asked of an engine that idles, so that their hidden states go to a trainer.

What belongs here: the requests that this takes; the front end alone can mark them. When they run, and who ends them, is
the scheduler's matter (`worker/hidden.py`). Nobody calls this but who trains: an engine does nothing by itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

from vllm_specrollout.config.checks import check_range
from vllm_specrollout.config.marking import KEY, RowsMark
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.server import settings
from vllm_specrollout.server.asking import Call, Conversation, aask, ask, check_is_on

MOST_TOKENS = 1 << 20
"""Most that one call asks for."""
_Asked = tuple[dict[str, Any], Any]  # a prompt, and its `SamplingParams`


def prefill(llm: Any, address: str, most_tokens: int) -> dict[str, int]:
    """Have an `LLM` compute answers once more that ended since the first such call; their rows go to `address`.

    Its workers hear in the next step which answers have ended, so those of the last step come with the next call.

    Args:
        address: where a `training.rows.RowSource` listens.
        most_tokens: of these answers together; one that is longer comes alone.

    Returns:
        How many tokens were "asked" for, and how many of them "computed" before another request came. Rows that the
        trainer has no room for are dropped all the same.

    Raises:
        ConfigError: `most_tokens` or the address cannot be used, or `llm` is no `LLM`.
        UnsupportedError: spec rollout is off, or tokens do not tell all that an answer came of.
    """
    asked = ask(llm, _asking(address, most_tokens), check_is_on)
    if not asked:
        return {"asked": 0, "computed": 0}
    prompts, params = zip(*asked, strict=True)
    return _counts(asked, llm.generate(list(prompts), list(params), use_tqdm=False))


async def aprefill(engine: Any, address: str, most_tokens: int) -> dict[str, int]:
    """`prefill` for an `AsyncLLM`. Other requests may come meanwhile: they end what is left of it."""
    asked = await aask(engine, _asking(address, most_tokens), check_is_on)
    return _counts(asked, await asyncio.gather(*(_last(engine, *one) for one in asked)))


async def _last(engine: Any, prompt: dict[str, Any], params: Any) -> Any:
    last = None
    async for output in engine.generate(prompt, params, request_id=f"rows-{uuid.uuid4().hex}"):
        last = output
    return last


def _asking(address: str, most_tokens: int) -> Conversation[list[_Asked]]:
    check_range("most_tokens", most_tokens, 1, MOST_TOKENS)
    answers = yield Call("spec_rollout_answers", (address, most_tokens))
    # ranks that do not draft say nothing
    found = [one for workers in answers for one in workers if one]
    for one in found:
        if "cause" in one:
            raise UnsupportedError(one["cause"], one["hint"])
    return [request for one in found for request in requests_of(one)]


def requests_of(found: dict[str, Any]) -> Iterator[_Asked]:
    """For what a worker found (`hidden.answers_for`)."""
    from vllm import SamplingParams  # nothing that imports this module needs vLLM before

    for prompt_tokens, key, token_ids in found["answers"]:
        mark = RowsMark(prompt_tokens=prompt_tokens, version=found["version"], key=key)
        extra = {settings.KEY: {"enabled": False}, KEY: mark}
        # greedy: no seed is drawn for it, which would change those of other requests
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, extra_args=extra
        )
        # and salted: no other request reads keys and values that it wrote
        yield {"prompt_token_ids": token_ids, "cache_salt": uuid.uuid4().hex}, params


def _counts(asked: list[_Asked], outputs: list[Any]) -> dict[str, int]:
    lengths = [len(prompt["prompt_token_ids"]) for prompt, _ in asked]
    done = [one is not None and one.outputs[0].finish_reason != "abort" for one in outputs]
    return {"asked": sum(lengths), "computed": sum(n for n, is_done in zip(lengths, done, strict=True) if is_done)}
