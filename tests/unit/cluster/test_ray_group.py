"""A group on Ray, with engines that need no model: what a trainer calls, and what happens to processes."""

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psutil
import pytest

pytest.importorskip("ray")

from tests.unit.cluster.standin import answer, generated, token
from tests.waiting import until
from vllm_specrollout.cluster import GroupError, SpecGroup
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.cluster.ray import group as module
from vllm_specrollout.config.devices import shares
from vllm_specrollout.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _standin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REPLICA", "tests.unit.cluster.standin:Replica")
        # without a token of its own, Ray 2.60 would write one into the home
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield


TWO: dict[str, Any] = {"engines": 2, "ladder": "move", "max_restarts": -1, "cpus": 0.4, "devices": ["cpu:0", "cpu:1"]}


@pytest.fixture(scope="module")
def group(_standin: None) -> Iterator[SpecGroup]:
    with SpecGroup("model", **TWO) as made:
        yield made


def are_up(group: SpecGroup) -> bool:
    return all(one["is_up"] for one in group.status()["engines"].values())


def is_whole_again(group: SpecGroup) -> None:
    until(lambda: group.generate([[1]], {"max_tokens": 20}) and are_up(group), 120.0)


def pids(group: SpecGroup) -> list[int]:
    return [own[0] for own in group.collective_rpc("pid")]


def test_answers_come_in_the_prompts_order_with_log_probabilities(group: SpecGroup) -> None:
    found = generated(group, [{"seed": i, "max_tokens": 5 + i if i else 60, "logprobs": 0} for i in range(9)])
    assert all(one.logprobs == tuple(-float(t) for t in one.token_ids) and not one.choices for one in found)
    assert {one.finish_reason for one in found} == {"length"}
    assert group.report_rewards({one.request: 1.0 for one in found}) == 18, "each engine is told, and knows all"


def test_texts_are_prompts_as_well_and_a_seed_is_given_where_there_is_none(group: SpecGroup) -> None:
    (first,) = group.generate(["ab"], {"max_tokens": 3})
    (second,) = group.generate([[97, 98]], {"max_tokens": 3})
    assert first.token_ids != second.token_ids, "seeds differ"


def test_several_answers_to_a_prompt_have_seeds_in_a_row_and_adapters_and_chances_pass_through(group) -> None:
    lora = {"lora_name": "a", "lora_int_id": 1, "lora_path": "there"}
    asked = [{"seed": 7, "n": 3, "max_tokens": 4, "logprobs": 2}, {"max_tokens": 2}]
    found = group.generate([[1], [2]], asked, lora=lora)
    assert [list(one.token_ids) for one in found[:3]] == [answer({"seed": 7 + i, "max_tokens": 4}) for i in range(3)]
    assert len(found) == 4 and found[0].text == str(lora)
    assert found[0].choices == tuple({one: (-float(one), 1)} for one in found[0].token_ids)


def test_answers_are_streamed_as_they_end_and_what_is_given_up_runs_no_more(group: SpecGroup) -> None:
    stream = group.stream([[1], [2]], [{"seed": 0, "max_tokens": 100000}, {"seed": 1, "max_tokens": 4}])
    index, found = next(stream)
    assert index == 1 and list(found.token_ids) == answer({"seed": 1, "max_tokens": 4})
    stream.close()
    status = group.status()
    assert status["open"] == status["waiting"] == 0
    assert all(one["running"] == 0 for one in status["engines"].values())


def test_two_batches_and_new_weights_at_once_from_an_event_loop(group: SpecGroup) -> None:
    async def main() -> tuple[Any, Any, int]:
        first = asyncio.ensure_future(group.agenerate([[1]], {"seed": 3, "max_tokens": 150}))
        second = asyncio.ensure_future(group.agenerate([[2]], {"seed": 4, "max_tokens": 150}))
        await asyncio.sleep(0.25)
        version = await asyncio.to_thread(group.update_weights, "load", number=7)
        return (await first)[0], (await second)[0], version

    *found, version = asyncio.run(main())
    for one, seed in zip(found, (3, 4), strict=True):
        (_, before), *switched = one.versions
        assert before < version and [v for _, v in switched] == [version]
        start = switched[0][0]
        assert 0 < start < 150
        assert list(one.token_ids[start:]) == [token(seed, 7, i) for i in range(start, 150)]
    group.update_weights("load", number=0)


