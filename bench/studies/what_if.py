"""What this product would do on 8 to 10,000 engines: history's or a head's drafts, each ladder, and failures.

No paper has these figures: nothing here is compared with one. All inputs are free, and say where they were taken from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from vllm_specrollout.bench.studies.answers import AnswersInputs, draw_answers
from vllm_specrollout.bench.studies.cluster import Outcome, Site, simulate
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.group import Workload
from vllm_specrollout.bench.studies.report import Cell, Number, ResultTable, Share, StudyReport

from vllm_specrollout.cluster import dealing, ladder
from vllm_specrollout.scheduling.lengths import Lengths

ARMS = {
    "plain": ("off", False, False),
    "drafts": ("off", True, False),
    "by forecast": ("off", True, True),
    "move": ("move", True, True),
    "attach": ("attach", True, True),
}
"""Arm -> its ladder, whether anything is drafted, and whether problems are placed by `dealing.deal`."""


class WhatIfInputs(AnswersInputs):
    """All are free. Engines: a 7B model on one GPU each, 8 to a host, 8 hosts to a rack."""

    engines: tuple[Number, ...] = (8, 64, 256, 1024, 10000)
    per_host: Number = 8
    hosts_per_rack: Number = 8
    # of each engine at the beginning
    requests: Number = 32
    prompt: Number = 500
    # 15 GB of weights read at 3.35 TB/s, and half a millisecond; 3,000 tokens of KV cache; rows over an H100's 295
    base_ms: Number = 5.0
    request_ms: Number = 0.05
    row_ms: Number = 0.017
    knee_rows: Number = 256
    # 14 Gflop a token at half of 989 Tflop/s
    prefill_ms: Number = 0.03
    # drafting a token: history on the host; a head, and the lent 0.5B model (TLT, Tables 7 and 8: 7.9 and 12.2 ms a
    # cycle over 10 and 6 levels)
    history_ms: Number = 0.0
    head_ms: Number = 0.79
    model_ms: Number = 2.03
    # of the median request. History: 4.28 tokens a step from the second epoch on in bench/results/grpo.json; head: 4.55
    # (FastGRPO, Table 2, over 8 levels); model: 6.68 over 10 levels (TLT, Table 8)
    history_acceptance: Share = 0.77
    head_acceptance: Share = 0.80
    model_acceptance: Share = 0.88
    # set: requests differ more than SpecActor's, as some have no like in the history
    acceptance_spread: Number = 1.0
    # b_max, and the time between two reports (an engine's is 0.1 s)
    most: Number = 4
    beat_s: Number = 2.0
    # an engine that failed is back after
    restart_s: Number = 120.0
    # engines of the table of failures
    failing: tuple[Number, ...] = (64, 1024)


def site_of(inputs: WhatIfInputs, engines: int, drafter: str, arm: str) -> Site:
    """What an arm runs on."""
    mode, drafts, _ = ARMS[arm]
    own_ms = inputs.history_ms if drafter == "history" else inputs.head_ms
    return Site(
        engines=engines,
        per_host=int(inputs.per_host),
        places=2 * int(inputs.requests),
        verifier=StepLine(base=inputs.base_ms, request=inputs.request_ms, steep=inputs.row_ms, knee=inputs.knee_rows),
        drafters=(StepLine(base=own_ms), StepLine(base=inputs.model_ms)),
        drafts=drafts,
        prompt=int(inputs.prompt),
        samples=int(inputs.samples),
        prefill_ms=inputs.prefill_ms,
        rules=ladder.Rules(mode, int(inputs.most)),
        beat_ms=1e3 * inputs.beat_s,
        restart_ms=1e3 * inputs.restart_s,
    )


@lru_cache(maxsize=1)
def drawn(inputs: WhatIfInputs, engines: int, drafter: str, seed: int) -> tuple[Workload, dict[str, float]]:
    """Answers, and the forecasts of their problems: medians of the epoch before."""
    own = inputs.history_acceptance if drafter == "history" else inputs.head_acceptance
    requests, samples, known = engines * int(inputs.requests), int(inputs.samples), Lengths()
    before, work = (draw_answers(inputs, requests, (own, inputs.model_acceptance), seed, epoch) for epoch in (1, 0))
    for i, length in enumerate(before.length.tolist()):
        known.observe(f"p{i // samples}", length)
    return work, {f"p{i}": known.median(f"p{i}", samples) or 0.0 for i in range(requests // samples)}


def dealt(inputs: WhatIfInputs, engines: int, forecasts: dict[str, float] | None) -> dict[str, str]:
    """Request -> engine: by forecast, else problems in their order, as many to each engine."""
    samples, each = int(inputs.samples), int(inputs.requests)
    requests = [(f"r{i}", f"p{i // samples}") for i in range(engines * each)]
    if forecasts is None:
        return {request: f"e{i // each}" for i, (request, _) in enumerate(requests)}
    rooms = {f"e{i}": dealing.Room(2 * each) for i in range(engines)}
    return dealing.deal(requests, rooms, forecasts)


def run_arm(
    inputs: WhatIfInputs, engines: int, drafter: str, arm: str, seed: int, failed: tuple[tuple[float, range], ...] = ()
) -> Outcome:
    """One batch."""
    work, forecasts = drawn(inputs, engines, drafter, seed)
    site = replace(site_of(inputs, engines, drafter, arm), failures=failed)
    return simulate(work, site, dealt(inputs, engines, forecasts if ARMS[arm][2] else None))


def run(inputs: WhatIfInputs, seed: int) -> StudyReport:
    """Ours on 8 to 10,000 engines: history or head, ladders off, move and attach, and failures.

    All arms of one number of engines have the same answers.
    """
    figures: dict[str, float] = {}
    scaled = tuple(_scaled(inputs, seed, figures))
    failing = tuple(_failing(inputs, seed, figures))
    columns = ("engines", "drafter", "arm", "s", "of plain", "idle", "moved", "lent", "decide s")
    return StudyReport(
        title="What if: a 7B model, one GPU per engine, long-tailed answers",
        tables=(
            ResultTable("one batch of 32 requests per engine", columns, scaled),
            ResultTable(
                "failures, with history",
                ("engines", "arm", "what fails", "at", "s", "of none", "resubmitted"),
                failing,
            ),
        ),
        figures=figures,
        findings=(
            "All inputs are free: these are no measurements, and no paper has such figures.",
            "`decide s` is what all calls of `ladder.decide` took on this host, one after each change.",
        ),
    )


def _scaled(inputs: WhatIfInputs, seed: int, figures: dict[str, float]) -> Iterator[tuple[Cell, ...]]:
    for engines in map(int, inputs.engines):
        for drafter in ("history", "head"):
            for arm in ARMS if drafter == "history" else list(ARMS)[1:]:
                done = run_arm(inputs, engines, drafter, arm, seed)
                seconds = figures[f"{engines} {drafter} {arm} s"] = done.makespan_ms / 1e3
                plain = figures[f"{engines} history plain s"]
                idle = 1.0 - done.busy_ms / (engines * done.makespan_ms)
                counts = [str(done.counts[name]) for name in ("move", "attach")]
                cells = (f"{seconds:.1f}", f"{plain / seconds:.2f}x", f"{idle:.0%}", *counts, f"{done.decide_s:.1f}")
                yield (str(engines), drafter if arm != "plain" else "-", arm, *cells)


def _failing(inputs: WhatIfInputs, seed: int, figures: dict[str, float]) -> Iterator[tuple[Cell, ...]]:
    host = int(inputs.per_host)
    for engines, arm in itertools.product(map(int, inputs.failing), ("by forecast", "attach")):
        whole = run_arm(inputs, engines, "history", arm, seed).makespan_ms
        # the engines with the longest problems: those come first
        sizes = {"a host": host, "a rack": min(host * int(inputs.hosts_per_rack), engines // 2)}
        for (name, size), share in itertools.product(sizes.items(), (0.1, 0.5)):
            done = run_arm(inputs, engines, "history", arm, seed, ((share * whole, range(size)),))
            figures[f"{engines} {arm} {name} {share} s"] = done.makespan_ms / 1e3
            cells = f"{done.makespan_ms / 1e3:.1f}", f"{done.makespan_ms / whole:.2f}x", str(done.counts["resubmitted"])
            yield (str(engines), arm, f"{name} ({size})", f"{share:.0%}", *cells)
