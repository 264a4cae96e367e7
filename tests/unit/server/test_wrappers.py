"""Answers end behind the token that completes a stop string, and trainers pause an engine, as on another vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_specrollout.server.wrappers import accept_dropped_keyword, forget_what_was_cut, stop_at_once


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


def test_tokens_behind_a_stop_string_are_dropped_and_those_before_it_kept() -> None:
    one = Detokenizer(["cd", "xyz"])
    assert told(one, "ab") == (None, "ab")
    assert told(one, "acdbx") == ("cd", "acd")
    assert "".join(map(chr, one.token_ids)) == one.text == "abacd"


def test_a_stop_string_may_begin_in_an_earlier_step() -> None:
    one = Detokenizer(["cde"])
    assert told(one, "abc") == (None, "abc")
    assert told(one, "defg") == ("cde", "de")


def test_min_tokens_count_within_a_step() -> None:
    assert told(Detokenizer(["b"], min_tokens=3), "abababab") == ("b", "abab")


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


@pytest.mark.parametrize(("kept", "left"), [(3, 3), (1, 1)])
def test_logprobs_are_those_of_the_tokens_that_are_left(kept: int, left: int) -> None:
    @dataclass
    class Output:
        new_token_ids: list[int]
        new_logprobs: Logprobs | None

    seen: list[Any] = []
    update = forget_what_was_cut(lambda self, output: seen.append(output.new_logprobs))
    update(None, Output([7] * kept, Logprobs([0.1, 0.2, 0.3])))
    update(None, Output([7], None))
    assert len(seen[0].logprobs) == left and seen[1] is None


class Engine:
    """Like `AsyncLLM` of vLLM 0.32."""

    def __init__(self):
        self.asked = None

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.asked = (mode, clear_cache)


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
    engine = Engine()
    asyncio.run(accept_dropped_keyword(Engine.pause_generation)(engine, **given))
    assert engine.asked == asked


def test_an_engine_that_still_takes_it_is_left_alone():
    async def pause_generation(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
        pass

    assert accept_dropped_keyword(pause_generation) is pause_generation
