"""SpecActor, section 5.4: what each technique adds, from plain decoding to drafters lent by workers that are free.

Every arm runs the same answers with the same acceptances, on the simulator of whole clusters. Windows follow the batch,
so the paper's decoupling and its reconfiguration are one arm; its races are the product's lending. Beside it, what the
product's own planner would do with these GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from vllm_specrollout.bench.studies.answers import AnswersInputs, Workload, draw_answers
from vllm_specrollout.bench.studies.cluster import Outcome, Site, simulate
from vllm_specrollout.bench.studies.formulas import MAX_WINDOW, StepLine
from vllm_specrollout.bench.studies.report import Cell, Number, ResultTable, Share, StudyReport

from vllm_specrollout.cluster.planner import Plan, plan_devices
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.rates import AffineTime

ARMS = {
    "plain": ("", 1.0),
    "vanilla": ("plain", 0.974),
    "disaggregated": ("plain", 1.334),
    "decoupled": ("vanilla", 0.769 * 0.833),
    "ladder": ("decoupled", 0.833),
}
"""In the order of the table: the arm that each is held against, and the printed ratio of their times (section 5.4)."""


class SpecActorInputs(AnswersInputs):
    """Those that are `text` are of section 5.1, where no other one is named."""

    # text; a drafter uses one GPU (section 4.1)
    gpus: Number = 256
    verifier_gpus: Number = 4
    drafter_gpus: Number = 1
    requests: Number = 16384
    # free, set for time: the time between two reports is an eighth of 2 s, as answers are
    shortened: Number = 8
    # free, set: with seeds that follow each other, as the last few answers decide a rollout and one says little
    rollouts: Number = 3
    # text: below 13 ms at batch 1
    base_ms: Number = 13.0
    # free, set: 3,000 tokens of KV cache read at 3.35 TB/s by each of 4 GPUs
    request_ms: Number = 0.06
    # free, set: 13 ms over the 295 rows at which an H100 computes as long as it reads weights, per row beyond the knee;
    # TLT's Table 4 says 0.04 to 0.08
    row_ms: Number = 0.044
    # free, set: as in tlt-table-4
    knee_rows: Number = 256
    # free, per token of the 0.5B model and of the 1.5B model, which is lent. TLT, Table 8, for the first: 12.2 ms of
    # drafting over the 6 levels that an accept length of 6.68 needs at least; the other set
    draft_ms: tuple[Number, Number] = (2.03, 3.0)
    # free, set: per token and request, KV cache of 3,000 tokens read by one GPU
    draft_request_ms: tuple[Number, Number] = (0.014, 0.03)
    # free, set with the ordering in sight, of the median request: stragglers' 48.7 to 72.3 % of drafts accepted
    # (section 5.2) are 0.73 to 0.87 per token in windows of 4
    acceptance: tuple[Share, Share] = (0.88, 0.90)
    # free, set: b_max
    most: Number = 4
    # free, set: 64 Gflop a token on 4 GPUs at half of 989 Tflop/s
    prefill_ms: Number = 0.03


def draw_workload(inputs: SpecActorInputs, seed: int) -> Workload:
    """All answers of one rollout."""
    return draw_answers(inputs, int(inputs.requests), inputs.acceptance, seed)


def _verifier(inputs: SpecActorInputs) -> StepLine:
    return StepLine(base=inputs.base_ms, request=inputs.request_ms, steep=inputs.row_ms, knee=inputs.knee_rows)


def sites(inputs: SpecActorInputs) -> dict[str, Site]:
    """One per arm: groups whose drafter runs on the verifier's GPUs, and groups with a GPU of its own for it."""
    terms = zip(inputs.draft_ms, inputs.draft_request_ms, strict=True)
    first, second = (StepLine(base=base, request=request) for base, request in terms)
    together = int(inputs.gpus // inputs.verifier_gpus)
    vanilla = Site(
        engines=together,
        per_host=together,
        places=int(inputs.requests),
        verifier=_verifier(inputs),
        drafters=(first, second),
        prompt=0,
        prefill_ms=inputs.prefill_ms,
        beat_ms=2e3 / inputs.shortened,
    )
    disaggregated = replace(vanilla, engines=int(inputs.gpus // (inputs.verifier_gpus + inputs.drafter_gpus)))
    decoupled = replace(disaggregated, is_apart=True)
    lent = replace(decoupled, ladder="attach", most=int(inputs.most))
    arms = (replace(vanilla, drafts=False), vanilla, disaggregated, decoupled, lent)
    return dict(zip(ARMS, arms, strict=True))


def plans(inputs: SpecActorInputs, work: Workload) -> tuple[Plan, ...]:
    """What `plan_devices` says of the batch at the beginning: the best of each kind of group, fastest first."""
    batch, row = len(work.length) / (inputs.gpus // inputs.verifier_gpus), inputs.row_ms
    # the verifier's line beyond the knee, where groups begin, and right for coupled groups' batch
    fixed = max(inputs.base_ms - row * inputs.knee_rows, 0.0)
    verify = AffineTime((_verifier(inputs).ms(batch) - fixed) / batch, fixed, row)
    planned = DrafterProfile(
        draft=AffineTime(inputs.draft_request_ms[0], inputs.draft_ms[0]),
        verify={int(inputs.verifier_gpus): verify},
        match=float(work.acceptance[0].mean()),
    )
    return plan_devices(planned, int(inputs.gpus), len(work.length), max_window=MAX_WINDOW)


def _planned(found: tuple[Plan, ...]) -> ResultTable:
    """What all groups yield together, by the planner's formula."""
    columns = ("groups", "drafting + verifying GPUs", "requests", "window", "tokens/s")
    devices = ((one, f"{one.draft_gpus} + {one.verify_gpus}", f"{one.total_tokens_per_s:,.0f}") for one in found)
    rows = tuple((one.mode.value, gpus, str(one.batch), str(one.window), speed) for one, gpus, speed in devices)
    return ResultTable("Algorithm 1 as the product plans, for the batch at the beginning", columns, rows)


def run_arms(inputs: SpecActorInputs, seed: int) -> dict[str, Outcome]:
    """Every arm on the same answers, dealt in their order, as many to each engine."""
    work, found = draw_workload(inputs, seed), {}
    for name, site in sites(inputs).items():
        homes = np.arange(len(work.length)) * site.engines // len(work.length)
        found[name] = simulate(work, site, {f"r{i}": f"e{home}" for i, home in enumerate(homes.tolist())})
    return found


def run(inputs: SpecActorInputs, seed: int) -> StudyReport:
    """SpecActor, section 5.4: what each technique adds to a rollout on 256 GPUs.

    All arms in several rollouts.
    """
    rollouts = [run_arms(inputs, seed + number) for number in range(int(inputs.rollouts))]
    arms, known = {name: [outcomes[name] for outcomes in rollouts] for name in ARMS}, sites(inputs)
    figures = {f"{name} s": float(np.mean([one.makespan_ms for one in own])) / 1e3 for name, own in arms.items()}
    idle = {name: float(np.mean([one.idle(known[name].engines) for one in own])) for name, own in arms.items()}
    figures |= {f"{name} idle share": share for name, share in idle.items()}
    busy = [one.running(np.linspace(0.0, one.makespan_ms, 200)) >= 64 * known["plain"].engines for one in arms["plain"]]
    figures["plain share with 64 running"] = float(np.mean(busy))
    chosen = plans(inputs, draw_workload(inputs, seed))
    columns = ("arm", "groups", "s", "ours", "paper", "faster in", "of plain", "idle", "lent")
    return StudyReport(
        title="SpecActor, section 5.4: ablation on DAPO-32B-20K, Qwen2.5-32B, 256 Hopper GPUs, TP 4",
        tables=(
            ResultTable(
                "mean of the rollouts, all arms on the same answers",
                columns,
                tuple(_row(name, known[name], arms, figures) for name in ARMS),
            ),
            _planned(chosen),
        ),
        figures=figures | {f"planned {one.mode.value} tokens/s": one.total_tokens_per_s for one in chosen[::-1]},
        findings=tuple(_findings(figures)),
    )


def _row(name: str, site: Site, arms: dict[str, list[Outcome]], figures: dict[str, float]) -> tuple[Cell, ...]:
    own, (before, printed) = arms[name], ARMS[name]
    seconds, held = figures[f"{name} s"], ("-", "-", "-")
    if before:
        wins = sum(a.makespan_ms < b.makespan_ms for a, b in zip(own, arms[before], strict=True))
        ours = f"{figures[f'{before} s'] / seconds:.2f}x of {before}"
        held = ours, f"{1.0 / printed:.2f}x", f"{wins} of {len(own)}"
    of_plain, idle = f"{figures['plain s'] / seconds:.2f}x", f"{figures[f'{name} idle share']:.0%}"
    return name, str(site.engines), f"{seconds:.1f}", *held, of_plain, idle, str(sum(o.counts["attach"] for o in own))


def _findings(figures: dict[str, float]) -> Iterator[str]:
    seconds = {name: figures[f"{name} s"] for name in ARMS}
    order = [seconds[name] for name in ("plain", "vanilla", "decoupled", "ladder")]
    holds = all(a > b for a, b in itertools.pairwise(order))
    plain, vanilla, apart = seconds["plain"], seconds["vanilla"], seconds["disaggregated"]
    yield (
        f"Fitted: the lengths alone, to two figures of plain rollout (idle {figures['plain idle share']:.0%} for 50 %,"
        f" 64 or more running for {figures['plain share with 64 running']:.0%} of the time for 20 %). All ratios are"
        " predictions."
    )
    yield (
        f"The ordering plain < vanilla < decoupled < ladder {'holds' if holds else 'does NOT hold'} for the means,"
        " under these inputs."
    )
    yield (
        f"Vanilla does not come out at {ARMS['vanilla'][1] - 1:+.1%} of plain but at {vanilla / plain - 1:+.1%}:"
        " most of plain rollout runs at small batch, where coupled drafts pay."
    )
    yield (
        f"Disaggregation does not come out at {ARMS['disaggregated'][1] - 1:+.1%} of plain but at"
        f" {apart / plain - 1:+.1%}; against vanilla it is {apart / vanilla - 1:+.1%}."
    )
