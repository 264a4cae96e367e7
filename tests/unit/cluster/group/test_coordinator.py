"""The ladder's decisions: what they promise whatever the workers report, and some that can be checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.group.coordinator import Coordinator, Rules
from vllm_specrollout.cluster.group.messages import Attach, Command, Detach, Link, Race, Report, Running
from vllm_specrollout.errors import ConfigError

METHODS = ("history", "ngram")
RACE = Rules(methods=METHODS)
NAMES = [f"w{i}" for i in range(5)]


def own(*requests: str, rate: float = 0.5, **more: object) -> Report:
    return Report(running=tuple(Running(one, False, 100, int(100 * rate)) for one in requests), **more)  # type: ignore[arg-type]


def decided(reports: dict[str, Report], rules: Rules = RACE, now: float = 0.0) -> list[tuple[str, Command]]:
    coordinator = Coordinator(rules)
    for name, report in reports.items():
        coordinator.hear(name, report, now)
    return coordinator.decide(now)


@st.composite
def _reports(draw: st.DrawFn) -> dict[str, Report]:
    """States that may be: originals are at one worker each, copies anywhere, and links lead to those who lend."""
    originals = {f"r{i}": draw(st.sampled_from(NAMES)) for i in range(draw(st.integers(0, 8)))}
    reports = {}
    for name in NAMES[: draw(st.integers(1, 5))]:
        running = [Running(one, False, 10, draw(st.integers(0, 10))) for one, at in originals.items() if at == name]
        elsewhere = [one for one, at in originals.items() if at != name]
        copies = draw(st.lists(st.sampled_from(elsewhere), unique=True, max_size=2)) if elsewhere else []
        running += [Running(one, True, 10, draw(st.integers(0, 10))) for one in copies]
        lenders = draw(st.lists(st.sampled_from([one for one in NAMES if one != name]), unique=True, max_size=2))
        links = tuple(Link(one, tuple(r.request for r in running[:1])) for one in lenders)
        done = tuple(draw(st.lists(st.sampled_from(sorted(originals)), max_size=1))) if originals else ()
        method = draw(st.sampled_from(["", *METHODS]))
        model = draw(st.sampled_from(["small", "tiny"]))
        reports[name] = Report(method, tuple(running), done, f"ipc:///{name}", model, links)
    return reports


@given(_reports(), st.integers(1, 3), st.sampled_from(["race", "attach"]), st.integers(1, 4))
def test_whatever_is_reported_the_promises_hold(reports: dict[str, Report], most: int, mode: str, rounds: int) -> None:
    coordinator = Coordinator(Rules(mode=mode, methods=METHODS, most=most))
    for name, report in reports.items():
        coordinator.hear(name, report, 0.0)
    commands = [one for number in range(rounds) for one in coordinator.decide(0.1 * number)]
    assert len(set(commands)) == len(commands), "nobody is told twice while an answer may be on its way"
    at = {name: {one.request for one in report.running} for name, report in reports.items()}
    complete = {request for report in reports.values() for request in report.finished}
    races: dict[str, list[Race]] = {}
    lent: dict[str, str] = {}
    for worker, command in commands:
        assert worker in reports
        match command:
            case Race(request, _):
                assert request not in at[worker], "what it runs itself is no help"
                assert request not in complete
                assert all(one.is_copy for one in reports[worker].running), "who has requests of its own helps nobody"
                races.setdefault(worker, []).append(command)
            case Attach(drafter, address, requests):
                assert drafter != worker and not reports[drafter].running and address == f"ipc:///{drafter}"
                assert set(requests) <= at[worker] - complete and 0 < len(requests) <= most
                assert lent.setdefault(drafter, worker) == worker, "a drafter drafts for one worker"
            case Detach(drafter):
                link = next(one for one in reports[worker].links if one.drafter == drafter)
                is_idle = drafter in reports and not reports[drafter].running
                assert not is_idle or not at[worker] & set(link.requests)
    for worker, given_races in races.items():
        assert len(reports[worker].running) + len(given_races) <= max(most, len(reports[worker].running))
        assert len({race.method for race in given_races}) == 1, "a worker drafts with one method"
    pairs = [(race.request, race.method) for given_races in races.values() for race in given_races]
    pairs += [(one.request, report.method) for report in reports.values() for one in report.running]
    assert all(pairs.count((race.request, race.method)) == 1 for own in races.values() for race in own)


@given(_reports())
def test_one_that_begins_anew_decides_as_one_that_was_always_there(reports: dict[str, Report]) -> None:
    old = Coordinator(Rules(methods=METHODS))
    for now in (0.0, 100.0):
        for name, report in reports.items():
            old.hear(name, report, now)
    assert old.decide(100.0) == decided(reports, now=100.0)


def test_the_request_with_the_lowest_acceptance_gets_all_methods_first() -> None:
    commands = decided({"a": own("good", rate=0.9), "b": own("bad", rate=0.2), "c": Report(), "d": Report()})
    races = {(worker, command.request, command.method) for worker, command in commands if isinstance(command, Race)}
    assert races == {
        ("c", "bad", "history"), ("d", "bad", "ngram"), ("c", "good", "history"), ("d", "good", "ngram"),
    }  # fmt: skip


def test_no_worker_helps_with_more_than_it_may() -> None:
    commands = decided({"a": own(*map(str, range(9))), "b": Report()}, Rules(methods=METHODS, most=2))
    assert len(commands) == 2


def test_a_worker_that_is_silent_is_forgotten_and_what_it_lent_is_let_go() -> None:
    coordinator = Coordinator(Rules(mode="attach", silence_s=5.0))
    coordinator.hear("b", Report(drafter="ipc:///b"), 0.0)
    coordinator.hear("a", own("r"), 0.0)
    assert coordinator.decide(0.0) == [("a", Attach("b", "ipc:///b", ("r",)))]
    linked = own("r", links=(Link("b", ("r",)),))
    coordinator.hear("a", linked, 4.0)
    assert coordinator.decide(4.0) == []
    coordinator.hear("a", linked, 6.0)
    assert coordinator.decide(6.0) == [("a", Detach("b"))]
    assert coordinator.workers == ["a"]


def lending(model: str, name: str, **more: object) -> Report:
    return Report(drafter=f"ipc:///{name}", drafter_model=model, **more)  # type: ignore[arg-type]


def test_a_straggler_gets_a_drafter_of_each_model_before_the_next_request_does() -> None:
    reports = {
        "a": own("good", rate=0.9),
        "b": own("bad", rate=0.2),
        "c": lending("small", "c"),
        "d": lending("tiny", "d"),
        "e": lending("small", "e"),
    }
    assert sorted(decided(reports, Rules(mode="attach")), key=str) == sorted(
        [
            ("b", Attach("c", "ipc:///c", ("bad",))),
            ("b", Attach("d", "ipc:///d", ("bad",))),
            ("a", Attach("e", "ipc:///e", ("good",))),
        ],
        key=str,
    )


def test_a_drafter_that_is_lent_takes_what_else_its_worker_has_until_it_is_full() -> None:
    """Nobody else is idle: it keeps what it has, and gets what it lacks, the worst first."""
    rules = Rules(mode="attach", most=2)
    busy = Report(
        running=(
            Running("r", tried=10, matched=9),
            Running("s", tried=10, matched=5),
            Running("t", tried=10, matched=1),
        ),
        links=(Link("b", ("r",)),),
    )
    assert decided({"a": busy, "b": lending("small", "b")}, rules) == [("a", Attach("b", "ipc:///b", ("r", "t")))]


def test_two_drafters_of_one_model_share_a_workers_requests() -> None:
    reports = {"a": own("r", "s"), "b": lending("small", "b"), "c": lending("small", "c")}
    commands = decided(reports, Rules(mode="attach"))
    assert commands == [("a", Attach("b", "ipc:///b", ("r",))), ("a", Attach("c", "ipc:///c", ("s",)))]
    # and where another worker has stragglers, too, one of them is left for it
    commands = decided({**reports, "d": own("u", rate=0.9)}, Rules(mode="attach"))
    assert commands == [("a", Attach("b", "ipc:///b", ("r", "s"))), ("d", Attach("c", "ipc:///c", ("u",)))]


def test_what_is_on_its_way_is_not_lent_twice() -> None:
    coordinator = Coordinator(Rules(mode="attach", most=1))
    for name, report in {"a": own("r"), "b": lending("small", "b"), "c": lending("tiny", "c")}.items():
        coordinator.hear(name, report, 0.0)
    assert len(coordinator.decide(0.0)) == 2
    coordinator.hear("a", own("r", "s", rate=0.1), 1.0)
    assert coordinator.decide(1.0) == [], "both are full by now"


def test_a_drafter_goes_home_when_its_worker_has_requests_again() -> None:
    rules = Rules(mode="attach")
    linked = own("r", links=(Link("b", ("r",)),))
    assert decided({"a": linked, "b": Report(drafter="ipc:///b")}, rules) == []
    assert decided({"a": linked, "b": own("s", drafter="ipc:///b")}, rules) == [("a", Detach("b"))]


def test_a_drafter_that_cannot_draft_is_let_go_and_another_of_its_model_is_lent() -> None:
    rules = Rules(mode="attach")
    dead, other = Report(drafter_model="small"), lending("small", "c")
    assert decided({"a": own("r"), "b": dead, "c": other}, rules) == [("a", Attach("c", "ipc:///c", ("r",)))]
    linked = own("r", links=(Link("b", ("r",)),))
    assert decided({"a": linked, "b": dead, "c": other}, rules) == [
        ("a", Detach("b")), ("a", Attach("c", "ipc:///c", ("r",))),
    ]  # fmt: skip


def test_a_drafter_goes_home_when_another_worker_of_its_device_has_requests() -> None:
    linked = own("r", links=(Link("b", ("r",)),), devices=("cpu:0",))
    reports = {"a": linked, "b": Report(drafter="ipc:///b", devices=("cpu:1",))}
    reports["c"] = own("s", devices=("cpu:1",))
    assert decided(reports, Rules(mode="attach")) == [("a", Detach("b"))]


@pytest.mark.parametrize("mode", ["race", "attach"])
def test_only_a_worker_whose_device_is_idle_helps(mode: str) -> None:
    places = (("b", "cpu:0"), ("c", "cpu:1"), ("d", "cpu:2"))
    reports = {name: Report(drafter=f"ipc:///{name}", devices=(device,)) for name, device in places}
    reports["a"] = own("r", devices=("cpu:0",))
    neighbour = Report("ngram", (Running("s", False, 100, 50),), devices=("cpu:2",))
    rules = Rules(mode=mode, methods=("ngram",))
    assert _helpers({**reports, "e": neighbour}, rules) == {"c"}
    found = _helpers(reports, rules)
    assert found and found <= {"c", "d"}


def _helpers(reports: dict[str, Report], rules: Rules) -> set[str]:
    """Those who are to do something for another worker."""
    return {one.drafter if isinstance(one, Attach) else name for name, one in decided(reports, rules)}


def test_a_command_that_had_no_effect_is_given_again_later() -> None:
    coordinator = Coordinator(Rules(methods=("ngram",)))
    for now, expected in ((0.0, 1), (1.0, 0), (2.5, 1)):
        coordinator.hear("a", own("r"), now)
        coordinator.hear("b", Report(), now)
        assert len(coordinator.decide(now)) == expected


@pytest.mark.parametrize(
    "wrong", [{"mode": "both"}, {"methods": ()}, {"methods": ("a", "a")}, {"most": 0}, {"silence_s": 0.0}]
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Rules(**wrong)  # type: ignore[arg-type]
