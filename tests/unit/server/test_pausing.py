"""Trainers written for vLLM 0.31 pause an engine as they did there."""

import asyncio

import pytest

from vllm_specrollout.server.pausing import accept_dropped_keyword


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
