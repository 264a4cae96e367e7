"""SpecActor, section 5.4: what each technique adds, from plain decoding to racing freed workers.

Every arm runs the same answers with the same acceptances. Windows are planned once, for the batch at the beginning, as
the paper has it; from `reconfigured` on they follow the batch. Beside it, what the product's own planner would do with
these GPUs, and a scan of what the printed model would need for decoupling to win 1.3x at batch 256.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from vllm_specrollout.bench.studies.answers import AnswersInputs, draw_answers
from vllm_specrollout.bench.studies.formulas import MAX_WINDOW, Rate, StepLine, best_window, exact_rate, printed_rate
from vllm_specrollout.bench.studies.group import Mode, Workload
from vllm_specrollout.bench.studies.rehearsal import Match, Setting, rehearse
from vllm_specrollout.bench.studies.report import Cell, Curve, Number, ResultTable, Share, StudyReport
from vllm_specrollout.bench.studies.rollout import Outcome, Racing, Reconfiguration, Setup, simulate

from vllm_specrollout.cluster.planner import Plan, plan_devices
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.rates import AffineTime, coupled_rate, decoupled_rate, plain_rate
from vllm_specrollout.cluster.rates import Mode as Planned

ARMS = {
    "plain": ("", 1.0),
    "vanilla": ("plain", 0.974),
    "disaggregated": ("plain", 1.334),
    # with the paper's stall rule
    "decoupled, waiting": ("vanilla", 0.769),
    "decoupled": ("vanilla", 0.769),
    "reconfigured": ("decoupled", 0.833),
    "ladder": ("reconfigured", 0.833),
}
"""In the order of the table: the arm that each is held against, and the printed ratio of their times (section 5.4)."""
READINGS: dict[str, Rate] = {"paper": printed_rate, "exact": exact_rate, "plain meanwhile": decoupled_rate}
"""Of decoupled speed: tau as printed, by renewal, and with a verifier that decodes plainly what has no window."""
_SCANNED = 256  # requests
_REHEARSED = 16  # requests at most: each stands for so many of a larger batch
# per row beyond the knee, over the base divided by 256: 1 doubles the step at 256 further rows
_ROWS = (0.0, 0.1, 0.3, 1.0, 3.0)
# a drafted token at that batch, over the verifier's base; and acceptances
_DRAFTS, _ACCEPTANCES = (0.05, 0.15, 0.3, 0.6, 1.0), (0.6, 0.7, 0.8, 0.9)


class SpecActorInputs(AnswersInputs):
    """Those that are `text` are of section 5.1, where no other one is named."""

    # text; a drafter uses one GPU (section 4.1)
    gpus: Number = 256
    verifier_gpus: Number = 4
    drafter_gpus: Number = 1
    requests: Number = 16384
    # free, set for time: the reconfiguration period and the time to attach are an eighth, as answers are
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
    # free, per token of the 0.5B model, the 1.5B model, n-gram. TLT, Table 8, for the first: 12.2 ms of drafting over
    # the 6 levels that an accept length of 6.68 needs at least; the others set
    draft_ms: tuple[Number, Number, Number] = (2.03, 3.0, 0.02)
    # free, set: per token and request, KV cache of 3,000 tokens read by one GPU
    draft_request_ms: tuple[Number, Number, Number] = (0.014, 0.03, 0.0)
    # free, set with the ordering in sight, of the median request: stragglers' 48.7 to 72.3 % of drafts accepted
    # (section 5.2) are 0.73 to 0.87 per token in windows of 4; n-gram near 0
    acceptance: tuple[Share, Share, Share] = (0.88, 0.90, 0.35)
    # text, section 4.1: tokens
    reconfigure_every: Number = 1000
    # free, set: b_max
    racing_requests: Number = 4
    # free, set: weights in host memory, engine and graphs ready (section 4.3)
    attach_ms: Number = 500
    # free, set: 64 Gflop a token on 4 GPUs at half of 989 Tflop/s
    prefill_ms: Number = 0.03


def draw_workload(inputs: SpecActorInputs, seed: int) -> Workload:
    """All answers of one rollout."""
    return draw_answers(inputs, int(inputs.requests), inputs.acceptance, seed)


def _verifier(inputs: SpecActorInputs) -> StepLine:
    return StepLine(base=inputs.base_ms, request=inputs.request_ms, steep=inputs.row_ms, knee=inputs.knee_rows)


def setups(inputs: SpecActorInputs, work: Workload) -> dict[str, Setup]:
    """One setup per arm."""
    verifier = _verifier(inputs)
    terms = zip(inputs.draft_ms, inputs.draft_request_ms, strict=True)
    drafters = tuple(StepLine(base=base, request=request) for base, request in terms)
    # groups whose drafter runs on the verifier's GPUs, and groups with a GPU of its own for it
    together = int(inputs.gpus // inputs.verifier_gpus)
    apart = int(inputs.gpus // (inputs.verifier_gpus + inputs.drafter_gpus))
    means = [float(rates.mean()) for rates in work.acceptance]

    def window(rate: Rate, batch: int, method: int = 0) -> int:
        return best_window(rate, means[method], batch, verifier, drafters[method])

    plain = Setup(
        groups=together,
        mode=Mode.PLAIN,
        verifier=verifier,
        drafters=drafters,
        prefill_ms=inputs.prefill_ms,
        reconfigure_every=inputs.reconfigure_every / inputs.shortened,
    )
    vanilla = replace(plain, mode=Mode.COUPLED, window=window(coupled_rate, len(work.length) // together))
    batch, most = len(work.length) // apart, int(inputs.racing_requests)
    disaggregated = replace(vanilla, groups=apart, window=window(coupled_rate, batch))
    decoupled = replace(disaggregated, mode=Mode.DECOUPLED, window=window(decoupled_rate, batch))
    reconfigured = replace(decoupled, reconfigure=Reconfiguration(verifier, drafters[0]))
    windows = tuple(window(decoupled_rate, most, method) for method in range(len(drafters)))
    racing = Racing(most=most, windows=windows, attach_ms=inputs.attach_ms / inputs.shortened)
    waiting, ladder = replace(decoupled, mode=Mode.WAITING), replace(reconfigured, racing=racing)
    arms = (plain, vanilla, disaggregated, waiting, decoupled, reconfigured, ladder)
    return dict(zip(ARMS, arms, strict=True))


def plans(inputs: SpecActorInputs, work: Workload) -> tuple[Plan, ...]:
    """What `plan_devices` says of the batch at the beginning: the best of each kind of group, fastest first."""
    planned = DrafterProfile(
        draft=AffineTime(inputs.draft_request_ms[0], inputs.draft_ms[0]),
        verify={int(inputs.verifier_gpus): _line(inputs, len(work.length))},
        match=float(work.acceptance[0].mean()),
    )
    return plan_devices(planned, int(inputs.gpus), len(work.length), max_window=MAX_WINDOW)


def _line(inputs: SpecActorInputs, requests: int) -> AffineTime:
    """The verifier's beyond the knee, where groups begin, and right for coupled groups' batch: the planner takes a
    line."""
    batch, row = requests / (inputs.gpus // inputs.verifier_gpus), inputs.row_ms
    fixed = max(inputs.base_ms - row * inputs.knee_rows, 0.0)
    return AffineTime((_verifier(inputs).ms(batch) - fixed) / batch, fixed, row)


def rehearsed(inputs: SpecActorInputs, work: Workload, plan: Plan, seed: int) -> float:
    """Tokens per second of all requests, as the product's own draft trees yield them in a decoupled plan's group."""
    verify, each = _line(inputs, len(work.length)), plan.batch / min(plan.batch, _REHEARSED)
    draft = AffineTime(inputs.draft_request_ms[0], inputs.draft_ms[0]).shared_by(plan.draft_gpus)
    setting = Setting(
        verify_ms=lambda requests, rows: verify.ms(requests * each, rows / requests),
        draft_ms=lambda lines, more: draft.ms(lines * each, more / lines),
        match=Match.of_shares((float(work.acceptance[0].mean()),), np.random.default_rng(seed)),
        batch=min(plan.batch, _REHEARSED),
        window=plan.window,
        fan_out=1,
        most_drafts=plan.window,
        most_depth=plan.window,
    )
    return 1e3 * rehearse(setting, np.random.default_rng(seed), 100).rate * len(work.length)


def _planned(found: tuple[Plan, ...], inputs: SpecActorInputs, work: Workload, seed: int) -> ResultTable:
    """What all groups yield together, by the planner's formula and by rehearsal of the draft trees themselves."""
    columns = ("groups", "drafting + verifying GPUs", "requests", "window", "tokens/s, planned", "rehearsed")
    rows = []
    for one in found:
        trees = f"{rehearsed(inputs, work, one, seed):,.0f}" if one.mode is Planned.DECOUPLED else "-"
        devices = f"{one.draft_gpus} + {one.verify_gpus}"
        rows.append((one.mode.value, devices, str(one.batch), str(one.window), f"{one.total_tokens_per_s:,.0f}", trees))
    return ResultTable("Algorithm 1 as the product plans, for the batch at the beginning", columns, tuple(rows))


