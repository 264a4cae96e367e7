"""What this product would do on 8 to 1,024 engines: history's drafts, each ladder, and failures.

No paper has these figures: nothing here is compared with one. Inputs say where they were taken from; the one run on a
GPU is repeated first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

from vllm_specrollout.bench.studies.answers import AnswersInputs, Workload, draw_answers
from vllm_specrollout.bench.studies.cluster import Outcome, Site, simulate
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.report import Cell, Number, ResultTable, Share, StudyReport, error_of

from vllm_specrollout.cluster import dealing
from vllm_specrollout.replay.anchors import MEASURED, RECKONED, TAIL_RECKONED
from vllm_specrollout.scheduling.lengths import Lengths

STEPS = {"measured": MEASURED, "tail reckoned": TAIL_RECKONED, "reckoned": RECKONED}
TRY = {
    "stock, s": 1.75128,
    "stock, steps": 305.0,
    "ours, s": 1.40456,
    "ours, steps": 148.0,
    "speed-up": 1.24686,
    "tokens per request and step": 1.38437,
}
"""What `specrollout try` measured (bench/results/try.json, epoch 1): 16 prompts, 8 samples, 64 at once, 384 tokens."""
ARMS = {
    "plain": ("off", False, False),
    "drafts": ("off", True, False),
    "by forecast": ("off", True, True),
    "move": ("move", True, True),
    "attach": ("attach", True, True),
}
"""Arm -> its ladder, whether anything is drafted, and whether problems are placed by `dealing.deal`."""


class WhatIfInputs(AnswersInputs):
    """All but the steps (replay/anchors.py) are free. Engines: a 7B model on one GPU each, 8 to a host, 8 hosts to a
    rack."""

    engines: tuple[Number, ...] = (8, 64, 256, 1024)
    # batches, with seeds that follow each other
    rollouts: Number = 5
    per_host: Number = 8
    hosts_per_rack: Number = 8
    # of each engine at the beginning
    requests: Number = 32
    prompt: Number = 500
    # of a token
    prefill_ms: Number = RECKONED.prompt_row
    # drafting a token by the lent 0.5B model (TLT, Table 8: 12.2 ms a cycle over 6 levels)
    model_ms: Number = 2.03
    # of the median request. History: 4.28 tokens a step from the second epoch on in bench/results/grpo.json; model:
    # 6.68 over 10 levels (TLT, Table 8)
    history_acceptance: Share = 0.77
    model_acceptance: Share = 0.88
    # set: requests differ more than SpecActor's, as some have no like in the history
    acceptance_spread: Number = 1.0
    # b_max, and the time between two reports (an engine's is 0.1 s)
    most: Number = 4
    beat_s: Number = 2.0
    # an engine that failed is back after
    restart_s: Number = 120.0
    # engines of the table of failures
    failing: tuple[Number, ...] = (64, 256)


class TryInputs(AnswersInputs):
    """Of the run on the H200. Lengths are spread as the policy's recorded answers are (tests/traces/grpo), about the
    median that gives the run's mean of 74 tokens."""

    longest: Number = 384
    median_length: Number = 48
    length_spread: Number = 0.93
    length_shared: Share = 0.98
    samples: Number = 8
    # fitted to the run's tokens per request and step, and to its number of steps
    acceptance: Share = 0.045
    acceptance_spread: Number = 2.0
    # set with these in sight: in a first epoch drafts are texts of siblings that are ahead, so long answers have them
    acceptance_common: Share = 1.0
    acceptance_with_length: float = 1.0


@lru_cache(maxsize=8)
def drawn(inputs: WhatIfInputs, engines: int, seed: int) -> tuple[Workload, dict[str, float]]:
    """Answers, and the forecasts of their problems: medians of the epoch before."""
    requests, samples, known = engines * int(inputs.requests), int(inputs.samples), Lengths()
    matched = inputs.history_acceptance, inputs.model_acceptance
    before, work = (draw_answers(inputs, requests, matched, seed, epoch) for epoch in (1, 0))
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
    inputs: WhatIfInputs, steps: str, engines: int, arm: str, seed: int, failed: tuple[tuple[float, range], ...] = ()
) -> Outcome:
    """One batch."""
    (work, forecasts), (mode, drafts, is_placed) = drawn(inputs, engines, seed), ARMS[arm]
    site = Site(
        engines=engines,
        per_host=int(inputs.per_host),
        places=2 * int(inputs.requests),
        verifier=STEPS[steps],
        drafters=(StepLine(base=0.0), StepLine(base=inputs.model_ms)),
        drafts=drafts,
        prompt=int(inputs.prompt),
        samples=int(inputs.samples),
        prefill_ms=inputs.prefill_ms,
        prompt_ms=STEPS[steps].prompt_ms if drafts else 0.0,
        ladder=mode,
        most=int(inputs.most),
        beat_ms=1e3 * inputs.beat_s,
        failures=failed,
        restart_ms=1e3 * inputs.restart_s,
    )
    return simulate(work, site, dealt(inputs, engines, forecasts if is_placed else None))