def test_weights_come_by_a_transfer_whose_calls_reach_all(group: SpecGroup) -> None:
    sender = group.transfer(path="5")
    sender.init_weight_transfer_engine({"rank_offset": 1})
    sender.start_weight_update()
    sender.update_weights({"number": 5})
    assert sender.finish_weight_update() == group.status()["version"]
    (found,) = group.generate([[1]], {"seed": 3, "max_tokens": 9})
    assert list(found.token_ids) == answer({"seed": 3, "max_tokens": 9}, weights=5)
    group.update_weights("load", number=0)


def test_weights_that_cannot_be_brought_are_an_error_and_good_ones_mend_it(group: SpecGroup) -> None:
    with pytest.raises(GroupError, match="2 of 2 engines could not follow: .*AttributeError: nonsense"):
        group.update_weights("nonsense")
    group.update_weights("load", number=0)
    assert are_up(group)


def test_a_group_that_sleeps_answers_nothing_and_epochs_count_on(group: SpecGroup) -> None:
    group.sleep()
    with pytest.raises(GroupError, match="the group sleeps"):
        group.generate([[1]], {"max_tokens": 3})
    group.wake()
    assert [group.begin_epoch(), group.begin_epoch(), group.begin_epoch(7)] == [1, 2, 7]
    assert [own[0].epoch for own in group.collective_rpc("at")] == [7, 7]


def test_an_engine_killed_amid_a_batch_costs_no_token_and_comes_back_with_the_groups_weights(group: SpecGroup) -> None:
    version = group.update_weights("load", number=3)
    lost = group.status()["lost"]
    victim = pids(group)[0]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    generated(group, [{"seed": i, "max_tokens": 150} for i in range(6)], weights=3)
    is_whole_again(group)
    assert group.status()["lost"] == lost + 1 and victim not in pids(group)
    assert {own[0].version for own in group.collective_rpc("at")} == {version}
    group.update_weights("load", number=0)


def test_an_engine_that_has_just_died_is_left_out_of_what_all_are_asked(group: SpecGroup) -> None:
    first, second = pids(group)
    os.kill(first, signal.SIGKILL)
    assert pids(group) == [second]
    is_whole_again(group)


@pytest.mark.nightly
def test_fifty_random_kills_cost_no_token_and_leave_no_process() -> None:
    """Of engines and of what stands below them, at any moment of a batch."""
    rng, seen = random.Random(5), dict[int, psutil.Process]()
    others = set(_actors())  # of the group that the other tests share, which lives on
    with SpecGroup("model", **TWO) as group:
        kills = 0
        while kills < 50:
            own = [one for one in _actors() if one not in others]
            seen |= {one.pid: one for one in own}
            if own:
                victim = rng.choice(own)
                threading.Timer(rng.uniform(0.0, 0.4), _kill, (victim,)).start()
                kills += 1
            generated(group, [{"seed": i, "max_tokens": rng.randrange(1, 120)} for i in range(6)])
        assert group.status()["lost"] > 10
    _, alive = psutil.wait_procs(seen.values(), timeout=60)
    assert not alive


def _actors() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that was just killed
            found += [one] if "Actor" in " ".join(one.cmdline()) else []
    return found


