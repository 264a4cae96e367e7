"""The page of a rollout: one HTML file with its own data, which asks no network for anything.

What belongs here: which columns the page gets, and how they are packed. Its looks are page.html, page.css and the
scripts beside this file. A browser unpacks the summary when it opens the page, and the steps and trees of a request
when somebody looks at it: they are in blocks of some requests each. The requests that ended last come first; what no
longer fits into the page is left out, trees before steps.
"""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_specrollout.replay.records import Trace, TraceError
from vllm_specrollout.report.rollouts import Steps, rollouts_of, steps_of
from vllm_specrollout.report.walk import Ints, Walk, sources_of, walk

FORMAT = 1
PARTS = 24
"""Into so many a request's steps are divided for its bar, which shows the mean of each."""
SPEED = 10
"""The mean tokens per step of a part are kept in tenths, in a byte."""
MOST_MB = 29
"""Megabytes of a page, which a browser opens in a second or two."""
LOOPING, RUN = 0.5, 8
"""Share of the median's misses that a looping answer has less of, and of its runs of tokens that came before."""
_BLOCK_ROWS = 1 << 11
# more than where a request's blocks are takes in the summary, and than what stands around a block
_PLACE_BYTES, _AROUND_BYTES = 12, 64
_HERE = Path(__file__).parent
_SCRIPTS = ("data.js", "chart.js", "table.js", "request.js", "page.js")