def run_arms(inputs: SpecActorInputs, seed: int) -> dict[str, Outcome]:
    """Every arm on the same answers."""
    work = draw_workload(inputs, seed)
    return {name: simulate(work, setup, seed) for name, setup in setups(inputs, work).items()}


def run(inputs: SpecActorInputs, seed: int) -> StudyReport:
    """SpecActor, section 5.4: what each technique adds to a rollout on 256 GPUs.

    All arms in several rollouts, and the scan for what the printed model would need.
    """
    rollouts = [run_arms(inputs, seed + number) for number in range(int(inputs.rollouts))]
    arms = {name: [outcomes[name] for outcomes in rollouts] for name in ARMS}
    figures = {f"{name} s": float(np.mean([one.makespan_ms for one in own])) / 1e3 for name, own in arms.items()}
    figures["plain idle share"] = float(np.mean([one.idle_share for one in arms["plain"]]))
    figures["plain share with 64 running"] = float(
        np.mean([(one.running_curve()[1] >= 64 * len(one.busy_ms)).mean() for one in arms["plain"]])
    )
    work = draw_workload(inputs, seed)
    planned = setups(inputs, work)
    columns = ("arm", "groups", "window", "s", "ours", "paper", "faster in", "of plain", "idle", "waste", "races won")
    rows = tuple(_row(name, planned[name], arms, figures) for name in ARMS)
    chosen = plans(inputs, work)
    scanned, gains = scan(inputs)
    first = {name: own[0].running_curve() for name, own in arms.items()}
    curves = [Curve(name, tuple((ms / 1e3).tolist()), tuple(running.tolist())) for name, (ms, running) in first.items()]
    return StudyReport(
        title="SpecActor, section 5.4: ablation on DAPO-32B-20K, Qwen2.5-32B, 256 Hopper GPUs, TP 4",
        tables=(
            ResultTable("mean of the rollouts, all arms on the same answers", columns, rows),
            _planned(chosen, inputs, work, seed),
            scanned,
        ),
        figures=figures
        | gains
        | {f"planned {one.mode.value} tokens/s": one.total_tokens_per_s for one in chosen[::-1]},
        findings=tuple(_findings(figures)),
        curves=tuple(curves),
        axes=("seconds of the first rollout", "requests that run"),
    )


