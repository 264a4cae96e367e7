"""The very tokens of stock vLLM where models draft in processes of their own, whatever happens to those processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from tests.e2e.drafting_models import perturbed
from tests.e2e.elsewhere import Elsewhere, decode, until
from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine, model
from tests.e2e.short_context import with_context
from vllm_specrollout.budgets.step_cost import TIME_SHARE, Asking
from vllm_specrollout.cluster.child import Command, WarmDrafter
from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import Message
from vllm_specrollout.drafters.decoupled import connect

pytestmark = pytest.mark.nightly

DECOUPLED = {
    "drafters": [], "budget": "fixed", "max_draft_tokens": 16, "placement": "decoupled",
    "decoupled": {"window": 4},
}  # fmt: skip
WARM = ("first", "second")


@dataclass(frozen=True)
class Stage(Elsewhere):
    """An engine with a drafter of its own, two warm ones beside it, and requests with stock vLLM's answers."""

    # of a few tokens each
    short: list[Case]
    short_truth: list[Any]

    def attach(self, name: str, **given: Any) -> dict[str, Any]:
        (answer,) = self.llm.collective_rpc("attach_drafter", args=(name, self.pool[name].address), kwargs=given)
        assert "cause" not in answer, answer
        self.overheard(name)
        return answer


def check(requests: Sequence[Case], truth: Sequence[Any], drafted: Sequence[Any]) -> None:
    report = compare(requests, truth, drafted, "float32")
    assert not report.failures, report.failures[:3]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("decoupled")
    target = model(folder, "llama", "float32")
    small = perturbed(target, folder / "draft", 0.1)
    requests, short = cases(29, VOCAB, seed=21, max_tokens=24), cases(16, VOCAB, seed=22, max_tokens=8)
    given = {"method": "draft_model", "model": small, "num_speculative_tokens": 4}
    args = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "enforce_eager": True}
    args["kv_cache_memory_bytes"] = 1 << 28
    # they share the host's cores with the engine: threads that wait for each other would take most of them
    one_thread = pytest.MonkeyPatch()
    one_thread.setenv("OMP_NUM_THREADS", "1")
    pool = {name: WarmDrafter(Command.of(small, (), args)) for name in WARM}
    try:
        with engine(target, "float32", is_ours=False) as stock:
            truth, short_truth = run(stock.llm, requests), run(stock.llm, short)
        with engine(target, "float32", is_ours=True, spec_rollout={**DECOUPLED, "speculative_config": given}) as ours:
            own = Stage(ours.llm, ours.runner, pool, requests, truth, short, short_truth)
            until(lambda: all(map(own.is_ready, WARM)))
            own.overheard("drafter")
            yield own
            process = ours.runner.remote.links["drafter"].process
            # the last of those that a test killed may be on its way
            until(lambda: all(map(own.is_ready, WARM)))
            pids = [process.pid, *(warm.process.pid for warm in pool.values())]
        assert not process.is_alive and not _exists(pids[0]), "the process ends with its engine"
        assert all(map(own.is_ready, WARM)) and pids[1:] == [warm.process.pid for warm in pool.values()]
    finally:
        for warm in pool.values():
            warm.stop()
        one_thread.undo()
    assert not any(map(_exists, pids))


@pytest.fixture(autouse=True)
def _warm_ones_go_home(stage: Stage) -> Iterator[None]:
    yield
    # a test that failed may have left them
    for name in [name for name in WARM if name in stage.drafter.links]:
        stage.ask("detach_drafter", name)


class Faulty:
    """Mail that is late, and that is refused now and then.

    Args:
        chance: of each fault, per message.
    """

    def __init__(self, mail: MailClient, rng: random.Random, chance: float) -> None:
        self.mail, self.rng, self.chance, self.address = mail, rng, chance, mail.address
        self.late: list[Message] = []

    def send(self, message: Message) -> bool:
        return self.rng.random() >= self.chance and self.mail.send(message)

    def receive(self) -> list[Message]:
        found = self.late + list(self.mail.receive())
        kept = self.rng.randrange(len(found) + 1) if self.rng.random() < self.chance else len(found)
        self.late = found[kept:]
        return found[:kept]

    def close(self) -> None:
        self.mail.close()


def test_a_drafter_elsewhere_changes_no_token_whatever_happens_to_it(stage: Stage) -> None:
    """Every sampling feature; windows from 1 to 16; the process hangs, is killed, and is begun anew meanwhile."""
    link, accepted = stage.drafter.links["drafter"], stage.runner.stats.accepted
    assert link.is_there

    def before_step(step: int) -> None:
        if 3 <= step < 6:
            until(lambda: stage.has_answered("drafter"))

    check(stage.requests, stage.truth, decode(stage.llm, stage.requests, before_step))
    assert stage.runner.stats.accepted > accepted
    for number, window in enumerate((4, 1, 16)):
        link.window = window
        ending = threading.Event()
        mischief = threading.Thread(target=_disturb, args=(link.process, random.Random(number), ending))
        if number:
            mischief.start()
        try:
            drafted = run(stage.llm, stage.requests)
        finally:
            ending.set()
            if number:
                mischief.join()
        check(stage.requests, stage.truth, drafted)
        # the runner itself learns with the next step that the last ones are over
        assert set(link.open) <= set(stage.runner.requests), "nothing is left of requests that are over"
    assert link.counts.trees > 0


