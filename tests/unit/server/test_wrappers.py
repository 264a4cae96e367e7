from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specrollout.scheduling.stop_strings import mark
from vllm_specrollout.server.wrappers import (
    accept_dropped_keyword,
    forget_what_was_cut,
    stop_at_once,
    take_marks_along,
    tell_answers,
)


@dataclass
class Detokenizer:
    """As vLLM's was before 0.32: a token is a letter, and stop strings are looked for behind the last new one."""

    stop: list[str]
    min_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        before = len(self.text)
        shown = new_token_ids[:-1] if stop_terminated else new_token_ids
        self.token_ids += new_token_ids
        self.text += "".join(map(chr, shown))
        if len(self.token_ids) <= self.min_tokens:
            return None
        for word in self.stop:
            if word in self.text[max(0, before - len(word) + 1) :]:
                return word
        return None


@dataclass
class Logprobs:
    logprobs: list[float]

    def slice_request(self, first: int, count: int) -> Logprobs:
        return Logprobs(self.logprobs[first : first + count])


def told(detokenizer: Detokenizer, text: str, stop_terminated: bool = False) -> tuple[str | None, str]:
    """What one step with these tokens brings: the stop string, and the tokens that are left of it."""
    tokens = [ord(letter) for letter in text]
    found = stop_at_once(Detokenizer.update)(detokenizer, tokens, stop_terminated)
    return found, "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("one", "steps"),
    [
        (Detokenizer(["cd", "xyz"]), {"ab": (None, "ab"), "acdbx": ("cd", "acd")}),
        (Detokenizer(["cde"]), {"abc": (None, "abc"), "defg": ("cde", "de")}),
        (Detokenizer(["b"], min_tokens=3), {"abababab": ("b", "abab")}),
    ],
    ids=["within a step", "begun in an earlier step", "behind min_tokens"],
)
def test_tokens_behind_a_stop_string_are_dropped_and_those_before_it_kept(one: Detokenizer, steps: Any) -> None:
    assert {text: told(one, text) for text in steps} == steps
    assert "".join(map(chr, one.token_ids)) == one.text == "".join(left for _, left in steps.values())


def test_a_stop_token_is_hidden_only_where_it_is_the_last_one() -> None:
    one = Detokenizer(["zz"])
    assert told(one, "abc", stop_terminated=True) == (None, "abc")
    assert one.text == "ab" and len(one.token_ids) == 3
    assert told(Detokenizer(["b"]), "abc", stop_terminated=True) == ("b", "ab")


def test_without_stop_strings_a_step_is_looked_at_whole() -> None:
    calls: list[list[int]] = []

    def original(self: Any, tokens: list[int], stop_terminated: bool) -> None:
        calls.append(tokens)

    stop_at_once(original)(Detokenizer([]), [1, 2, 3], False)
    stop_at_once(original)(Detokenizer(["a"]), [4], False)
    assert calls == [[1, 2, 3], [4]]


@pytest.mark.parametrize("kept", [3, 1])
def test_logprobs_are_those_of_the_tokens_that_are_left(kept: int) -> None:
    seen: list[Any] = []
    update = forget_what_was_cut(lambda self, output: seen.append(output.new_logprobs))
    update(None, SimpleNamespace(new_token_ids=[7] * kept, new_logprobs=Logprobs([0.1, 0.2, 0.3])))
    update(None, SimpleNamespace(new_token_ids=[7], new_logprobs=None))
    assert seen == [Logprobs([0.1, 0.2, 0.3][:kept]), None]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, ("abort", True)),
        ({"mode": "keep"}, ("keep", True)),
        ({"wait_for_inflight_requests": False, "clear_cache": False}, ("abort", False)),
        ({"wait_for_inflight_requests": True}, ("wait", True)),
        ({"mode": "keep", "wait_for_inflight_requests": False}, ("keep", True)),
    ],
)
def test_the_dropped_keyword_means_what_it_meant(given, asked):
    told = []

    async def pause_generation(self, *, mode="abort", clear_cache=True):  # as vLLM 0.32 has it
        told.append((mode, clear_cache))

    asyncio.run(accept_dropped_keyword(pause_generation)(None, **given))
    assert told == [asked]


def test_an_engine_that_still_takes_it_is_left_alone():
    async def pause_generation(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
        pass

    assert accept_dropped_keyword(pause_generation) is pause_generation


class Processor:
    """Like vLLM's `OutputProcessor`: requests named "s..." stop at a string, sessions "e..." are over."""

    def __init__(self, **num_tokens: int) -> None:
        self.request_states = {
            name: SimpleNamespace(
                request_id=name,
                streaming_input=name[0] == "e",
                detokenizer=SimpleNamespace(num_output_tokens=lambda own=count: own),
            )
            for name, count in num_tokens.items()
        }

    def add_request(self, request: Any) -> None:
        """Nothing is kept of it."""

    def process_outputs(self, outputs: list[Any]) -> Any:
        ended = [one.request_id for one in outputs if one.request_id[0] in "se"]
        for name in ended:
            del self.request_states[name]
        return SimpleNamespace(reqs_to_abort=ended)


def told_of(processor: Any, *names: str) -> list[str]:
    for stop in ([], ["."], ["."]):
        request = SimpleNamespace(sampling_params=SimpleNamespace(stop=stop))
        tell_answers(Processor.add_request)(processor, request)
    aborted: list[str] = processor.process_outputs([SimpleNamespace(request_id=name) for name in names]).reqs_to_abort
    return aborted


def test_a_front_end_that_has_met_no_stop_string_is_vllms_own() -> None:
    processor = Processor(a=3)
    for params in (SimpleNamespace(stop=[]), None):  # pooling has none
        tell_answers(Processor.add_request)(processor, SimpleNamespace(sampling_params=params))
    assert "process_outputs" not in vars(processor)


def test_the_lengths_of_answers_that_stopped_go_along_and_of_nothing_else() -> None:
    processor = Processor(s1=7, s2=9, a=3, e=5)
    assert told_of(processor, "a", "gone") == []
    assert told_of(processor, "s1", "a", "e", "s2") == ["s1", "e", "s2", mark("s1", 7), mark("s2", 9)]


def test_a_length_that_cannot_be_told_costs_the_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECROLLOUT_STRICT", "0")
    processor = Processor(s1=7)
    processor.request_states["s1"].detokenizer = None
    assert told_of(processor, "s1") == ["s1"]


def test_a_mark_goes_to_the_engine_that_has_the_request() -> None:
    client_of = pytest.importorskip("vllm.v1.engine.core_client").DPLBAsyncMPClient
    sent: dict[str, list[str]] = {}

    async def send(ids: list[str], engine: str) -> None:
        sent[engine] = ids

    client = SimpleNamespace(
        reqs_in_flight={"a": "first", "b": "second"}, resources=SimpleNamespace(engine_dead=False), _abort_requests=send
    )
    client.streaming_reqs, marks = set(), [mark(name, 4) for name in ("a", "b", "gone")]
    wrapped = take_marks_along(inspect.unwrap(client_of.abort_requests_async))
    asyncio.run(wrapped(client, ["a", "b", "gone", *marks]))
    assert sent == {"first": ["a", marks[0]], "second": ["b", marks[1]]}
    assert client.reqs_in_flight == {"a": "first", "b": "second"}