def _row(name: str, setup: Setup, arms: dict[str, list[Outcome]], figures: dict[str, float]) -> tuple[Cell, ...]:
    own, (before, printed) = arms[name], ARMS[name]
    seconds = figures[f"{name} s"]
    window, ours, paper, faster = "-", "-", "-", "-"
    if before:
        window, paper = str(setup.window), f"{1.0 / printed:.2f}x"
        ours = f"{figures[f'{before} s'] / seconds:.2f}x of {before}"
        wins = sum(a.makespan_ms < b.makespan_ms for a, b in zip(own, arms[before], strict=True))
        faster = f"{wins} of {len(own)}"
    drafted, wasted = (sum(one.counts[count] for one in own) for count in ("drafted", "wasted"))
    waste = f"{wasted / drafted:.0%}" if drafted else "-"
    idle = f"{np.mean([one.idle_share for one in own]):.0%}"
    of_plain = f"{figures['plain s'] / seconds:.2f}x"
    races = str(sum(one.races_won for one in own))
    return name, str(setup.groups), window, f"{seconds:.1f}", ours, paper, faster, of_plain, idle, waste, races


def _findings(figures: dict[str, float]) -> Iterator[str]:
    seconds = {name: figures[f"{name} s"] for name in ARMS}
    order = [seconds[name] for name in ("plain", "vanilla", "decoupled", "reconfigured", "ladder")]
    holds = all(a > b for a, b in itertools.pairwise(order))
    plain, vanilla, apart = seconds["plain"], seconds["vanilla"], seconds["disaggregated"]
    yield (
        f"Fitted: the lengths alone, to two figures of plain rollout (idle {figures['plain idle share']:.0%} for 50 %,"
        f" 64 or more running for {figures['plain share with 64 running']:.0%} of the time for 20 %). All ratios are"
        " predictions."
    )
    yield (
        f"The ordering plain < vanilla < decoupled < reconfigured < ladder {'holds' if holds else 'does NOT hold'} for"
        " the means, under these inputs."
    )
    yield (
        f"Vanilla does not come out at {ARMS['vanilla'][1] - 1:+.1%} of plain but at {vanilla / plain - 1:+.1%}:"
        " most of plain rollout runs at small batch, where coupled drafts pay."
    )
    yield (
        f"Disaggregation does not come out at {ARMS['disaggregated'][1] - 1:+.1%} of plain but at"
        f" {apart / plain - 1:+.1%}; against vanilla it is {apart / vanilla - 1:+.1%}."
    )
    yield (
        f"With the paper's rule, a request without a window waits: {vanilla / seconds['decoupled, waiting']:.2f}x of"
        f" vanilla; with plain decoding meanwhile {vanilla / seconds['decoupled']:.2f}x."
    )