def _kill(victim: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        victim.kill()


def test_an_engine_that_hangs_is_begun_anew_and_its_requests_go_on_elsewhere(group: SpecGroup) -> None:
    group._driver.patience_s, stuck = 1.0, group._driver.engines["engine-0"]
    group._placement.send("engine-0", "rpc", "hang", [], {})
    generated(group, [{"seed": i, "max_tokens": 30} for i in range(8)])
    group._driver.patience_s = 120.0
    assert group._driver.engines["engine-0"] is not stuck


def test_devices_are_what_an_engines_process_sees(group: SpecGroup) -> None:
    seen = [own[0] for own in group.collective_rpc("env")]
    assert sorted(one["VLLM_CPU_OMP_THREADS_BIND"] for one in seen) == ["0", "1"][-len(seen) :]
    assert {one["OMP_NUM_THREADS"] for one in seen} == {"1"}


def test_engines_without_devices_share_the_cores_of_their_host(group: SpecGroup) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with SpecGroup("model", engines=2, cpus=0.1) as shared:
        seen = sorted(own[0]["VLLM_CPU_OMP_THREADS_BIND"] for own in shared.collective_rpc("env"))
    assert seen == sorted(",".join(map(str, own.numbers)) for own in shares(cores, 2))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"engines": 0}, "`engines` is 0"),
        ({"ladder": "up"}, "`ladder` names 'up'"),
        ({"ladder": "attach"}, "`drafters` names none"),
        ({"ladder": "attach", "drafters": "auto"}, "`ladder` is 'attach', and `drafters` is 'auto'"),
        ({"drafters": ["small"]}, "`ladder` is 'off'"),
        ({"drafters": "small", "ladder": "attach"}, "`drafters` is 'small'"),
        ({"devices": ["cpu:0"]}, "names 1 places for 2 engines"),
        ({"devices": ["cuda:0", "cuda:0"]}, "gives cuda:0 to two engines"),
        ({"spec_rollout": False}, "`spec_rollout` is off"),
        ({"gpus": 0.5}, "`gpus` is 0.5, and Ray counts no GPU"),
        ({"patience_s": 0.1}, "`patience_s` is 0.1"),
    ],
)
def test_what_cannot_be_used_is_an_error_before_anything_is_begun(group: SpecGroup, given: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SpecGroup("model", **given)


@pytest.mark.parametrize(
    ("prompts", "given", "what"),
    [
        ([[1.5]], {}, "neither a text nor whole numbers"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1 << 31]], {}, "outside 0 to"),
        ([[1]], {"n": 0}, "`n` is 0"),
        ([[1]], {"prompt_logprobs": 5}, "`prompt_logprobs` is given"),
        ([[1]], [{}, {}], "1 prompts and 2 `params`"),
        ([[1]], 7, "`params` holds a int"),
    ],
)
def test_a_batch_that_cannot_be_asked_is_refused_whole(group: SpecGroup, prompts: Any, given: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        group.generate(prompts, given)
    assert group.status()["open"] == 0


def test_drafters_and_the_ladder_are_chosen_by_what_is_known_of_them() -> None:
    """A drafter that gains is lent; of one that does not, and of none, nothing is begun."""
    good, bad = (known(name, fixed) for name, fixed in (("good", 1.0), ("bad", 40.0)))
    for profiles, ladder, begun in (([bad, good], "attach", "good"), ([bad], "move", ""), ([], "move", "")):
        engine = {"profiles": profiles}
        with SpecGroup("model", engines=1, drafters="auto", cpus=0.1, devices=["cpu:0"], engine=engine) as group:
            until(lambda group=group, begun=begun: group.status()["engines"]["engine-0"]["drafter"] == begun)
            assert group.status()["ladder"] == ladder
        with pytest.raises(GroupError, match="the group is closed"):
            group.status()


def known(drafter: str, fixed_ms: float) -> Any:
    verify = {1: AffineTime(0.3, 13.0, 0.05)}
    own = DrafterProfile(draft=AffineTime(0.0, fixed_ms), verify=verify, match=0.8, drafter=drafter)
    return msgspec.to_builtins(own, str_keys=True)


def test_an_idle_engines_drafter_is_lent_within_a_group_and_calls_that_wait_end_with_it() -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        SpecGroup("model", ladder="attach", drafters=["small"], cpus=0.2, devices=["cpu:0", "cpu:1"]) as group,
    ):
        waiting = pool.submit(group.generate, [[1]], {"max_tokens": 1 << 20})
        until(lambda: group.status()["lent"])
    with pytest.raises(GroupError, match="the group is closed"):
        waiting.result()


def test_a_group_whose_engine_refuses_its_model_says_why(group: SpecGroup) -> None:
    with pytest.raises(GroupError, match="no such model"):
        SpecGroup("model", engines=1, engine={"refuses": True}, cpus=0.1)
