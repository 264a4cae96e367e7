"""`specrollout status`: is a server's spec rollout on, does it pay, and if not, why. It reads what /metrics says."""

from __future__ import annotations

import json as json_module
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from vllm_specrollout.cli import fetch
from vllm_specrollout.errors import ConfigError

PREFIX = "vllm:spec_rollout_"
SELF_CHECK = "self-check"

Series = dict[str, list[tuple[dict[str, str], float]]]
"""Metric, without `PREFIX` -> (labels, value) of each of its series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a server's engines did, all together, since they began or between two looks."""

    # `off`, `failing`, `paused`, `losing`, `paying`, or `idle`: it is on, and has decoded nothing
    verdict: str
    # why it is paused or failing, or was at its last step; else empty
    why: str
    engines: int
    tokens_per_step: float | None
    # time of plain decode steps, by estimate, over the time taken
    speedup: float | None
    # nodes that were verified, and the share of them that was accepted; by drafter
    verified: dict[str, int]
    accepted: dict[str, float]
    # what failed and was contained -> times
    failures: dict[str, int]
    # drafters whose drafts were all rejected since the last weights
    unaccepted: tuple[str, ...] = ()
    # drafter -> tokens of a request beyond which it drafts for nobody
    most_tokens: dict[str, int] = field(default_factory=dict)
    # number of the head that drafts; None: none was loaded. How often a new one was worse than the one before
    head: int | None = None
    went_back: int = 0
    # of a head that goes on learning, what is said of it; else empty
    learns: str = ""

    @property
    def is_well(self) -> bool:
        return self.verdict not in ("off", "failing")

    def as_text(self) -> str:
        """The verdict first."""
        times = "" if self.speedup is None else f", {self.speedup:.2f} times plain decoding by estimate"
        brings = "" if self.tokens_per_step is None else f"{self.tokens_per_step:.2f} tokens a step{times}"
        first = {
            "off": "off: the server decodes with stock vLLM",
            "failing": f"failing: {self.why}; the server's log says more",
            "paused": f"paused: {self.why}",
            "losing": f"on, and not paying: {brings}",
            "paying": f"paying: {brings}",
            "idle": "on: nothing was decoded yet",
        }[self.verdict]
        lines = [first]
        if self.verdict in ("paused", "failing") and brings:
            lines.append(f"  so far          {brings}")
        elif self.verdict in ("paying", "losing") and self.why:
            lines.append(f"  last step       paused: {self.why}")
        for name, count in sorted(self.verified.items()):
            lines.append(f"  {name:<14}  {self.accepted[name]:.0%} of {count} draft tokens accepted")
        lines += [f"  {name:<14}  accepted nothing since the last weights" for name in self.unaccepted]
        lines += [f"  {name:<14}  nobody beyond {most} tokens" for name, most in sorted(self.most_tokens.items())]
        if self.head is not None:
            lines.append(f"  head            number {self.head} drafts; {self.went_back} times a new one was worse")
        lines += [f"  learning        {self.learns}"] if self.learns else []
        lines += [f"  failed          {part}: {count} times" for part, count in sorted(self.failures.items())]
        if self.verdict == "off":
            lines.append("\nhint: `vllm serve MODEL --spec-rollout`; `specrollout doctor` says whether it works here")
        return "\n".join(lines)


def read_metrics(url: str) -> Series:
    """Our metrics of a server, such as `http://localhost:8000`.

    Raises:
        ConfigError: it does not answer, or is no server of vLLM's.
    """
    hint = "is the server up, and at that address? A key belongs in VLLM_API_KEY"
    text = fetch.read(url, "/metrics", "shows no metrics", hint).decode(errors="replace")
    if "vllm:" not in text:
        raise ConfigError(
            f"`{url}` shows metrics, and none of vLLM's",
            "give the address of a vLLM server; one with `--disable-log-stats` has none: leave that out",
        )
    return parse(text)