def page_of(
    trace: Trace, name: str, most_bytes: int = MOST_MB * 1_000_000, text_of: Callable[[int], str] | None = None
) -> str:
    """The page.

    Args:
        name: of the trace's file, for the title.
        most_bytes: of the page; the summary is never left out, and of the rest half, at most, are steps.
        text_of: a token's text; None: the page has numbers alone.

    Raises:
        TraceError: the trace has no step, speaks of requests that it does not have, or is too long.
    """
    if not trace.steps:
        raise TraceError("the trace holds no step, so there is nothing to draw", "record until a request has run")
    # a file's name may hold bytes that no page can
    name = name.encode(errors="replace").decode()
    table = walk(trace)
    summary = summary_of(trace, table, steps_of(trace, table), name)
    words = [] if text_of is None else [("words", _packed(_words(trace, text_of)))]
    left = most_bytes - len(_assembled(name, [("summary", _packed(summary)), *words]))
    left -= _PLACE_BYTES * len(trace.arrivals)
    blocks = _Blocks(table, _latest_first(table))
    step_blocks, block_of = blocks.packed(blocks.steps, left // 2)
    left -= sum(map(len, step_blocks))
    # trees say nothing without the steps that they belong to
    tree_blocks, trees_of = blocks.packed(lambda ids: _trees(trace, table, ids), left, len(step_blocks))
    summary["requests"] |= {"block": block_of.tolist(), "trees": trees_of.tolist()}
    islands = [("summary", _packed(summary)), *words]
    islands += [(f"steps{i}", block) for i, block in enumerate(step_blocks)]
    islands += [(f"trees{i}", block) for i, block in enumerate(tree_blocks)]
    return _assembled(name, islands)


def summary_of(trace: Trace, table: Walk, steps: Steps, name: str) -> dict[str, Any]:
    """All that the page shows without a look at a single request."""
    facts = {
        key: getattr(trace.header, key)
        for key in ("model", "runner", "budget", "shape", "max_num_seqs", "max_draft_tokens", "max_depth")
    }
    num_drafters = table.proposed_by.shape[1]
    named = [*trace.header.drafters, *(f"drafter {i}" for i in range(len(trace.header.drafters), num_drafters))]
    return {
        "format": FORMAT,
        "file": name,
        "header": facts,
        "drafters": named[:num_drafters],
        "is_cut": trace.is_cut,
        "reasons": table.reasons,
        "rollouts": [asdict(one) for one in rollouts_of(trace, table, steps)],
        "steps": {
            "begin": _tenths(steps.begin),
            "end": _tenths(steps.end),
            "running": steps.running.tolist(),
            "waiting": steps.waiting.tolist(),
            "nodes": steps.nodes.tolist(),
            "accepted": steps.accepted.tolist(),
            "tokens": steps.tokens.tolist(),
            "why": table.step_why.tolist(),
        },
        "requests": _requests(trace, table),
        "parts": PARTS,
        "speed": _base64(_speeds(table)),
        "why": _base64(_whys(table)),
    }


def _requests(trace: Trace, table: Walk) -> dict[str, Any]:
    """Columns over the requests; names of problems and of endings stand apart."""
    counts, has_rows = np.diff(table.start), np.diff(table.start) > 0
    last = np.where(has_rows, table.start[1:] - 1, 0)
    rows = table.step if len(table.step) else np.zeros(1, np.int32)
    problems, statuses = dict[str, int](), dict[str, int]()
    verified, accepted = _by_request(table, table.nodes), _by_request(table, table.accepted)
    missed = (1 + verified - accepted) / (1 + verified)
    ends = [trace.ends.get(arrival.request) for arrival in trace.arrivals]
    columns = {
        "problem": [problems.setdefault(arrival.problem_id, len(problems)) for arrival in trace.arrivals],
        "prompt": [arrival.num_prompt_tokens for arrival in trace.arrivals],
        "status": [statuses.setdefault("no end" if end is None else end.status, len(statuses)) for end in ends],
        "tokens": _by_request(table, table.gained).tolist(),
        "steps": counts.tolist(),
        "first": rows[np.where(has_rows, table.start[:-1], 0)].tolist(),
        "last": rows[last].tolist(),
        "drafted": _by_request(table, table.nodes > 0).tolist(),
        "verified": verified.tolist(),
        "accepted": accepted.tolist(),
        # drafts miss half as often as the median request's, and half of the answer repeats itself
        "looping": [
            bool(is_far) and end is not None and repeats(end.token_ids) > LOOPING
            for is_far, end in zip(missed < LOOPING * np.median(missed if ends else 1.0), ends, strict=True)
        ],
        # versions that its first and its last token came of
        "weights": [arrival.weights_version for arrival in trace.arrivals],
        "last_weights": [
            arrival.weights_version if end is None else end.weights_version
            for arrival, end in zip(trace.arrivals, ends, strict=True)
        ],
    }
    return {**columns, "problems": list(problems), "statuses": list(statuses)}


def repeats(token_ids: Sequence[int]) -> float:
    """Share of an answer's runs of `RUN` tokens that stand in it before."""
    runs = [tuple(token_ids[i : i + RUN]) for i in range(len(token_ids) - RUN + 1)]
    return 1.0 - len(set(runs)) / max(len(runs), 1)


def _words(trace: Trace, text_of: Callable[[int], str]) -> dict[str, str]:
    """Text of every token that a draft or an answer has."""
    used = {token for step in trace.steps for one in step.candidates for token in one.token_ids}
    used.update(token for end in trace.ends.values() for token in end.token_ids)
    return {str(token): text_of(token).encode(errors="replace").decode() for token in sorted(used)}


def _by_request(table: Walk, values: np.ndarray) -> Ints:
    return np.bincount(table.owner, values, len(table.start) - 1).astype(np.int64)


def _part_of(table: Walk) -> Ints:
    """[K] the part of all requests' parts that a row belongs to. One with few steps has a part for each."""
    owner, counts = table.owner, np.diff(table.start)
    rank = np.arange(len(owner)) - table.start[owner]
    return owner * PARTS + rank * np.minimum(counts, PARTS)[owner] // np.maximum(counts, 1)[owner]


def _speeds(table: Walk) -> bytes:
    size, part = (len(table.start) - 1) * PARTS, _part_of(table)
    mean = np.bincount(part, table.gained, size) / np.maximum(np.bincount(part, minlength=size), 1)
    return np.minimum(np.rint(mean * SPEED), 255).astype(np.uint8).tobytes()


def _whys(table: Walk) -> bytes:
    """The most frequent reason of each part."""
    size, part = (len(table.start) - 1) * PARTS, _part_of(table)
    most, found = np.zeros(size, np.int64), np.zeros(size, np.uint8)
    for reason in range(min(len(table.reasons), 256)):
        count = np.bincount(part[table.why == reason], minlength=size)
        found[count > most] = reason
        most = np.maximum(most, count)
    return found.tobytes()


def _latest_first(table: Walk) -> Ints:
    """Requests that ran, the one that ended last first."""
    ran = np.flatnonzero(np.diff(table.start) > 0)
    return ran[np.argsort(-table.step[table.start[ran + 1] - 1], kind="stable")]


class _Blocks:
    """Requests by blocks, in the order in which they are kept."""

    def __init__(self, table: Walk, order: Ints) -> None:
        self._table = table
        block = np.maximum(np.cumsum(np.diff(table.start)[order]) - 1, 0) // _BLOCK_ROWS
        self._blocks = np.split(order, np.flatnonzero(np.diff(block)) + 1) if len(order) else []

    def packed(
        self, content: Callable[[Ints], dict[str, Any]], most_bytes: int, num_most: int | None = None
    ) -> tuple[list[str], Ints]:
        """Blocks as long as there is room; and [R] the block of each request, -1: it is left out."""
        found: list[str] = []
        block_of = np.full(len(self._table.start) - 1, -1, np.int64)
        for number, ids in enumerate(self._blocks[:num_most]):
            block = _packed({"ids": ids.tolist(), **content(ids)})
            most_bytes -= len(block) + _AROUND_BYTES
            if most_bytes < 0:
                break
            found.append(block)
            block_of[ids] = number
        return found, block_of

    def steps(self, ids: Ints) -> dict[str, Any]:
        """Rows of these requests, one request behind another."""
        table, rows = self._table, _rows(self._table, ids)
        columns = {name: getattr(table, name)[rows].tolist() for name in ("gained", "nodes", "accepted", "why")}
        # as differences they pack better, and most are 1
        return {"step": np.diff(table.step[rows], prepend=0).tolist(), **columns}


def _rows(table: Walk, ids: Ints) -> Ints:
    return np.concatenate([np.arange(table.start[i], table.start[i + 1]) for i in ids.tolist()])


def _trees(trace: Trace, table: Walk, ids: Ints) -> dict[str, Any]:
    """Answers and drafts of these requests, one behind another; `sizes` has the nodes of each row's draft."""
    trees = [table.trees[i] if i >= 0 else None for i in table.tree[_rows(table, ids)].tolist()]
    drafts = [tree for tree in trees if tree is not None]
    answers = [trace.ends[i].token_ids if i in trace.ends else [] for i in ids.tolist()]
    nats = np.array(_flat(tree.nats for tree in drafts), np.float64)
    return {
        "lengths": [len(answer) for answer in answers],
        "answers": _flat(answers),
        "sizes": [0 if tree is None else len(tree.token_ids) for tree in trees],
        "tokens": _flat(tree.token_ids for tree in drafts),
        "parents": _flat(tree.parents for tree in drafts),
        "percent": np.rint(100 * np.exp(nats / -1000)).astype(int).tolist(),
        "sources": _flat(sources_of(tree) for tree in drafts),
    }


def _flat(lists: Any) -> list[int]:
    return [value for one in lists for value in one]


def _tenths(values: np.ndarray) -> list[float]:
    """Milliseconds, as long as they need be."""
    return np.round(values, 1).tolist()


def _packed(value: dict[str, Any]) -> str:
    return _base64(gzip.compress(msgspec.json.encode(value), 6, mtime=0))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _assembled(name: str, islands: Sequence[tuple[str, str]]) -> str:
    parts = {
        "title": html.escape(name),
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "data": "\n".join(f'<script type="text/plain" id="{key}">{text}</script>' for key, text in islands),
        "script": "\n".join((_HERE / script).read_text(encoding="utf-8") for script in _SCRIPTS),
    }
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"<!-- (title|style|data|script) -->", lambda found: parts[found[1]], template)
