"""Every field of an answer, against stock vLLM's: compared, or left out with the reason.

Options of vLLM's bring fields of their own, and trainers read them. A field that nobody has decided on is a failure, so
that the next vLLM's are noticed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from tests.e2e.identity.compare import are_level

CLOCK = "a clock's"
# of logprobs, in float32; summed over an answer too
TOLERANCE = 2e-4
UNLISTED = ", unless one that is not listed is level with it"
"""Ends a difference that rounding may have made, if it is rare."""
HERE = "no test here uses it: "
# class -> fields that are compared
COMPARED: Mapping[str, frozenset[str]] = {
    "RequestOutput": frozenset(
        {
            "request_id",
            "prompt",
            "prompt_token_ids",
            "prompt_logprobs",
            "prompt_token_id_logprobs",
            "outputs",
            "finished",
            "metrics",
            "num_cached_tokens",
            "num_cache_creation_tokens",
        }
    ),
    "CompletionOutput": frozenset(
        {
            "index",
            "text",
            "token_ids",
            "cumulative_logprob",
            "logprobs",
            "routed_experts",
            "finish_reason",
            "stop_reason",
            "sampling_mask",
            "weight_versions",
        }
    ),
    "SamplingMask": frozenset({"token_ids"}),
    "WeightVersionSpan": frozenset({"version", "start", "end"}),
    "RequestStateStats": frozenset(
        {"num_generation_tokens", "num_preemptions", "is_corrupted", "is_watermarked", "is_watermark_skipped"}
    ),
    "Logprob": frozenset({"logprob", "rank", "decoded_token"}),
}
# class -> fields that are not, and why
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "RequestOutput": {
        "lora_request": HERE + "an adapter, handed back as it was given",
        "encoder_prompt": HERE + "of encoder-decoder models, for which nothing is drafted",
        "encoder_prompt_token_ids": HERE + "of encoder-decoder models, for which nothing is drafted",
        "kv_transfer_params": HERE + "a KV connector's",
        "ec_transfer_params": HERE + "an encoder cache connector's",
    },
    "CompletionOutput": {
        "lora_request": HERE + "an adapter, handed back as it was given",
        "spec_decode_metrics": "what became of drafts; stock has none: compared with the worker's totals",
    },
    "RequestStateStats": dict.fromkeys(
        ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "first_token_latency"), CLOCK
    ),
}


def undecided() -> set[str]:
    """Fields of the installed vLLM's answers that are neither compared nor left out."""
    named = {
        "RequestOutput": set(inspect.signature(RequestOutput.__init__).parameters) - {"self", "kwargs"},
        "CompletionOutput": {field.name for field in dataclasses.fields(CompletionOutput)},
    }
    return {f"{name}.{field}" for name, fields in named.items() for field in fields - _decided(name)}


def _decided(name: str) -> set[str]:
    return COMPARED.get(name, frozenset()) | set(LEFT_OUT.get(name, {}))


