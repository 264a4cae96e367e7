"""What one driver costs its host: decisions and reports of a group, with stand-ins for engines, at the product's beats.

The stand-ins need no model and no Ray, and their reports are made in this process; the time that making them takes is
measured and told apart. Ray's part of a call comes on top. A batch of 32 requests an engine runs to its last
answer or for so many beats; lengths have a long tail. Run: `python -m bench.host.driver --out out/driver.json`, then
`python docs/benchmarks.py driver out/driver.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runner.fields import Row
from bench.runner.report import Found, as_json
from vllm_specrollout.cluster.batch import GroupAnswer, GroupError, RequestChecker
from vllm_specrollout.cluster.driver import BEAT_S, Driver
from vllm_specrollout.cluster.ladder import LADDERS
from vllm_specrollout.cluster.lending import BEAT_S as LENDING_S
from vllm_specrollout.cluster.lending import Lending
from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted

ENGINES = (64, 256, 1024)
REQUESTS, SAMPLES, TOKENS, SPREAD = 32, 8, 600, 1.0
"""Of an engine; answers to a problem; tokens of the median answer, and how far the logarithms scatter."""
SEVEN = array("i", [7])
RATE, SELDOM = 16, 5
"""Tokens of a request in a beat: 160 a second; and beats between two reports of what goes on, as the product's."""


class StandIn:
    """An engine as its driver sees it."""

    def __init__(self, places: int) -> None:
        self.places, self.model = places, ""
        # run -> tokens that it has yet to give, those that it has given, and those that were told
        self.live: dict[str, list[int]] = {}
        self.beats = 0
        self.attached: dict[str, list[str]] = {}

    def answer(self, method: str, args: Sequence[Any]) -> Any:
        match method:
            case "admit":
                self.live.clear()
                wanted: Wanted = args[0]
                return wanted.version, self.places, "here"
            case "give":
                self.give(args[0])
            case "cancel":
                for key in args[0]:
                    self.live.pop(key, None)
            case "report":
                return self.report()
            case "rpc":
                return [self.call(args[0], args[1])]
        return None

    def give(self, runs: Sequence[Given]) -> None:
        for run in runs:
            self.live[run.key] = [run.params["max_tokens"] - len(run.answer), len(run.answer), len(run.answer)]

    def advance(self) -> bool:
        """A beat passes; whether there is a report of it."""
        self.beats += 1
        has_ended = False
        for own in self.live.values():
            count = min(RATE, own[0])
            own[0] -= count
            own[1] += count
            has_ended = has_ended or not own[0]
        return has_ended or not self.beats % SELDOM

    def report(self) -> Report:
        parts, is_whole = {}, not self.beats % SELDOM
        for key, own in list(self.live.items()):
            if is_whole or not own[0]:
                parts[key] = Part(SEVEN * (own[1] - own[2]), (), 20, "" if own[0] else "length")
                own[2] = own[1]
            if not own[0]:
                del self.live[key]
        batch = len(self.live)
        pace = (batch, 20, 20 * (0.005 + 0.0006 * batch)) if batch and is_whole else None
        return Report(parts, pace, (500, 0.015) if is_whole else (0, 0.0))

    def call(self, method: str, args: Sequence[Any]) -> Any:
        if method == "spec_rollout_warm":
            self.model = args[0]
        elif method == "detach_drafter":
            self.attached.pop(args[0], None)
        elif method in ("attach_drafter", "assign_drafter"):
            self.attached[args[0]] = list(args[-1])
        running = {key: (500, own[1]) for key, own in self.live.items()}
        own = {"running": running, "steps": 0, "places": self.places, "host": "here", "attached": self.attached}
        return {**own, "drafter": self.model and "ipc://there", "model": self.model, "verified": 0, "accepted": 0}


