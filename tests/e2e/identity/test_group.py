"""The very tokens of stock vLLM from a group of engines on Ray, whoever helps and whatever dies meanwhile."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import OURS, engine, model
from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.planner import choose_ladder

pytestmark = pytest.mark.nightly

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
DRAFTS = {**OURS, "drafters": ["history", "ngram"], "scratch_blocks": 64, "placement": "decoupled"}
SOME = (
    "greedy",
    "temperature 1",
    "all penalties, greedy",
    "repetition penalty",
    "min_tokens",
    "bad words",
    "stop tokens",
)
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def path(models: Path) -> str:
    return model(models, "llama", "float32")


@pytest.fixture(scope="module")
def other(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights for the same model."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(path, folder)
    weights = load_file(f"{path}/model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.7
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def truth(path: str, other: str) -> tuple[list[Any], Tokens, Tokens]:
    """Requests, the first of them long, and stock's tokens with either weights."""
    requests = cases(14, VOCAB, seed=41, max_tokens=20, only=SOME)
    requests[0].params.update(max_tokens=300)
    requests[1].params.update(max_tokens=300)
    assert requests[1].name == "temperature 1", "its own drafters hold it up least"
    requests[7].params.update(max_tokens=90)
    assert requests[7].name == "greedy", "a random model's goes round in circles, which is drafted"
    with engine(path, "float32", is_ours=False, max_num_seqs=8) as stock:
        first = [tuple(one.outputs[0].token_ids) for one in run(stock.llm, requests)]
        stock.llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        stock.llm.reset_prefix_cache()
        second = [tuple(one.outputs[0].token_ids) for one in run(stock.llm, requests)]
    assert first != second
    return requests, first, second


@pytest.fixture(scope="module")
def group(path: str, truth: Any) -> Iterator[SpecGroup]:
    """Two engines, each with a warm drafter, which is the target itself: what it drafts is met."""
    settings = {**ENGINE, "kv_cache_memory_bytes": 1 << 27}
    drafter = {**ENGINE, "kv_cache_memory_bytes": 1 << 26}
    with SpecGroup(
        path, ladder="attach", drafters=[path], engine=settings, drafter_engine=drafter, spec_rollout=DRAFTS
    ) as made:
        processes = psutil.Process().children(recursive=True)
        yield made
        processes += psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs({one.pid: one for one in processes if "ray" in _words(one)}.values(), timeout=60)
    assert not alive, "nothing of a group is left"


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ask(group: SpecGroup, requests: list[Any]) -> Tokens:
    """The tokens of all answers, to which drafts were accepted."""
    before = accepted(group)
    answers = group.generate([case.prompt for case in requests], [case.params for case in requests])
    after = accepted(group)
    assert len(after) < len(before) or sum(after) > sum(before)
    return [one.token_ids for one in answers]


def anew(requests: list[Any], number: object) -> list[Any]:
    """The same, as problems of which history knows nothing: else they would be over before anybody could help."""
    found = []
    for case in requests:
        own = {"extra_args": {"spec_rollout": {"problem_id": f"{case.problem_id}, time {number}"}}}
        found.append(replace(case, params={**case.params, **own}))
    return found


def accepted(group: SpecGroup) -> list[int]:
    return [own[0]["accepted"] for own in group.collective_rpc("spec_rollout_stats")]


def once(group: SpecGroup, holds: Callable[[], bool], what: Callable[[], None]) -> None:
    """Do something as soon as it holds, between two turns of the driver."""
    take, is_done = group._take, False

    def watched() -> None:
        nonlocal is_done
        take()
        if not is_done and holds():
            is_done = True
            what()

    group._take = watched  # type: ignore[method-assign]


def await_all(group: SpecGroup) -> None:
    end = time.monotonic() + 600
    while not all(one["is_up"] for one in group.status()["engines"].values()):
        assert time.monotonic() < end
        group._turn({})


def pid_of(group: SpecGroup, name: str) -> int:
    return group._one(name, "pid")


# groups of their own come first: beside the others' group they would find neither memory nor Ray's cores


def test_two_ranks_an_engine_share_a_batch(path: str, truth: Any) -> None:
    requests, wanted, _ = truth
    settings = {**ENGINE, "kv_cache_memory_bytes": 1 << 27, "tensor_parallel_size": 2}
    with SpecGroup(path, ladder="move", devices=["cpu:0-1"] * 2, engine=settings, spec_rollout=DRAFTS) as group:
        assert [len(own) for own in group.collective_rpc("spec_rollout_stats")] == [2, 2]
        assert ask(group, requests) == wanted