def repeat_try(inputs: TryInputs, seed: int) -> dict[str, float]:
    """The run on the H200 once more: one engine with 64 places, 128 requests, stock and ours.

    Its engine is taken to draft in every step, as the mean of its steps suggests: no trace of them was kept. Steps that
    hold prompts are in that mean.
    """
    work = draw_answers(inputs, 128, (inputs.acceptance, inputs.acceptance), seed)
    first = {f"r{i}": "e0" for i in range(64)}
    stock = Site(
        engines=1,
        per_host=1,
        places=64,
        verifier=MEASURED,
        drafters=(StepLine(base=0.0), StepLine(base=0.0)),
        drafts=False,
        samples=int(inputs.samples),
        prefill_ms=0.0,
        beat_ms=10.0,
    )
    plain = simulate(work, stock, first)
    ours = simulate(work, replace(stock, drafts=True, verifier=replace(MEASURED, plain=MEASURED.drafted)), first)
    took = plain.makespan_ms / 1e3, plain.steps, ours.makespan_ms / 1e3, ours.steps
    return dict(zip(TRY, (*took, took[0] / took[2], ours.tokens / ours.request_steps), strict=True))


def run(inputs: WhatIfInputs, seed: int) -> StudyReport:
    """Ours on 8 to 1,024 engines: history, ladders off, move and attach, and failures.

    All arms of one number of engines have the same answers.
    """
    figures: dict[str, float] = {}
    seeds = range(seed, seed + int(inputs.rollouts))
    return StudyReport(
        title="What if: a 7B model, one GPU per engine, long-tailed answers",
        tables=(
            ResultTable(
                "the run on an H200, repeated", ("", "ours", "measured", "error"), tuple(_repeated(seeds, figures))
            ),
            ResultTable(
                "batches of 32 requests per engine",
                ("steps", "engines", "arm", "s", "of plain", "idle", "moved", "lent"),
                tuple(_scaled(inputs, seeds, figures)),
            ),
            ResultTable(
                "failures, with measured steps",
                ("engines", "arm", "what fails", "at", "s", "of none", "resubmitted"),
                tuple(_failing(inputs, seeds)),
            ),
        ),
        figures=figures,
        findings=(
            f"Means of {len(seeds)} batches; in brackets the least and the most of them.",
            "No paper has such figures. `measured` steps are those of an H200 with an earlier design; `tail reckoned`"
            " replaces what was not measured, batches below 12; `reckoned` is what ships, which has run on no GPU.",
        ),
    )


def _spread(values: Sequence[float], shape: str) -> str:
    return f"{shape} ({shape} to {shape})".format(fmean(values), min(values), max(values))


def _seconds(runs: Sequence[Outcome]) -> str:
    return _spread([one.makespan_ms / 1e3 for one in runs], "{:.1f}")


def _repeated(seeds: range, figures: dict[str, float]) -> Iterator[tuple[Cell, ...]]:
    runs = [repeat_try(TryInputs(), seed) for seed in seeds]
    for name, measured in TRY.items():
        values = [one[name] for one in runs]
        ours = figures[f"try, {name}"] = fmean(values)
        shape = "{:.0f}" if measured > 10.0 else "{:.2f}"
        yield name, _spread(values, shape), shape.format(measured), error_of(ours, measured)


def _scaled(inputs: WhatIfInputs, seeds: range, figures: dict[str, float]) -> Iterator[tuple[Cell, ...]]:
    for engines, steps in itertools.product(map(int, inputs.engines), STEPS):
        found = {arm: [run_arm(inputs, steps, engines, arm, seed) for seed in seeds] for arm in ARMS}
        for arm, own in found.items():
            gains = [a.makespan_ms / b.makespan_ms for a, b in zip(found["plain"], own, strict=True)]
            figures[f"{steps} {engines} {arm} x"] = fmean(gains)
            idle = [one.idle(engines) for one in own]
            counts = (_spread([one.counts[name] for one in own], "{:.0f}") for name in ("move", "attach"))
            yield (steps, str(engines), arm, _seconds(own), _spread(gains, "{:.2f}x"), _spread(idle, "{:.0%}"), *counts)


def _failing(inputs: WhatIfInputs, seeds: range) -> Iterator[tuple[Cell, ...]]:
    for engines, arm in itertools.product(map(int, inputs.failing), ("by forecast", "attach")):
        # the engines with the longest problems: those come first
        sizes = {
            "a host": int(inputs.per_host),
            "a rack": min(int(inputs.per_host * inputs.hosts_per_rack), engines // 2),
        }
        whole = [run_arm(inputs, "measured", engines, arm, seed).makespan_ms for seed in seeds]
        for (name, size), share in itertools.product(sizes.items(), (0.1, 0.5)):
            runs = [
                run_arm(inputs, "measured", engines, arm, seed, ((share * ms, range(size)),))
                for seed, ms in zip(seeds, whole, strict=True)
            ]
            ratios = [one.makespan_ms / ms for one, ms in zip(runs, whole, strict=True)]
            shown = (
                _seconds(runs),
                _spread(ratios, "{:.2f}x"),
                _spread([one.counts["resubmitted"] for one in runs], "{:.0f}"),
            )
            yield (str(engines), arm, f"{name} ({size})", f"{share:.0%}", *shown)