def test_a_drafter_killed_amid_a_batch_is_begun_anew_and_drafts_for_the_same_batch(stage: Stage) -> None:
    link = stage.drafter.links["drafter"]
    tried: list[int] = []

    def is_back() -> bool:
        link.watch()
        link.receive()
        return link.is_there

    def is_heard() -> bool:
        return stage.has_answered("drafter")

    def before_step(step: int) -> None:
        if step == 3:
            until(is_heard)
            assert (pid := link.process.pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda: not is_back())
        elif step == 6:
            # meanwhile steps went on without it
            until(is_back)
            tried.extend((link.score.tried, stage.runner.stats.accepted))
        elif 7 <= step < 10:
            until(is_heard)

    link.window = 4
    until(is_back)
    check(stage.requests, stage.truth, decode(stage.llm, stage.requests, before_step))
    assert link.score.tried > tried[0], "what it drafts is verified again"
    assert stage.runner.stats.accepted > tried[1], "and accepted"


def test_warm_drafters_come_and_go_within_one_batch(stage: Stage) -> None:
    seen: dict[str, dict[str, Any]] = {}
    standing: dict[str, Any] = {}
    accepted: list[int] = []

    def state(name: str) -> dict[str, Any]:
        return stage.ask("drafters_state")[name]

    def before_step(step: int) -> None:
        if step == 3:
            for name in WARM:
                assert stage.attach(name, window=6, fan_out=3)["error"] == ""
                until(lambda name=name: state(name)["is_there"])
        elif 5 <= step < 8:
            # however slow this host makes them: they were told of all requests, with all their tokens
            accepted.append(stage.runner.stats.accepted)
            until(lambda: all(state(name)["trees"] and stage.has_answered(name) for name in WARM))
        if step == 8:
            accepted.append(stage.runner.stats.accepted)
            stage.ask("assign_drafter", "second", ["3", "7"])
            standing.update(stage.ask("spec_rollout_standing"))
            assert {request["name"] for request in state("second")["requests"].values()} <= {"3", "7"}
            stage.ask("assign_drafter", "second", None)
        if step == 14:
            for name in WARM:
                seen[name] = stage.ask("detach_drafter", name)

    told: list[int] = []
    elsewhere = stage.runner.metrics.elsewhere
    stage.runner.metrics.elsewhere = lambda alive, trees, wasted: (told.append(alive), elsewhere(alive, trees, wasted))
    try:
        check(stage.requests, stage.truth, decode(stage.llm, stage.requests, before_step))
    finally:
        del stage.runner.metrics.elsewhere
    assert accepted[-1] > accepted[0]
    assert max(told) >= len(WARM) and told[-1] <= 1, "/metrics says how many are there"
    for name in WARM:
        assert seen[name]["nodes"] > 0 and seen[name]["tried"] > 0, "it took part in this very batch"
        assert stage.is_ready(name), "it stays warm"
    assert list(stage.drafter.links) == ["drafter"]
    assert standing["attached"] == {"second": ["3", "7"]}
    # some are over already, and some have several samples
    prompts = {prompt for prompt, _ in standing["running"].values()}
    assert prompts and prompts <= {len(request.prompt) for request in stage.requests}
    now = stage.ask("spec_rollout_standing")
    assert now["steps"] > standing["steps"] > 0
    assert now["verified"] >= now["accepted"] > standing["accepted"] > 0


