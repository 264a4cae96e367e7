"""The plan of who arrives; and a request ends whole, is left as planned, or is lost: nothing in between."""

import asyncio
import itertools
import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

from bench.soak.load import CHOICES, GRAMMAR, GRAMMARS, MOST_CHOICES, Lost, arrivals, ask


def first(count, seed=3, per_second=4.0, checked=0.1, **mix):
    usual = {"recurring": 0.5, "pool": 32, "grammar": 0.1, "choices": 0.1, "leaving": 0.1}
    return list(
        itertools.islice(arrivals(SimpleNamespace(seed=seed, rate=per_second, **{**usual, **mix}), checked), count)
    )


PLAIN = replace(first(1, seed=1, per_second=1.0, grammar=0, choices=0)[0], leaves_after=None)
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
            async with aiohttp.ClientSession(address) as session:
                return await ask(session, arrival, 16), len(sent)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


WHOLE = [chunk(0, [5, 6], prompt=[1, 2]), chunk(1, [7]), chunk(1, [8, 4], "stop"), chunk(0, [9], "length"), b"[DONE]"]


def test_every_answer_of_a_request_is_put_together():
    answer, _ = answered(PAIR, WHOLE)
    assert (answer.request_id, answer.prompt, answer.tokens) == ("cmpl-1", [1, 2], [[5, 6, 9], [7, 8, 4]])
    assert answer.texts == ["xxx", "xxx"]


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
    ours = replace(PAIR, number=0, grammar=1).body(16)
    assert (ours["n"], ours["seed"], ours["structured_outputs"]) == (2, PAIR.seed, GRAMMARS[1])
    assert json.loads(ours["vllm_xargs"]["spec_rollout"]) == {"problem_id": PAIR.problem.problem_id}
    assert "vllm_xargs" not in replace(PAIR, number=1).body(16)


SOME = 2000


def test_one_seed_is_one_plan_and_a_longer_run_begins_like_a_shorter_one():
    assert first(200)[:50] == first(50)
    assert first(50, seed=4) != first(50)


def test_they_come_at_random_at_the_rate_asked_for():
    times = [one.at_s for one in first(SOME)]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0.0
    # of a Poisson process mean and deviation are the same
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_each_share_is_as_asked_for():
    plan = first(SOME, recurring=0.3, grammar=0.2, choices=0.25, leaving=0.15, checked=0.5)
    shares = {
        "recurring": [one.is_recurring for one in plan],
        "grammar": [one.kind == GRAMMAR for one in plan],
        "choices": [one.kind == CHOICES for one in plan],
        "leaving": [one.leaves_after is not None for one in plan],
        "checked": [one.is_checked for one in plan if one.leaves_after is None],
    }
    found = {name: sum(flags) / len(flags) for name, flags in shares.items()}
    wanted = {"recurring": 0.3, "grammar": 0.2, "choices": 0.25, "leaving": 0.15, "checked": 0.5}
    assert found == pytest.approx(wanted, abs=0.05)


def test_one_share_moves_no_other_request():
    few, many = first(300, leaving=0.0), first(300, leaving=1.0)
    assert [(a.at_s, a.kind, a.problem) for a in few] == [(b.at_s, b.kind, b.problem) for b in many]


def test_problems_come_back_or_are_asked_once():
    plan = first(SOME, pool=8)
    back = {one.problem.problem_id for one in plan if one.is_recurring}
    once = [one.problem.problem_id for one in plan if not one.is_recurring]
    assert len(back) == 8 and len(set(once)) == len(once) and not back & set(once)


def test_no_two_answers_share_their_noise():
    seeds = [one.seed + i for one in first(SOME) for i in range(one.num_answers)]
    assert len(set(seeds)) == len(seeds)


def test_what_is_asked_for_fits_its_kind():
    for one in first(500):
        assert (one.kind == CHOICES) == (one.num_answers > 1) and one.num_answers <= MOST_CHOICES
        assert (one.kind == GRAMMAR) == (0 <= one.grammar < len(GRAMMARS))
        assert not one.is_checked or one.leaves_after is None
