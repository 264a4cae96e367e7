"""Runs both systems over a data set and compares: time, memory, and how many drafted tokens would be accepted.

Accepting is replayed: the recorded answer is what the target samples, so a drafted token is accepted if the answer goes
on with it. No model runs, and both systems are shown the same answers in the same order.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.tokens import encode_tokens

from ..runner.fields import Row
from .data import Data, Epoch, Key, RecordedProblem, synthetic
from .systems import LookedUp, Ours, System, Theirs

Report = Callable[[str, int], None]
_APPEND = 4
"""Tokens a step appends in the `append` row."""
_REPEATS = 3
"""Runs of which the median counts, for times of drafts: one pause of the host spoils a whole 99th percentile."""


@dataclass(slots=True)
class Replayed:
    """What one replay showed."""

    steps: int = 0
    tokens: int = 0
    # [draft calls] seconds per request
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def row(
    data: str, name: str, unit: str, ours: float, theirs: float | None, limit: float | None, *, is_least: bool = False
) -> Row:
    """One comparison, judged.

    Args:
        theirs: what ours is compared with: arctic-inference, or what the name says; None: a limit alone.
        limit: the ratio (where there is none, ours) must not be above it.
        is_least: for tokens: not below it.
    """
    ratio = None if theirs is None else ours / theirs
    value = ours if ratio is None else ratio
    is_met = None if limit is None else (value >= limit if is_least else value <= limit)
    return Row(data=data, name=name, unit=unit, ours=ours, theirs=theirs, ratio=ratio, limit=limit, is_met=is_met)


def accepted(tokens: Sequence[int], parents: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of the answer the draft holds on a path from the root."""
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    node, depth = -1, 0
    while depth < len(answer) and (node, answer[depth]) in children:
        node = children[node, answer[depth]]
        depth += 1
    return depth


def replay(system: System, data: Data, nodes: int, is_chain: bool, batch: int, begin: int) -> Replayed:
    """Draft, accept, append until all answers of the present are written; the first `begin` tokens are there."""
    result = Replayed()
    answers = {key: ids.tolist() for key, ids in data.answers.items()}
    waiting = list(answers)
    running: list[tuple[Key, int]] = []
    while waiting or running:
        free = batch - len(running)
        running += [(key, min(begin, len(answers[key]))) for key in waiting[:free]]
        running = [(key, at) for key, at in running if at < len(answers[key])]
        del waiting[:free]
        if not running:
            continue
        drafts, seconds = system.draft(running, nodes, is_chain)
        result.seconds += seconds
        for i, ((key, at), (tokens, parents, _)) in enumerate(zip(running, drafts, strict=True)):
            end = min(at + accepted(tokens, parents, answers[key][at : at + nodes]) + 1, len(answers[key]))
            system.append(key, at, end)
            result.steps += 1
            result.tokens += end - at
            running[i] = (key, end)
    return result


def append_all(system: System, data: Data, end: int) -> float:
    """Append the answers' first tokens up to `end`, all answers in turn; returns seconds."""
    answers, seconds = data.answers, 0.0
    for at in range(0, end, _APPEND):
        for key, answer in answers.items():
            if at < min(end, len(answer)):
                seconds += system.append(key, at, min(at + _APPEND, end, len(answer)))
    return seconds


def compare(data: Data, config: HistoryConfig, nodes: int, batch: int, begin: int, report: Report) -> list[Row]:
    """All rows of one data set.

    Args:
        nodes: most nodes of a draft.
        begin: tokens of each present answer that are there when drafting begins.
    """
    ours, bounded = (lambda: Ours(data, config)), (lambda: Theirs(data, is_bounded=True))
    lengths = [len(answer) for answer in data.answers.values()]
    made: dict[str, list[float]] = {"build": [], "append": [], "bytes": []}
    for maker in (ours, bounded):
        report(f"{data.name}: build and append", 0)
        gc.collect()
        system = maker()
        made["build"].append(system.build() / data.num_past_tokens * 1e6)
        made["append"].append(append_all(system, data, max(lengths)) / sum(lengths) * 1e6)
        made["bytes"].append(system.nbytes() / (data.num_past_tokens + sum(lengths)))
        del system
        report("", 1)
    kinds: dict[str, tuple[Callable[[], System], bool, int]] = {
        "our chain": (ours, True, 1),
        "our tree": (ours, False, _REPEATS),
        "their chain": (lambda: Theirs(data, is_bounded=False), True, 1),
        "their chain, bounded": (bounded, True, _REPEATS),
    }
    runs: dict[str, list[Replayed]] = {}
    for title, (make, is_chain, repeats) in kinds.items():
        report(f"{data.name}: {title}", 0)
        runs[title] = []
        for _ in range(repeats):
            gc.collect()
            runs[title].append(replay(begun(make(), data, begin), data, nodes, is_chain, batch, begin))
        report("", 1)
    return _rows(data, made, runs)