def test_a_drafter_whose_time_is_limited_as_engines_are_shipped_changes_no_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tests set no limit. It holds from the first step on whose time is known: before that it has drafted."""
    speculator, before = stage.runner.spec_rollout, dict(stage.runner.spec_rollout.guard.failures)
    monkeypatch.setattr(speculator.guard, "is_strict", False)
    monkeypatch.setattr(speculator, "_asking", Asking(TIME_SHARE))
    accepted = stage.runner.stats.accepted

    def before_step(step: int) -> None:
        if 1 <= step < 3:
            until(lambda: stage.has_answered("drafter"))

    check(stage.requests, stage.truth, decode(stage.llm, stage.requests, before_step))
    assert stage.runner.stats.accepted > accepted and speculator.guard.failures == before


def _befall(stage: Stage, started: Any, rng: random.Random, step: int, doomed: str, stopped: set[int]) -> int:
    """What befalls the drafters before a step; returns trees of those that were sent away."""
    trees = 0
    _ = [warm.wake() or warm.address for warm in stage.pool.values()]
    if doomed and step == 4:
        pid = started.process.pid if doomed == "drafter" else stage.pool[doomed].process.pid
        # 0 would be the tests themselves; one that hung for too long may just have been killed
        if pid and _exists(pid):
            os.kill(pid, signal.SIGKILL)
    for name in WARM:
        what = rng.random()
        if name not in stage.drafter.links and (what < 0.1 or not step):
            # one that was killed and is not begun anew yet cannot be attached: that is said, no more
            address = stage.pool[name].process.command.address
            window, only = rng.randint(1, 16), rng.choice((None, None, ["0", "2"]))
            answer = stage.ask("attach_drafter", name, address, window, rng.randint(1, 4), only)
            assert "is_there" in answer or "nobody serves" in answer["cause"]
        elif name in stage.drafter.links and what < 0.1:
            trees += stage.ask("detach_drafter", name)["trees"]
        elif name in stage.drafter.links and what < 0.2:
            stage.ask("assign_drafter", name, rng.choice((None, ["1"], [])))
    pid = rng.choice([started.process.pid, *(warm.process.pid for warm in stage.pool.values())])
    if pid is not None and rng.random() < 0.15 and _exists(pid):
        os.kill(pid, signal.SIGSTOP)
        stopped.add(pid)
    elif stopped and rng.random() < 0.3:
        _go_on(stopped)
    return trees


def test_thirty_schedules_of_faults_change_no_token(stage: Stage) -> None:
    """One to three drafters; mail that is late and refused; processes that hang, die, come and go."""
    started = stage.drafter.links["drafter"]
    plain = started._mail
    trees, accepted = 0, stage.runner.stats.accepted
    for number in range(30):
        rng = random.Random(number)
        chance = rng.choice((0.0, 0.1, 0.3))
        stage.drafter._connect = lambda address, rng=rng, chance=chance: Faulty(connect(address), rng, chance)
        started._mail, started.window = Faulty(plain, rng, chance), rng.randint(1, 16)
        stopped: set[int] = set()
        doomed = {9: "first", 17: "drafter", 25: "second"}.get(number, "")

        def before_step(step: int, rng: random.Random = rng, doomed: str = doomed, stopped: set[int] = stopped) -> None:
            nonlocal trees
            trees += _befall(stage, started, rng, step, doomed, stopped)

        chosen = rng.sample(range(len(stage.short)), 4)
        try:
            drafted = decode(stage.llm, [stage.short[i] for i in chosen], before_step)
        finally:
            _go_on(stopped)
            started._mail = plain
        check([stage.short[i] for i in chosen], [stage.short_truth[i] for i in chosen], drafted)
        for name in WARM:
            if name in stage.drafter.links:
                trees += stage.ask("detach_drafter", name)["trees"]
    assert trees > 0 and stage.runner.stats.accepted > accepted
    # who was killed is begun anew
    until(lambda: all(map(stage.is_ready, WARM)))


def test_bad_calls_are_answered_with_their_cause_and_change_nothing(stage: Stage) -> None:
    before = list(stage.drafter.links)
    for call in (
        ("attach_drafter", "drafter", stage.pool["first"].address),
        ("attach_drafter", "new", "ipc:///nowhere"),
        ("attach_drafter", "new", "carrier pigeon"),
        ("detach_drafter", "new"),
        ("assign_drafter", "new", None),
    ):
        answer = stage.ask(*call)
        assert set(answer) == {"cause", "hint"}, call
    assert list(stage.drafter.links) == before


def _go_on(stopped: set[int]) -> None:
    for pid in stopped:
        if _exists(pid):
            os.kill(pid, signal.SIGCONT)
    stopped.clear()


def _disturb(process: Any, rng: random.Random, ending: threading.Event) -> None:
    while not ending.wait(rng.uniform(0.0, 0.4)):
        pid = process.pid
        if pid is None or not process.is_alive:
            continue
        what = rng.choice((signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL))
        os.kill(pid, what)
        if what is signal.SIGSTOP:
            time.sleep(rng.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGCONT)
        else:
            return  # another one takes seconds to begin


def _exists(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def test_a_drafter_elsewhere_with_a_short_context_drafts_for_short_requests_before_and_after_long_ones(
    tmp_path: Path,
) -> None:
    target = model(tmp_path, "llama", "float32")
    small = with_context(perturbed(target, tmp_path / "draft", 0.1), 96)
    given = {"method": "draft_model", "model": small, "num_speculative_tokens": 4}
    settings = {**DECOUPLED, "decoupled": {"window": 4}, "speculative_config": given}
    common = {"ignore_eos": True, "temperature": 1.0}
    short, answers, prompts = (
        [Case(name, str(i), [9 + i] * length, {**common, "max_tokens": most, "seed": i}) for i in range(4)]
        for name, length, most in (("short", 8, 60), ("answers", 8, 200), ("prompts", 200, 30))
    )
    with engine(target, "float32", is_ours=True, spec_rollout=settings) as ours:
        own = Elsewhere(ours.llm, ours.runner, {}, short, [])
        own.overheard("drafter")

        def heard(step: int) -> None:
            if step % 4 == 3:
                until(lambda: own.has_answered("drafter"))

        found = []
        for requests, is_short in ((short, True), (answers, False), (prompts, False), (short, True)):
            plain, before = run(ours.llm, requests, enabled=False), ours.runner.stats.drafted
            drafted = decode(ours.llm, requests, heard) if is_short else run(ours.llm, requests)
            check(requests, plain, drafted)
            found.append(ours.runner.stats.drafted - before)
    assert found[0] > 0 and found[3] > 0 and found[2] == 0
