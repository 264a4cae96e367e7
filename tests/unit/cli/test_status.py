"""What a server's metrics say of its drafts, in one line first."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from typer.testing import CliRunner

from tests.unit.cli.served import answering, serving
from vllm_specrollout.cli.commands import app
from vllm_specrollout.cli.status import PREFIX, judge, parse, read_metrics
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.observe.metrics import METRICS
from vllm_specrollout.worker.withheld import SELF_CHECK

BASE = ("model_name", "engine")


class Shown:
    """Metrics as a server of some engines shows them, made as the server makes them."""

    def __init__(self, engines: int = 1) -> None:
        self.registry, self.engines = CollectorRegistry(), engines
        kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge}
        self.made = {
            metric.name: kinds[metric.kind](
                PREFIX + metric.name, metric.help, (*BASE, *metric.labels), registry=self.registry
            )
            for metric in METRICS
            if metric.kind in kinds
        }
        for engine in range(engines):
            self.set("is_on", 1, engine=engine)
            self.set("drafters_alive", 2, "worker", engine=engine)
            self.set("drafters_alive", 3, "process", engine=engine)

    def set(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        child = self.made[name].labels("m", str(engine), *labels)
        if isinstance(self.made[name], Gauge):
            child.set(value)
        else:
            child.inc(value)

    def decode(self, steps: int, tokens: int, took: float, plain: float, engine: int = 0) -> None:
        self.set("request_steps", steps, engine=engine)
        self.set("output_tokens", tokens, engine=engine)
        self.set("decode_seconds", took, "taken", engine=engine)
        self.set("decode_seconds", plain, "plain", engine=engine)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def says(self) -> str:
        return judge(parse(self.text())).as_text()


def test_a_server_that_gains_is_paying_and_each_drafter_has_its_share() -> None:
    shown = Shown(engines=2)
    for engine, tokens in ((0, 30), (1, 50)):
        shown.decode(10, tokens, 1.0, 2.0, engine)
        shown.set("nodes", 40, "verified", "history", engine=engine)
        shown.set("nodes", 10 + engine * 10, "accepted", "history", engine=engine)
    first, *more = shown.says().splitlines()
    assert first == "paying: 4.00 tokens a step, 2.00 times plain decoding by estimate"
    assert more == ["  history         38% of 80 draft tokens accepted"]


def test_a_server_whose_drafts_are_all_rejected_says_whose_and_how_far_a_drafter_goes() -> None:
    shown = Shown(engines=2)
    shown.decode(10, 10, 1.0, 1.0)
    for engine, value in enumerate((1, 0)):
        shown.set("accepted_nothing", value, "model", engine=engine)
        shown.set("accepted_nothing", 0, "all", engine=engine)
        shown.set("most_tokens", 2044, "model", engine=engine)
    assert shown.says().splitlines()[1:] == [
        "  model           accepted nothing since the last weights",
        "  model           nobody beyond 2044 tokens",
    ]


def test_which_head_drafts_and_how_it_learns_is_said_once_one_was_loaded() -> None:
    shown = Shown()
    shown.decode(10, 30, 1.0, 2.0)
    shown.set("head", 0, "number")
    shown.set("head", 0, "went_back")
    assert len(shown.says().splitlines()) == 1
    shown.set("head", 1, "went_back")
    assert shown.says().splitlines()[1:] == ["  head            number 0 drafts; 1 times a new one was worse"]
    shown.set("head", 3, "number")
    shown.set("trainer_work", 61000, "rows")
    shown.set("trainer_work", 21, "seconds")
    for when, share in (("at publication", 0.74), ("now", 0.71)):
        shown.set("head_match_rate", share, when)
    for state in ("resting", "halted", "training"):
        shown.set("trainer_state", state == "halted", state)
    assert shown.says().splitlines()[1:] == [
        "  head            number 3 drafts; 1 times a new one was worse",
        "  learning        met 71% of the time, 74% at its publication; trainer halted, 61000 rows in 21 s",
    ]


def test_a_server_whose_steps_take_longer_than_plain_ones_is_not_paying() -> None:
    shown = Shown()
    shown.decode(10, 11, 2.0, 1.0)
    assert shown.says() == "on, and not paying: 1.10 tokens a step, 0.50 times plain decoding by estimate"


GAIN = "1.50 tokens a step, 1.20 times plain decoding by estimate"


@pytest.mark.parametrize(
    ("decisions", "said"),
    [
        ({"pays": 20, "drafts do not pay": 30, "off": 2}, ["paused: drafts do not pay", f"  so far          {GAIN}"]),
        ({"off": 10}, ["paused: its `budget` is `off`", f"  so far          {GAIN}"]),
        ({SELF_CHECK: 3}, [f"failing: {SELF_CHECK}; the server's log says more", f"  so far          {GAIN}"]),
        ({"pays": 50, "drafts do not pay": 1}, [f"paying: {GAIN}", "  last step       paused: drafts do not pay"]),
    ],
)
def test_a_pause_has_the_commonest_reason_and_what_was_gained_before(
    decisions: dict[str, int], said: list[str]
) -> None:
    shown = Shown()
    shown.decode(10, 15, 1.0, 1.2)
    shown.set("is_on", 0)
    for reason, count in decisions.items():
        shown.set("decisions", count, "on" if reason == "pays" else "off", reason)
    assert shown.says().splitlines() == said


def test_a_server_whose_drafters_are_gone_is_failing_and_says_which() -> None:
    shown = Shown()
    shown.decode(10, 15, 1.0, 1.2)
    shown.set("failures", 5, "history")
    assert shown.says().startswith("paying"), "one that is left goes on"
    shown.set("drafters_alive", 0, "worker")
    assert "last step" not in shown.says()
    assert shown.says().splitlines()[0] == "failing: no drafter is left; history failed; the server's log says more"
    assert "  failed          history: 5 times" in shown.says()


def test_a_server_that_has_done_nothing_is_on_and_a_stock_one_is_off() -> None:
    assert Shown().says() == "on: nothing was decoded yet"
    off = judge(parse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n"))
    assert off.as_text().startswith("off: ") and not off.is_well


def test_between_two_looks_only_what_came_since_counts() -> None:
    shown = Shown()
    shown.decode(10, 10, 1.0, 1.0)
    before = parse(shown.text())
    shown.decode(10, 40, 1.0, 3.0)
    found = judge(parse(shown.text()), before)
    assert (found.tokens_per_step, found.speedup) == (4.0, 3.0)


def test_the_command_says_it_and_ends_with_1_where_somebody_must_act() -> None:
    shown = Shown()
    shown.decode(10, 15, 1.0, 1.2)

    def work(own: BaseHTTPRequestHandler) -> None:
        text = {"/metrics": shown.text(), "/other/metrics": "up 1\n"}.get(own.path, "")
        answering(200 if text else 404, text.encode())(own)

    with serving(work) as url:
        done = CliRunner().invoke(app, ["status", url])
        assert done.exit_code == 0 and done.stdout.startswith("paying: 1.50")
        watched = json.loads(CliRunner().invoke(app, ["status", url, "--json", "--over", "0.01"]).stdout)
        assert watched["verdict"] == "idle" and watched["engines"] == 1, "nothing was decoded meanwhile"
        shown.set("failures", 1, "ngram")
        shown.set("drafters_alive", 0, "worker")
        assert CliRunner().invoke(app, ["status", url]).exit_code == 1
        for path, cause in (("/other", "none of vLLM's"), ("/nothing", "shows no metrics")):
            with pytest.raises(ConfigError, match=cause):
                read_metrics(url + path)
