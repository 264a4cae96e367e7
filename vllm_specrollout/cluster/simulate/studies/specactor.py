"""SpecActor, section 5.4: what each technique adds, from plain decoding to racing freed workers.

Every arm runs the same answers with the same acceptances. Windows are planned once, for the batch at the beginning, as
the paper has it; from `reconfigured` on they follow the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_specrollout.cluster.simulate.group import Method, Waiting
from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.outcome import Outcome
from vllm_specrollout.cluster.simulate.report import Cell, Curve, ResultTable, StudyReport
from vllm_specrollout.cluster.simulate.rollout import Racing, Setup, simulate
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.studies.specactor_scan import scan
from vllm_specrollout.cluster.simulate.windows import Reconfiguration, best_window
from vllm_specrollout.cluster.simulate.workload import AcceptancePlan, LengthPlan, Workload, draw_workload
from vllm_specrollout.decoupled.rates import Mode, coupled_rate, decoupled_rate

ARMS = ("plain", "vanilla", "disaggregated", "decoupled, waiting", "decoupled", "reconfigured", "ladder")
"""In the order of the table; the fourth is the paper's stall rule."""
_BEFORE = {
    "vanilla": "plain",
    "disaggregated": "plain",
    "decoupled, waiting": "vanilla",
    "decoupled": "vanilla",
    "reconfigured": "decoupled",
    "ladder": "reconfigured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the arms share."""

    verifier: StepLine
    methods: tuple[Method, ...]
    # groups whose drafter runs on the verifier's GPUs, and groups with a GPU of its own for it
    together: int
    apart: int


def cluster_of(inputs: StudyInputs) -> Cluster:
    """The GPUs and their lines."""
    steep = inputs.number("row_ms")
    verifier = StepLine(
        base=inputs.number("base_ms"),
        request=inputs.number("request_ms"),
        steep=steep,
        knee=inputs.number("knee_rows"),
    )
    terms = zip(inputs.numbers("draft_ms"), inputs.numbers("draft_request_ms"), strict=True)
    methods = tuple(
        Method(name=name, line=StepLine(base=base, request=request))
        for name, (base, request) in zip(("0.5B", "1.5B", "n-gram"), terms, strict=True)
    )
    gpus, apart = inputs.number("gpus"), inputs.number("verifier_gpus") + inputs.number("drafter_gpus")
    return Cluster(
        verifier=verifier,
        methods=methods,
        together=int(gpus // inputs.number("verifier_gpus")),
        apart=int(gpus // apart),
    )


def workload_of(inputs: StudyInputs, seed: int) -> Workload:
    """The step's answers."""
    shortened = inputs.number("shortened")
    lengths = LengthPlan(
        median=inputs.number("median_length") / shortened,
        spread=inputs.number("length_spread"),
        shared=inputs.number("length_shared"),
        longest=int(inputs.number("longest") / shortened),
        samples=int(inputs.number("samples")),
    )
    acceptances = AcceptancePlan(
        medians=inputs.numbers("acceptance"),
        spread=inputs.number("acceptance_spread"),
        common=inputs.number("acceptance_common"),
        with_length=inputs.number("acceptance_with_length"),
    )
    return draw_workload(int(inputs.number("requests")), lengths, acceptances, np.random.default_rng(seed))


def setups(inputs: StudyInputs, work: Workload) -> dict[str, Setup]:
    """One setup per arm."""
    cluster, shortened = cluster_of(inputs), inputs.number("shortened")
    verifier, drafter = cluster.verifier, cluster.methods[0].line
    mean = float(work.acceptance[0].mean())
    batch, apart = (len(work.length) // groups for groups in (cluster.together, cluster.apart))
    common = Setup(
        groups=cluster.together,
        verifier=verifier,
        mode=Mode.COUPLED,
        methods=cluster.methods,
        window=best_window(coupled_rate, mean, batch, verifier, drafter),
        prefill_ms=inputs.number("prefill_ms"),
        reconfigure_every=inputs.number("reconfigure_every") / shortened,
    )
    decoupled = replace(
        common,
        groups=cluster.apart,
        mode=Mode.DECOUPLED,
        window=best_window(decoupled_rate, mean, apart, verifier, drafter),
    )
    reconfigured = replace(decoupled, reconfigure=Reconfiguration(verifier, drafter))
    most = int(inputs.number("racing_requests"))
    windows = tuple(
        best_window(decoupled_rate, float(rates.mean()), most, verifier, method.line)
        for rates, method in zip(work.acceptance, cluster.methods, strict=True)
    )
    racing = Racing(most=most, windows=windows, attach_ms=inputs.number("attach_ms") / shortened)
    return {
        "plain": replace(common, mode=Mode.PLAIN),
        "vanilla": common,
        "disaggregated": replace(
            common, groups=cluster.apart, window=best_window(coupled_rate, mean, apart, verifier, drafter)
        ),
        "decoupled, waiting": replace(decoupled, waiting=Waiting.ALWAYS),
        "decoupled": decoupled,
        "reconfigured": reconfigured,
        "ladder": replace(reconfigured, racing=racing),
    }


def run_arms(inputs: StudyInputs, seed: int) -> dict[str, Outcome]:
    """Every arm on the same answers."""
    work = workload_of(inputs, seed)
    return {name: simulate(work, setup, seed) for name, setup in setups(inputs, work).items()}


def run(inputs: StudyInputs, seed: int) -> StudyReport:
    """All arms in several rollouts, and the scan for what the printed model would need."""
    rollouts = [run_arms(inputs, seed + number) for number in range(int(inputs.number("rollouts")))]
    arms = {name: [outcomes[name] for outcomes in rollouts] for name in ARMS}
    planned = setups(inputs, workload_of(inputs, seed))
    figures = {f"{name} s": _seconds(own) for name, own in arms.items()}
    figures["plain idle share"] = float(np.mean([outcome.idle_share for outcome in arms["plain"]]))
    figures["plain share with 64 running"] = float(
        np.mean([(one.running_curve()[1] >= 64 * len(one.busy_ms)).mean() for one in arms["plain"]])
    )
    table, found, scanned = scan(inputs)
    curves = []
    for name, own in arms.items():
        times, running = own[0].running_curve()
        curves.append(Curve(label=name, x=tuple((times / 1e3).tolist()), y=tuple(map(float, running))))
    return StudyReport(
        study="specactor",
        seed=seed,
        inputs=inputs,
        tables=(_table(inputs, planned, arms), table),
        figures=figures | scanned,
        findings=(*_findings(inputs, figures), *found),
        curves=tuple(curves),
        axes=("seconds of the first rollout", "requests that run"),
    )


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([outcome.makespan_ms for outcome in outcomes])) / 1e3


def _table(inputs: StudyInputs, planned: dict[str, Setup], arms: dict[str, list[Outcome]]) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for name, own in arms.items():
        before = _BEFORE.get(name)
        target = "decoupled" if name.startswith("decoupled") else name
        faster = sum(a.makespan_ms < b.makespan_ms for a, b in zip(own, arms[before or name], strict=True))
        drafted = sum(outcome.counts.drafted for outcome in own)
        wasted = sum(outcome.counts.wasted for outcome in own)
        rows.append(
            (
                name,
                planned[name].groups,
                "-" if name == "plain" else planned[name].window,
                f"{_seconds(own):.1f}",
                f"{_seconds(arms[before]) / _seconds(own):.2f}x of {before}" if before else "-",
                f"{1.0 / inputs.target(target):.2f}x" if before else "-",
                f"{faster} of {len(own)}" if before else "-",
                f"{_seconds(arms['plain']) / _seconds(own):.2f}x",
                f"{np.mean([outcome.idle_share for outcome in own]):.0%}",
                f"{wasted / drafted:.0%}" if drafted else "-",
                sum(outcome.races_won for outcome in own),
            )
        )
    columns = ("arm", "groups", "window", "s", "ours", "paper", "faster in", "of plain", "idle", "waste", "races won")
    return ResultTable(title="mean of the rollouts, all arms on the same answers", columns=columns, rows=tuple(rows))


def _findings(inputs: StudyInputs, figures: dict[str, float]) -> tuple[str, ...]:
    seconds = {name: figures[f"{name} s"] for name in ARMS}
    order = ("plain", "vanilla", "decoupled", "reconfigured", "ladder")
    holds = all(seconds[a] > seconds[b] for a, b in zip(order, order[1:], strict=False))
    plain, vanilla = seconds["plain"], seconds["vanilla"]
    return (
        "Fitted: the lengths alone, to two figures of plain rollout"
        f" (idle {figures['plain idle share']:.0%} for 50 %, 64 or more running for"
        f" {figures['plain share with 64 running']:.0%} of the time for 20 %). All ratios are predictions.",
        f"The ordering plain < vanilla < decoupled < reconfigured < ladder {'holds' if holds else 'does NOT hold'} for"
        " the means, under these inputs.",
        f"Vanilla does not come out at {inputs.target('vanilla') - 1:+.1%} of plain but at {vanilla / plain - 1:+.1%}:"
        " most of plain rollout runs at small batch, where coupled drafts pay.",
        f"Disaggregation does not come out at {inputs.target('disaggregated') - 1:+.1%} of plain but at"
        f" {seconds['disaggregated'] / plain - 1:+.1%}; against vanilla it is"
        f" {seconds['disaggregated'] / vanilla - 1:+.1%}.",
        f"With the paper's rule, a request without a window waits: {vanilla / seconds['decoupled, waiting']:.2f}x of"
        f" vanilla; with plain decoding meanwhile {vanilla / seconds['decoupled']:.2f}x.",
    )