def parse(text: str) -> Series:
    """Our metrics in the text that Prometheus reads; counters without their `_total`."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Series = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(PREFIX):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def judge(now: Series, before: Series | None = None) -> Status:
    """What a server did since it began, or since an earlier look at it."""
    if "is_on" not in now:
        return Status(
            verdict="off", why="", engines=0, tokens_per_step=None, speedup=None, verified={}, accepted={}, failures={}
        )

    def sums(name: str, label: str = "", **among: str) -> Counter[str]:
        total = Counter[str]()
        for series, sign in ((now, 1.0), (before or {}, -1.0)):
            for labels, value in _among(series, name, among):
                total[labels.get(label, "")] += sign * value  # type: ignore[assignment]
        return total

    steps, tokens = sums("request_steps")[""], sums("output_tokens")[""]
    took, plain = (sums("decode_seconds", kind=kind)[""] for kind in ("taken", "plain"))
    verified, accepted = sums("nodes", "source", stage="verified"), sums("nodes", "source", stage="accepted")
    failures = {part: int(count) for part, count in sums("failures", "part").items() if count >= 1}
    alive = [value for _, value in _among(now, "drafters_alive", {"where": "worker"})]
    heads, went = ([value for _, value in _among(now, "head", {"kind": kind})] for kind in ("number", "went_back"))
    speedup = plain / took if took > 0 and plain > 0 else None
    choices = sums("decisions", "choice")
    verdict, why = "idle", ""
    if failures and alive and not any(alive):
        verdict, why = "failing", f"no drafter is left; {', '.join(sorted(failures))} failed"
    elif steps:
        verdict = "losing" if speedup is not None and speedup < 1.0 else "paying"
        if not any(value for _, value in now["is_on"]):
            why = _latest_reason(sums("decisions", "reason"), now)
            # one has ended drafting for good; and a last request's last steps are often plain
            verdict = "failing" if why == SELF_CHECK else "paused" if choices["off"] >= choices["on"] else verdict
    return Status(
        verdict=verdict,
        why=why,
        engines=len(now["is_on"]),
        tokens_per_step=tokens / steps if steps else None,
        speedup=speedup,
        verified={name: int(count) for name, count in verified.items() if count >= 1},
        accepted={name: accepted[name] / count for name, count in verified.items() if count >= 1},
        failures=failures,
        unaccepted=tuple(sorted({own["source"] for own, value in now.get("accepted_nothing", ()) if value})),
        most_tokens={own["source"]: int(value) for own, value in now.get("most_tokens", ())},
        head=int(max(heads)) if any(went + heads) else None,
        went_back=int(sum(went)),
        learns=_learns(now),
    )


def _among(series: Series, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], float]]:
    """The series of a metric that have these labels."""
    return [one for one in series.get(name, ()) if labels.items() <= one[0].items()]


def _learns(now: Series) -> str:
    """Of several engines, what the first one says."""
    if "trainer_state" not in now:
        return ""
    rate = {labels["when"]: value for labels, value in now.get("head_match_rate", ())}
    state = [labels["state"] for labels, value in now["trainer_state"] if value]
    done = {labels["unit"]: value for labels, value in now["trainer_work"]}
    return (
        f"met {rate.get('now', 0.0):.0%} of the time, {rate.get('at publication', 0.0):.0%} at its publication; trainer"
        f" {state[0] if state else 'resting'}, {done['rows']:.0f} rows in {done['seconds']:.0f} s"
    )


def _latest_reason(reasons: Counter[str], now: Series) -> str:
    """Of the decisions not to draft, the commonest."""
    off = {labels["reason"] for labels, _ in now.get("decisions", ()) if labels.get("choice") == "off"}
    own = [(count, reason) for reason, count in reasons.items() if reason in off]
    reason = max(own)[1] if own else "no step was decided on"
    return "its `budget` is `off`" if reason == "off" else reason


def status(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A running server, as http://localhost:8000.", show_default=False)
    ],
    over: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds to watch it; 0: all since it began.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a server's spec rollout is on, whether it pays, and if not, why (exit status 1: off, or failing)."""
    before = read_metrics(url) if over else None
    time.sleep(over)
    found = judge(read_metrics(url), before)
    typer.echo(json_module.dumps(asdict(found), indent=2) if json else found.as_text())
    if not found.is_well:
        raise typer.Exit(1)
