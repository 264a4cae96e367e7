"""Records to draw, and what is in a page, read as a browser reads it but in Python."""

import base64
import gzip
import json
import re
from typing import Any

import numpy as np

from tests.unit.replay.builders import ListSink, header
from vllm_specrollout.budgets.step_cost import Timing
from vllm_specrollout.replay.records import Arrival, Candidates, End, Step, Trace, Verified


def trace_of(sink: ListSink) -> Trace:
    head, *records = sink.records
    kinds = {kind: tuple(one for one in records if isinstance(one, kind)) for kind in (Arrival, Step, End)}
    return Trace(head, kinds[Arrival], kinds[Step], {end.request: end for end in kinds[End]})


def islands(page: str) -> dict[str, Any]:
    """The data of a page by their names."""
    found = re.findall(r'<script type="text/plain" id="(\w+)">([^<]*)</script>', page)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def made_up(requests: int, batch: int, median: float, seed: int = 0, nodes: int = 12) -> Trace:
    """A rollout as an engine would have recorded it: answers to be drawn, not to be believed.

    A draft is a chain, right for a while, and a second choice where it goes wrong. Drafting pauses now and then.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), 0.8, requests), 2, 40 * median).astype(int).tolist()
    answers = [rng.integers(0, 150_000, length).tolist() for length in lengths]
    wrong = rng.integers(0, 150_000, 4096).tolist()
    arrivals: list[Arrival] = []
    steps: list[Step] = []
    # request -> its tokens; and how many of its drafted ones are right
    running: dict[int, int] = {}
    right: dict[int, int] = {}
    at_ms, is_paused = 0.0, False
    while running or len(arrivals) < requests:
        verified = tuple(Verified(i, nodes, hits) for i, hits in right.items())
        running = {i: min(position + 1 + right.get(i, 0), lengths[i]) for i, position in running.items()}
        while len(arrivals) < requests and len(running) < batch:
            number = len(arrivals)
            facts = {"num_prompt_tokens": 64, "max_tokens": 1 << 14, "problem_id": f"problem-{number // 8}"}
            arrivals.append(Arrival(request=number, step=len(steps), **facts))
            running[number] = 1
        count = len(running)
        at_ms += 12.0 + 0.1 * count
        running = {i: position for i, position in running.items() if position < lengths[i]}
        is_paused = bool(rng.random() < (0.9 if is_paused else 0.02))
        hits = np.minimum(rng.geometric(0.35, len(running)) - 1, nodes - 2).tolist()
        right = {} if is_paused else {
            i: min(most, lengths[i] - position) for (i, position), most in zip(running.items(), hits, strict=True)
        }  # fmt: skip
        step = Step(
            at_ms=round(at_ms, 3),
            ask_ms=0.0 if is_paused else 0.8,
            views=len(right),
            reason="drafts do not pay" if is_paused else "goodput",
            timing=Timing(count, count, 0, 0, count, 12.0 + 0.1 * count, True, waiting=requests - len(arrivals)),
            verified=verified,
            sources=(sum(one.drafted for one in verified), 0) if verified else (),
            candidates=tuple(_draft(i, running[i], most, answers[i], wrong, nodes) for i, most in right.items()),
        )
        steps.append(step)
    ends = {i: End(request=i, status="finished", token_ids=answer) for i, answer in enumerate(answers)}
    head = header(batch, cost=None, runner="v2", budget="auto", drafters=("history", "ngram"), model="made up")
    return Trace(head, tuple(arrivals), tuple(steps), ends)


def _draft(request: int, position: int, right: int, answer: list[int], wrong: list[int], nodes: int) -> Candidates:
    begin = (request * 31 + position) % (len(wrong) - nodes)
    tokens = answer[position : position + right] + wrong[begin : begin + nodes - right]
    # the last node stands beside the first wrong one
    parents = [*range(-1, nodes - 2), right - 1]
    source: int | list[int] = [k % 2 for k in range(nodes)] if request % 3 else 0
    return Candidates(request, position, tokens, parents, [300 + 50 * i for i in range(nodes)], source)
