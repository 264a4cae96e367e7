"""The very tokens of stock vLLM from a group of engines on Ray, whoever helps and whatever dies meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
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

from vllm import SamplingParams
from vllm.utils.network_utils import get_open_port

from tests.e2e.identity import gloo
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import OURS, engine, model
from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.planner import choose_ladder

pytestmark = pytest.mark.nightly

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
DRAFTS = {**OURS, "drafters": ["history", "ngram"], "placement": "decoupled"}
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
    settings = {**ENGINE, "kv_cache_memory_bytes": 1 << 27, "weight_transfer_config": {"backend": gloo.NAME}}
    settings["worker_extension_cls"] = "tests.e2e.identity.gloo.Extension"
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
    """Do something as soon as it holds, between two reports."""
    is_done = False

    def watched(engine: str, report: Any) -> None:
        nonlocal is_done
        if not is_done and holds():
            is_done = True
            what()

    group._driver.listener = watched


def await_all(group: SpecGroup) -> None:
    await_that(group, lambda one: bool(one["is_up"]))


def await_that(group: SpecGroup, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Of each engine."""
    end = time.monotonic() + 600
    while not all(holds(one) for one in group.status()["engines"].values()):
        assert time.monotonic() < end
        time.sleep(0.1)


def pid_of(group: SpecGroup, name: str) -> int:
    return int(group._run(group._placement.call(name, "pid")))


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
        await_that(group, lambda one: bool(one["drafter"]))
        end = time.monotonic() + 600
        for number in itertools.count():
            if known := group._run(group._profiles()):
                break
            assert time.monotonic() < end
            assert ask(group, anew(requests[1:2], number)) == wanted[1:2]
    assert {one.drafter for one in known} == {path} and known[0].match > 0.9
    ladder, models = choose_ladder(known)
    with SpecGroup(path, drafters="auto", **own, **more) as group:
        assert group.status()["ladder"] == ladder
        await_that(group, lambda one: bool(one["drafter"]) == bool(models))
        assert ask(group, requests) == wanted


def test_answers_of_a_group_are_stocks_and_an_idle_engines_drafter_helps(group: SpecGroup, truth: Any) -> None:
    requests, wanted, _ = truth
    assert ask(group, requests) == wanted
    await_that(group, lambda one: bool(one["drafter"]))
    before, end = group.status()["lent"], time.monotonic() + 600

    def met() -> int:
        return int(group._lending.status()["accepted_nodes"]) if group._lending else 0

    # an answer may be over before what is lent to it has drafted, and then nothing of it was drafted
    for number in itertools.count():
        (case,) = anew(requests[1:2], number)
        (found,) = group.generate([case.prompt], case.params)
        assert found.token_ids == wanted[1]
        if met() or time.monotonic() > end:
            break
    assert group.status()["lent"] > before and met() > 0


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
    assert ask(group, requests) == wanted
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
        time.sleep(0.1)
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
    requests = anew(requests, "amid")
    stream = group.stream([case.prompt for case in requests], [case.params for case in requests])
    found = dict([next(stream)])
    end = time.monotonic() + 60
    # what goes on is told twice a second
    while not any(copy.gained for one in group._driver.engines.values() for copy in one.running.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
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


def test_weights_that_another_process_sends_are_the_groups_and_who_is_begun_anew_loads_the_path(
    group: SpecGroup, truth: Any, other: str, path: str
) -> None:
    requests, wanted, changed = truth
    port, spawn = get_open_port(), multiprocessing.get_context("spawn")
    turn = spawn.Semaphore(0)
    trainer = spawn.Process(target=gloo.train, args=(port, 3, [other], turn), daemon=True)
    trainer.start()
    transfer = group.transfer(path=other)
    transfer.init_weight_transfer_engine({"host": "127.0.0.1", "port": port, "rank_offset": 1, "world_size": 3})
    transfer.start_weight_update()
    turn.release()
    transfer.update_weights({"shapes": gloo.shapes_of(other)})
    version = transfer.finish_weight_update()
    assert ask(group, requests) == changed
    os.kill(pid_of(group, "engine-1"), signal.SIGKILL)
    assert ask(group, requests) == changed
    await_all(group)
    assert group.status()["version"] == version and ask(group, requests) == changed
    # the trainer ends before it has sent anything more
    trainer.join(60.0)
    transfer.start_weight_update()
    transfer.abandon()
    assert ask(group, requests) == changed
    group.update_weights(weights_path=path)
    assert ask(group, requests) == wanted


def test_chances_texts_and_several_answers_are_vllms_own(group: SpecGroup, truth: Any, path: str) -> None:
    params = {"n": 3, "seed": 11, "max_tokens": 12, "logprobs": 2, "temperature": 1.0}
    found = group.generate([[3, 4, 5]], params)
    with engine(path, "float32", is_ours=False, max_num_seqs=8) as stock:
        (one,) = stock.llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(**params))
    for ours, theirs in zip(found, one.outputs, strict=True):
        assert ours.token_ids == tuple(theirs.token_ids) and ours.text == theirs.text
        assert [set(own) for own in ours.choices] == [set(own) for own in theirs.logprobs]
        for own, its in zip(ours.choices, theirs.logprobs, strict=True):
            assert all(
                abs(own[token][0] - its[token].logprob) < 1e-3 and own[token][1] == its[token].rank for token in own
            )


def test_rewards_epochs_and_sleep_reach_all_engines(group: SpecGroup, truth: Any) -> None:
    requests, wanted, _ = truth
    answers = group.generate([case.prompt for case in requests], [case.params for case in requests])
    assert group.report_rewards({one.request: 1.0 for one in answers}) == len(answers)
    begun = group.begin_epoch()
    assert group.begin_epoch() == begun + 1, "each engine is there, whatever it had begun by itself"
    assert ask(group, requests) == wanted
