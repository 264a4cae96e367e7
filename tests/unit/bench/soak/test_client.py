"""A request ends whole, is left as planned, or is lost: nothing in between counts as an answer."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

from bench.soak.arrivals import GRAMMARS, Mix, arrivals
from bench.soak.client import Lost, ask, body

(PLAIN,) = (replace(one, leaves_after=None) for one in itertools.islice(arrivals(1, 1.0, Mix(grammar=0, choices=0)), 1))
PAIR = replace(PLAIN, num_answers=2)


def chunk(index, tokens, end=None, prompt=None):
    choice = {"index": index, "text": "x" * len(tokens), "token_ids": tokens, "finish_reason": end}
    return {"id": "cmpl-1", "choices": [choice | ({"prompt_token_ids": prompt} if prompt else {})]}


def answered(arrival, chunks, status=200, silence_s=0.0):
    """What `ask` makes of a server that says this; and how many of its chunks were wanted."""

    async def run():
        sent = []

        async def complete(request):
            assert (await request.json())["stream"]
            if status != 200:
                return web.Response(status=status, text="no")
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.sleep(silence_s)
            for one in chunks:
                await response.write(
                    b"data: " + (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n\n"
                )
                sent.append(one)
                await asyncio.sleep(0.01)
            return response

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession() as session:
                return await ask(session, address, arrival, 16, is_ours=True), len(sent)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


WHOLE = [chunk(0, [5, 6], prompt=[1, 2]), chunk(1, [7]), chunk(1, [8, 4], "stop"), chunk(0, [9], "length"), b"[DONE]"]


def test_every_answer_of_a_request_is_put_together():
    answer, _ = answered(PAIR, WHOLE)
    assert (answer.request_id, answer.prompt, answer.tokens) == ("cmpl-1", [1, 2], [[5, 6, 9], [7, 8, 4]])
    assert (answer.texts, answer.num_tokens) == (["xxx", "xxx"], 6)


@pytest.mark.parametrize(
    "chunks",
    [WHOLE[:3], [], [*WHOLE[:3], chunk(0, [9], "abort")], [WHOLE[0], {"error": {"message": "dead"}}]],
    ids=["one answer has no end", "nothing came", "aborted by the server", "an error in the stream"],
)
def test_a_stream_that_ends_too_soon_is_lost(chunks):
    with pytest.raises(Lost):
        answered(PAIR, chunks)


def test_an_error_is_lost_and_told():
    with pytest.raises(Lost, match="status 500: no"):
        answered(PLAIN, [], status=500)


def test_a_client_leaves_after_as_many_chunks_as_planned():
    many = [chunk(0, [i]) for i in range(50)]
    answer, sent = answered(replace(PLAIN, leaves_after=3), many)
    assert answer is None and sent < 50


def test_a_client_leaves_before_a_word_came():
    answer, sent = answered(replace(PLAIN, leaves_after=0), WHOLE, silence_s=5.0)
    assert answer is None and sent == 0


def test_a_body_says_what_the_plan_says_and_stock_is_told_nothing_of_ours():
    ours = body(replace(PAIR, is_named=True, grammar=1), 16, is_ours=True)
    assert (ours["n"], ours["seed"], ours["structured_outputs"]) == (2, PAIR.seed, GRAMMARS[1])
    assert json.loads(ours["vllm_xargs"]["spec_rollout"]) == {"problem_id": PAIR.problem.problem_id}
    assert "vllm_xargs" not in body(replace(PAIR, is_named=True), 16, is_ours=False)
    assert "vllm_xargs" not in body(replace(PAIR, is_named=False), 16, is_ours=True)