def gain(reading: Rate, p: float, verifier: StepLine, drafter: StepLine) -> float:
    """Decoupled over the better of coupled and plain, each with its best window, on the same GPUs.

    Groups of 4 + 1 stand against groups of 4, so they have 1.25 times the batch.
    """
    windows = range(1, MAX_WINDOW + 1)
    ahead = max(reading(drafter, verifier, _SCANNED * 5 // 4, window, p) for window in windows)
    coupled = max(coupled_rate(drafter, verifier, _SCANNED, window, p) for window in windows)
    return ahead / max(coupled, plain_rate(verifier, _SCANNED))


def scan(inputs: SpecActorInputs) -> tuple[ResultTable, dict[str, float]]:
    """The best gain of each reading by cost of rows, and where it is found."""
    base, best = inputs.base_ms, dict.fromkeys(READINGS, 0.0)
    rows = []
    for row in _ROWS:
        row_ms = row * base / _SCANNED
        verifier = StepLine(base=base, request=inputs.request_ms, steep=row_ms, knee=inputs.knee_rows)
        cells = [f"{row:g}", f"{row_ms:.3f}"]
        for name, reading in READINGS.items():
            cases = [(draft * base, p) for draft, p in itertools.product(_DRAFTS, _ACCEPTANCES)]
            found = {(ms, p): gain(reading, p, verifier, StepLine(base=ms)) for ms, p in cases}
            draft_ms, p = at = max(found, key=found.__getitem__)
            best[name] = max(best[name], found[at])
            cells.append(f"{found[at]:.2f}x at D {draft_ms:.1f} ms, p {p:g}")
        rows.append(tuple(cells))
    title = f"decoupled over the better of coupled and plain at batch {_SCANNED}: the best over D and p"
    table = ResultTable(title, ("row cost of 256 rows / base", "ms per row", *READINGS), tuple(rows))
    return table, {f"best gain, {name}": value for name, value in best.items()}