def begun(system: System, data: Data, begin: int) -> System:
    """The system with the past, and so many tokens of each present answer."""
    system.build()
    append_all(system, data, begin)
    return system


def _rows(data: Data, made: dict[str, list[float]], runs: dict[str, list[Replayed]]) -> list[Row]:
    name = data.name

    def percentile_us(title: str, percent: float) -> float:
        """Median over runs of a percentile of the seconds per draft."""
        return statistics.median(float(np.percentile(run.seconds, percent)) for run in runs[title]) * 1e6

    p50, p99 = ([percentile_us(title, q) for title in ("our tree", "their chain, bounded")] for q in (50, 99))
    texts = data.answers.values()
    rest_bytes = sum(len(encode_tokens(text)) for text in texts) / sum(map(len, texts))
    chain, tree, full, bounded = (own[0].tokens_per_step for own in runs.values())
    # a drafter that is right about every token but the new ones, which nobody can know
    most = "accepted, tree to most possible"
    possible = [] if data.new_share is None else [row(name, most, "tokens/step", tree, 1 / data.new_share, None)]
    return [
        row(name, "build", "us/token", *made["build"], 1 / 4),
        row(name, "append", "us/token", *made["append"], 1 / 3),
        row(name, "draft_p50", "us/request", *p50, 1 / 3),
        row(name, "draft_p99", "us/request", *p99, 1 / 3),
        row(name, "live_bytes", "B/token", *made["bytes"], 1 / 5),
        row(name, "rest_bytes", "B/token", rest_bytes, None, 3.0),
        row(name, "accepted", "tokens/step", chain, full, 1.0, is_least=True),
        row(name, "accepted, their bounds", "tokens/step", chain, bounded, 1.0, is_least=True),
        *possible,
        row(name, "accepted, tree to chain", "tokens/step", tree, chain, 1.15, is_least=True),
    ]


def on_the_device(
    data: Data, config: HistoryConfig, sizes: Sequence[int], is_chain: bool, batch: int, report: Report
) -> list[Row]:
    """Tokens a step of what a device looks up, beside the index's drafts of as many nodes."""
    rows, (form, limit) = [], ("chain", 0.97) if is_chain else ("tree", 0.95)
    for nodes in sizes:
        report(f"{data.name}: {form}s of {nodes} looked up on the device", 0)
        makers = (LookedUp, Ours)
        runs = [replay(begun(make(data, config), data, 0), data, nodes, is_chain, batch, 0) for make in makers]
        looked_up, ours = (run.tokens_per_step for run in runs)
        name = f"accepted, {form} of {nodes}: looked up to the index"
        rows.append(row(data.name, name, "tokens/step", looked_up, ours, limit, is_least=True))
        report("", 1)
    return rows


def flatness(config: HistoryConfig, nodes: int, seed: int, sizes: tuple[int, int], report: Report) -> Row:
    """The median draft at 1,000,000 tokens of a problem to that at 10,000."""
    medians = []
    for tokens in sizes:
        report(f"drafts of a problem with {tokens:,} tokens", 0)
        per_answer = min(16_384, tokens // 32)
        past = max(1, tokens // (16 * per_answer) - 1)
        data = synthetic(1, 16, per_answer, past, seed)
        begin = per_answer - 256
        system = begun(Ours(data, config), data, begin)
        medians.append(statistics.median(replay(system, data, nodes, False, 16, begin).seconds) * 1e6)
        report("", 1)
    return row("synthetic", f"draft_p50 at {sizes[1]:,} to {sizes[0]:,}", "us/request", medians[1], medians[0], 1.5)


def many_problems(data: Data, config: HistoryConfig, count: int, report: Report) -> list[Row]:
    """`count` indices open at once, each with one answer of the past and one that runs: bytes, and a draft's cost."""
    report(f"{count:,} problems at once", 0)
    few = [
        RecordedProblem(problem.prompt, tuple(Epoch(e.answers[:1], e.rewards[:1]) for e in problem.epochs[-2:]))
        for problem in data.problems
    ]
    many = Data("recorded", tuple(few[i % len(few)] for i in range(count)))
    system = begun(Ours(many, config), many, 0)
    half = min(len(problem.present.answers[0]) for problem in few) // 2
    asks = [(key, half) for key in many.answers]
    for key, _ in asks:
        system.append(key, 0, half)
    seconds = [s for at in range(0, count, 64) for s in system.draft(asks[at : at + 64], 16, False)[1]]
    tokens = many.num_past_tokens + half * count + sum(len(problem.prompt) for problem in many.problems)
    report("", 1)
    title = f"{count:,} problems"
    return [
        row("recorded", f"{title}: live_bytes", "B/token", system.nbytes() / tokens, None, None),
        row("recorded", f"{title}: draft_p50", "us/request", statistics.median(seconds) * 1e6, None, None),
    ]