def test_drafters_are_chosen_by_what_an_earlier_group_measured(
    path: str, truth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    requests, wanted, _ = truth
    more: dict[str, Any] = {"engine": {**ENGINE, "kv_cache_memory_bytes": 1 << 27}, "spec_rollout": DRAFTS}
    own = {"drafter_engine": {**ENGINE, "kv_cache_memory_bytes": 1 << 26}}
    with SpecGroup(path, ladder="attach", drafters=[path], **own, **more) as group:
        end = time.monotonic() + 600
        while not all(one["drafter"] for one in group.status()["engines"].values()):
            assert time.monotonic() < end
            group._turn({})
        for number in itertools.count():
            if known := group._profiles():
                break
            assert time.monotonic() < end
            assert ask(group, anew(requests[1:2], number)) == wanted[1:2]
    assert {one.drafter for one in known} == {path} and known[0].match > 0.9
    ladder, models = choose_ladder(known)
    with SpecGroup(path, drafters="auto", **own, **more) as group:
        assert group.status()["ladder"] == ladder
        assert {one.method for one in group._driver.engines.values()} == set(models or [""])
        assert ask(group, requests) == wanted


def test_answers_of_a_group_are_stocks_and_an_idle_engines_drafter_helps(group: SpecGroup, truth: Any) -> None:
    requests, wanted, _ = truth
    assert ask(group, requests) == wanted
    end = time.monotonic() + 600
    while not all(one["drafter"] for one in group.status()["engines"].values()):
        assert time.monotonic() < end
        group._turn({})
    before = group.status()["lent"]
    matched: list[int] = []

    def look() -> bool:
        busy = [name for name, one in group.status()["engines"].items() if one["lent"]]
        for name in busy:
            (state,) = group._one(name, "rpc", "drafters_state", [], {})
            matched.extend(one["matched"] for one in state.values())
        return False

    once(group, look, lambda: None)
    try:
        # an answer may be over before what is lent to it has drafted
        for number in itertools.count():
            assert ask(group, anew(requests[1:2], number)) == wanted[1:2]
            if max(matched, default=0) or time.monotonic() > end:
                break
    finally:
        del group._take  # type: ignore[attr-defined]
    assert group.status()["lent"] > before and max(matched, default=0) > 0


@pytest.mark.parametrize("victim", ["the actor", "its engine"])
def test_requests_of_an_engine_killed_amid_a_batch_go_on_elsewhere(group: SpecGroup, truth: Any, victim: str) -> None:
    requests, wanted, _ = truth
    requests = anew(requests, victim)
    name = "engine-0"
    actor = psutil.Process(pid_of(group, name))
    below = actor.children(recursive=True)
    killed = actor if victim == "the actor" else next(one for one in below if "EngineCore" in _words(one))
    lost = group.status()["lost"]

    def is_amid() -> bool:
        return any(copy.gained for copy in group._driver.engines[name].running.values())

    once(group, is_amid, lambda: os.kill(killed.pid, signal.SIGKILL))
    try:
        assert ask(group, requests) == wanted
    finally:
        del group._take  # type: ignore[attr-defined]
    assert group.status()["lost"] == lost + 1
    _, alive = psutil.wait_procs([actor, *below], timeout=60)
    assert not alive, "an engine's processes end with it"
    await_all(group)
    assert ask(group, requests) == wanted


def test_an_engine_that_comes_back_has_the_weights_that_were_pushed_meanwhile(
    group: SpecGroup, truth: Any, other: str, path: str
) -> None:
    requests, wanted, changed = truth
    os.kill(pid_of(group, "engine-1"), signal.SIGKILL)
    while group.status()["engines"]["engine-1"]["is_up"]:
        group._turn({})
    version = group.update_weights(weights_path=other)
    assert ask(group, requests) == changed
    await_all(group)
    assert group.status()["version"] == version
    assert ask(group, requests) == changed
    group.update_weights(weights_path=path)
    assert ask(group, requests) == wanted


def test_weights_pushed_amid_a_batch_give_the_tokens_behind_those_that_had_come(
    group: SpecGroup, truth: Any, other: str, path: str
) -> None:
    requests, wanted, changed = truth
    stream = group.stream([case.prompt for case in requests], [case.params for case in requests])
    found = dict([next(stream)])
    version = group.update_weights(weights_path=other)
    found |= dict(stream)
    switched = 0
    for i, answer in found.items():
        starts = {v: start for start, v in answer.versions}
        start = starts.get(version, len(answer.token_ids))
        assert answer.token_ids[:start] == wanted[i][:start]
        if start == 0:
            assert answer.token_ids == changed[i]
        switched += 0 < start < len(answer.token_ids)
    assert switched, "some request had begun, and went on"
    group.update_weights(weights_path=path)
    assert ask(group, requests) == wanted


def test_rewards_epochs_and_sleep_reach_all_engines(group: SpecGroup, truth: Any) -> None:
    requests, wanted, _ = truth
    answers = group.generate([case.prompt for case in requests], [case.params for case in requests])
    assert group.report_rewards({one.request: 1.0 for one in answers}) == len(answers)
    begun = group.begin_epoch()
    assert group.begin_epoch() == begun + 1, "each engine is there, whatever it had begun by itself"
    assert ask(group, requests) == wanted