def differences(stock: Any, ours: Any, where: str = "", left_out: Sequence[str] = ()) -> Iterator[str]:
    """Where two answers differ, or hold what nobody has decided on; floats may do so by rounding.

    Args:
        left_out: further fields that are not compared.
    """
    if isinstance(stock, np.ndarray) and isinstance(ours, np.ndarray):
        if stock.shape != ours.shape or stock.dtype != ours.dtype:
            yield f"{where}: {stock.dtype}{stock.shape}, not {ours.dtype}{ours.shape}"
        elif not np.allclose(stock, ours, rtol=0.0, atol=TOLERANCE if stock.dtype.kind == "f" else 0.0):
            yield f"{where}: rows {sorted(set(np.argwhere(stock != ours)[:, 0].tolist()))} of {len(stock)}"
    elif isinstance(stock, float) and isinstance(ours, float):
        if not np.isclose(stock, ours, rtol=0.0, atol=TOLERANCE):
            yield f"{where}: {stock}, not {ours}"
    elif type(stock) is not type(ours):
        yield f"{where}: {stock!r}, not {ours!r}"
    elif isinstance(stock, Mapping) and stock and ours and isinstance(next(iter(stock.values())), Logprob):
        yield from _of_position(stock, ours, where)
    elif isinstance(stock, Mapping):
        if stock.keys() != ours.keys():
            yield f"{where}: {sorted(stock)}, not {sorted(ours)}"
        for key in stock.keys() & ours.keys():
            yield from differences(stock[key], ours[key], f"{where}[{key}]", left_out)
    elif isinstance(stock, Sequence) and not isinstance(stock, str):
        if len(stock) != len(ours):
            yield f"{where}: {len(stock)}, not {len(ours)}"
        for i, (a, b) in enumerate(zip(stock, ours, strict=False)):
            yield from differences(a, b, f"{where}[{i}]", left_out)
    elif hasattr(stock, "__dict__") or dataclasses.is_dataclass(stock):
        yield from _of_fields(stock, ours, where, left_out)
    elif stock != ours:
        yield f"{where}: {stock!r}, not {ours!r}"


def _are_near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= TOLERANCE


def _of_position(stock: Mapping[int, Logprob], ours: Mapping[int, Logprob], where: str) -> Iterator[str]:
    """Logprobs of one position: tokens that are level may change places, or stand in for each other at the end."""
    common = stock.keys() & ours.keys()
    strays = [sorted(one.logprob for token, one in side.items() if token not in common) for side in (stock, ours)]
    if not common or not are_level(stock, ours, strays, TOLERANCE):
        yield f"{where}: {sorted(stock)}, not {sorted(ours)}"
    for token in common:
        a, b = stock[token], ours[token]
        if not _are_near(a.logprob, b.logprob):
            yield f"{where}[{token}]: {a.logprob}, not {b.logprob}"
        elif a.rank != b.rank and a.logprob > -np.inf:  # all that are ruled out are level, and vLLM lists any of them
            # how many others may have changed places with it
            level = sum(_are_near(one.logprob, a.logprob) for one in stock.values()) - 1
            by = abs((a.rank or 0) - (b.rank or 0))
            if by > level:
                yield f"{where}[{token}]: rank {a.rank}, not {b.rank}{UNLISTED if by == 1 else ''}"
        if a.decoded_token != b.decoded_token:
            yield f"{where}[{token}]: {a.decoded_token!r}, not {b.decoded_token!r}"


def _of_fields(stock: Any, ours: Any, where: str, left_out: Sequence[str]) -> Iterator[str]:
    name = type(stock).__name__
    names = (
        [field.name for field in dataclasses.fields(stock)] if dataclasses.is_dataclass(stock) else list(vars(stock))
    )
    yield from (f"{where}.{field}: nobody has decided on it" for field in set(names) - _decided(name))
    for field in names:
        if field in COMPARED.get(name, ()) and field not in left_out:
            yield from differences(getattr(stock, field), getattr(ours, field), f"{where}.{field}", left_out)


def metrics_are_the_workers(answers: Sequence[Any], stats: Mapping[str, Any], max_draft_tokens: int) -> None:
    """Check what each answer tells of its drafts, in detail, against the worker's totals of these requests."""
    metrics = [output.spec_decode_metrics for one in answers for output in one.outputs]
    assert sum(one.num_draft_tokens for one in metrics) == stats["drafted"]
    accepted = [sum(j * count for j, count in enumerate(one.histogram)) for one in metrics]
    assert sum(accepted) == stats["accepted"] > 0
    for one, total in zip(metrics, accepted, strict=True):
        assert sum(one.per_step_drafted) == one.num_draft_tokens and min(one.per_step_drafted, default=1) > 0
        assert sum(one.per_step_accepted) == total and sum(one.histogram) == len(one.per_step_accepted)
        assert one.num_spec_tokens == len(one.histogram) - 1 == max_draft_tokens
