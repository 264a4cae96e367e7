"""verl's router as a ladder: requests go where verl's own router sends them, and lending follows its servers."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_specrollout.errors import ConfigError

FOLDER = Path(__file__).parents[2] / ".trainers"
pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(not (FOLDER / "verl").is_dir(), reason="verl is not here: `make trainers`"),
]


SERVERS = {name: object() for name in ("a", "b", "c")}


class Lending:
    """In the place of the real one: which servers it knows."""

    def __init__(self, servers: dict[str, Any], **given: Any) -> None:
        self.names, self.given = set(servers), given

    def add(self, servers: dict[str, Any]) -> None:
        self.names |= set(servers)

    def remove(self, names: list[str]) -> None:
        self.names -= set(names)

    def status(self) -> dict[str, Any]:
        return {"lent": 7}


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module and verl's."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    from verl.workers.rollout import router

    from vllm_specrollout import verl

    monkeypatch.setattr(verl, "lend", Lending)
    yield verl, router


def routes(router: Any, seed: int) -> list[str]:
    """Where a schedule of requests, ends, and servers that come and go is sent."""
    rng, found, running = random.Random(seed), [], []
    random.seed(seed)
    for number in range(60):
        match rng.randrange(5):
            case 0 if running:
                router.release_server(running.pop(rng.randrange(len(running))))
            case 1 if number == 30:
                router.remove_servers(["b"])
            case 2 if number > 30:
                router.add_servers({"d": object()})
            case _:
                found.append(router.acquire_server(f"session-{rng.randrange(9)}")[0])
                running.append(found[-1])
    return [*found, str(router.get_total_inflight())]


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_requests_go_where_verls_own_router_sends_them(verl: Any, seed: int, is_deterministic: bool) -> None:
    ours, theirs = verl
    config = {"router_class": "vllm_specrollout.verl.LadderRouter", "full_determinism": is_deterministic}
    found = routes(ours.LadderRouter(SERVERS, config), seed)
    assert found == routes(theirs.GlobalRequestLoadBalancer(SERVERS, full_determinism=is_deterministic), seed)


def test_what_the_file_says_reaches_the_lending_which_follows_the_servers(verl: Any) -> None:
    config = {"router_class": "x", "drafter": "small", "drafter_devices": ["cuda:1"], "drafter_engine": {"a": 1}}
    router = verl[0].LadderRouter(SERVERS, {**config, "most": 2})
    given = {"drafter": "small", "devices": ["cuda:1"], "drafter_engine": {"a": 1}, "most": 2}
    assert router.lending.names == set(SERVERS) and router.lending.given == given
    router.add_servers({"d": object()})
    router.remove_servers(["a"])
    assert router.lending.names == {"b", "c", "d"}
    assert router.get_status()["lending"] == {"lent": 7} and router.get_status()["active_servers"] == 3


def groups(router: Any, problems: list[int], samples: int) -> dict[int, Counter[str]]:
    """Problem -> on which servers its samples run; all of a problem come, and then those of the next one."""
    return {
        problem: Counter(router.acquire_server(f"{problem}-{i}", prompt_ids=[problem, 1])[0] for i in range(samples))
        for problem in problems
    }


def test_samples_of_a_problem_run_together_and_no_replica_has_more_than_another(verl: Any) -> None:
    router = verl[0].ProblemRouter({f"s{i}": object() for i in range(8)}, {"router_class": "x"})
    assert router.require_acquire_fields() == ["prompt_ids"]
    for epoch in range(2):
        found = groups(router, [*range(64)] if epoch else [*range(63, -1, -1)], 16)
        assert all(len(own) == 1 for own in found.values())
        assert set(router.get_status()["servers"].values()) == {128}
        for own in found.values():
            for server, count in own.items():
                for _ in range(count):
                    router.release_server(server)


def test_a_replica_with_too_many_requests_gets_none_until_others_have_as_many(verl: Any) -> None:
    router = verl[0].ProblemRouter({"a": object(), "b": object()}, {"slack": 4})
    (own,) = groups(router, [7], 20).values()
    assert sorted(own.values()) == [8, 12]


def test_a_further_turn_goes_where_the_first_went_and_a_replica_that_left_gets_nothing(verl: Any) -> None:
    router = verl[0].ProblemRouter(SERVERS, {})
    first, _ = router.acquire_server("r", prompt_ids=[1])
    other = next(name for name in SERVERS if name != first)
    for _ in range(3):
        router.acquire_server("x", prompt_ids=[2])
    assert router.acquire_server("r", prompt_ids=[1, 2, 3])[0] == first
    router.remove_servers([first])
    assert router.acquire_server("r", prompt_ids=[1])[0] != first
    assert router.acquire_server("s", prompt_ids=[1])[0] != first and other in router.get_all_servers()


def test_an_unknown_key_is_refused_with_the_nearest_one(verl: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key `draftr`") as caught:
        verl[0].LadderRouter(SERVERS, {"router_class": "x", "draftr": "small"})
    assert caught.value.hint == "did you mean `drafter`?"