class StandIns:
    """Calls of stand-ins (`driver.Lines`), eight to a host."""

    def __init__(self, engines: int) -> None:
        self.engines = {f"engine-{i}": StandIn(2 * REQUESTS) for i in range(engines)}
        # of all calls; seconds of processor time
        self.reports, self.spent = 0, 0.0

    async def call(self, engine: str, method: str, *args: Any) -> Any:
        own, has_news = self.engines[engine], method != "report"
        while not has_news:
            await asyncio.sleep(BEAT_S)
            begun = time.thread_time()
            has_news = own.advance()
            self.spent += time.thread_time() - begun
        self.reports += method == "report"
        begun = time.thread_time()
        found = own.answer(method, args)
        self.spent += time.thread_time() - begun
        if args and args[0] == "spec_rollout_standing":
            found[0]["host"] = f"host {int(engine.removeprefix('engine-')) // 8}"
        return found

    def send(self, engine: str, method: str, *args: Any) -> None:
        self.engines[engine].answer(method, args)

    def end(self, engine: str) -> None:
        raise NotImplementedError


class Timed(Driver):
    """A driver whose decisions are timed, in seconds of processor time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spent: list[float] = []

    def beat(self) -> None:
        begun = time.thread_time()
        super().beat()
        self.spent.append(time.thread_time() - begun)


async def measure(engines: int, ladder: str, beats: int, seed: int) -> Row:
    """One batch."""
    lines, rng = StandIns(engines), random.Random(seed)
    driver = Timed(lines, list(lines.engines), ladder)
    driver.start()
    await driver.until(lambda: not driver.starting)
    lending, helping = Lending({}), None
    if ladder == "attach":
        for name in lines.engines:
            lending.add({name: _asking(lines, name)}, ("small", [], {}))
        helping = asyncio.ensure_future(_help(lending))
        await asyncio.sleep(4 * LENDING_S)
    found: dict[str, GroupAnswer | GroupError] = {}
    count = engines * REQUESTS
    lengths = [max(1, min(16384, round(TOKENS * rng.lognormvariate(0.0, SPREAD)))) for _ in range(count)]
    prompts = [[i // SAMPLES] * 500 for i in range(count)]
    params = [{"max_tokens": length, "seed": 0} for length in lengths]
    asked = RequestChecker(seed).ask(prompts, params, sink=found.__setitem__)
    driver.spent = []
    driver.add(asked)
    while driver.waiting:
        await asyncio.sleep(BEAT_S)
    lines.reports, lines.spent, spent = 0, 0.0, time.thread_time()
    for one in lines.engines.values():
        one.beats = 0
    while len(found) < count and sum(one.beats for one in lines.engines.values()) < beats * engines:
        await asyncio.sleep(BEAT_S)
    passed = BEAT_S * sum(one.beats for one in lines.engines.values()) / engines
    spent = time.thread_time() - spent
    driver.stop(GroupError("it was long enough", ""))
    if helping is not None:
        helping.cancel()
    first, *others = sorted(driver.spent, reverse=True)
    return Row(
        engines=engines,
        ladder=ladder,
        share=(spent - lines.spent) / passed,
        stand_ins=lines.spent / passed,
        decision_ms=1e3 * sum(others) / len(others),
        first_ms=1e3 * first,
        reports=lines.reports,
        moved=driver.counts["moved"],
        lent=lending.lent,
        complete=sum(isinstance(one, GroupAnswer) for one in found.values()) / count,
    )


async def _help(lending: Lending) -> None:
    while True:
        await asyncio.sleep(LENDING_S)
        lending.beat()


def _asking(lines: StandIns, name: str) -> Any:
    return lambda method, args: asyncio.ensure_future(lines.call(name, "rpc", method, list(args), {}))


def measured(settings: Mapping[str, Any]) -> Iterator[Row]:
    for engines in settings["engines"]:
        for ladder in LADDERS:
            yield asyncio.run(measure(engines, ladder, settings["beats"], settings["seed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES))
    parser.add_argument("--beats", type=int, default=100, help="of a batch, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = vars(parser.parse_args())
    out, rows = given.pop("out"), []
    for row in measured(given):
        print(row, flush=True)
        rows.append(row)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(as_json("driver", given, Found(rows=rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
