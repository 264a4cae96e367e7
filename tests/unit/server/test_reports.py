import asyncio
import inspect
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_specrollout
from tests.unit.server.conftest import HISTORY, FakeEngine
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.server.reports import EpochError, candidates


class Engine:
    """Engines of two workers each; rank 1 keeps nothing."""

    NOTHING = {"rewards": lambda _: Counter(), "epoch": lambda epoch: epoch or 0, "history": lambda: {}}

    def __init__(self, *names, settings=HISTORY):
        self.engines = [FakeEngine(own, settings) for own in names or (set(),)]
        self.vllm_config = self.engines[0].vllm_config

    @property
    def rewards(self):
        return [engine.rewards for engine in self.engines]

    @property
    def epochs(self):
        return [engine.epoch for engine in self.engines]

    @epochs.setter
    def epochs(self, epochs):
        for engine, epoch in zip(self.engines, epochs, strict=True):
            engine.epoch = epoch

    def call(self, method, args):
        nothing = self.NOTHING[method.rpartition("_")[2]](*args)
        return [[getattr(engine, method)(*args), nothing] for engine in self.engines]


class CalledEngine(Engine):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.call(method, args)[0]


class AwaitedEngine(Engine):
    """Like `AsyncLLM` with data parallel engines: `collective_rpc` reaches all and answers for the first alone."""

    def __init__(self, *names):
        super().__init__(*names)
        self.engine_core, self.core_engines = self, self.engines

    async def call_utility_all_async(self, utility, method, timeout, args, kwargs):
        assert utility == "collective_rpc"
        return self.call(method, args)

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.call(method, args)[0]


def test_a_reward_reaches_the_answer_under_the_name_it_has_inside_vllm():
    llm = CalledEngine({"7", "0_8", "1_8", "cmpl-a-0"})
    counts = vllm_specrollout.report_rewards(llm, {"7": 1.0, "8": [0.5, -2], "cmpl-a": 3, "nobody": 1.0})
    assert counts == {"matched": 4, "repeated": 0, "unknown": 1}
    assert llm.rewards == [{"7": 1.0, "0_8": 0.5, "1_8": -2.0, "cmpl-a-0": 3.0}]


def test_a_reward_reported_again_takes_the_place_of_the_first():
    llm = CalledEngine({"7"})
    vllm_specrollout.report_rewards(llm, {"7": 1.0})
    assert vllm_specrollout.report_rewards(llm, {"7": 0.0}) == {"matched": 0, "repeated": 1, "unknown": 0}
    assert llm.rewards == [{"7": 0.0}]


def test_an_answer_that_one_engine_does_not_know_is_found_in_another():
    engine = AwaitedEngine({"a", "b"}, {"c"})
    counts = asyncio.run(vllm_specrollout.areport_rewards(engine, {"a": 1, "b": 2, "c": 3, "d": 4}))
    assert counts == {"matched": 3, "repeated": 0, "unknown": 1}
    assert engine.rewards == [{"a": 1.0, "b": 2.0}, {"c": 3.0}]


@pytest.mark.parametrize(
    ("reward", "kept"),
    [
        (np.float32(0.5), {"7": 0.5}),
        (np.array(0.5), {"7": 0.5}),
        (np.int64(1), {"7": 1.0}),
        (np.array([1.0, 2.0]), {"0_7": 1.0, "1_7": 2.0}),
    ],
    ids=["scalar", "0-dim", "integer", "one for each sample"],
)
def test_numbers_of_numpy_are_numbers(reward, kept):
    llm = CalledEngine({"7", "0_7", "1_7"})
    assert vllm_specrollout.report_rewards(llm, {"7": reward})["matched"] == len(kept)
    assert llm.rewards == [kept] and {type(own) for own in llm.rewards[0].values()} == {float}


def test_no_rewards_are_no_mistake():
    assert vllm_specrollout.report_rewards(CalledEngine(), {}) == {"matched": 0, "repeated": 0, "unknown": 0}


@pytest.mark.parametrize(
    "rewards, message",
    [
        ({"7": math.nan}, "`rewards['7']` is nan, not a finite number"),
        ({"7": [1.0, math.inf]}, "`rewards['7'][1]` is inf, not a finite number"),
        ({"7": 10**400}, "`rewards['7']` is inf, not a finite number"),
        ({"7": "1.0"}, "`rewards['7']` is '1.0', of type str"),
        ({"7": b"1"}, "`rewards['7']` is b'1', of type bytes"),
        ({"7": None}, "`rewards['7']` is None, of type NoneType"),
        ({"7": True}, "`rewards['7']` is True, of type bool"),
        ({"7": [[1.0]]}, "`rewards['7'][0]` is [1.0], of type list"),
        ({7: 1.0}, "a request's id is 7, of type int"),
        ({"": 1.0}, "a request's id has 0 characters, outside 1 to 256"),
        ({"7" * 257: 1.0}, "a request's id has 257 characters, outside 1 to 256"),
        ([("7", 1.0)], "`rewards` is a list, not a mapping"),
        ({str(i): 0.0 for i in range(65_537)}, "65537 rewards in one report; the limit is 65536"),
        ({"7": [0.0] * 65_537}, "`number of samples in rewards['7']` is 65537, outside 0 to 65536"),
    ],
)
def test_rewards_that_cannot_be_used_are_one_clear_error(rewards, message):
    llm = CalledEngine({"7"})
    with pytest.raises(ConfigError) as error:
        vllm_specrollout.report_rewards(llm, rewards)
    assert error.value.cause == message and error.value.hint
    assert llm.rewards == [{}]


def test_epochs_are_counted_on_or_named():
    llm = CalledEngine()
    assert vllm_specrollout.begin_epoch(llm) == 1
    assert vllm_specrollout.begin_epoch(llm, 5) == 5
    assert vllm_specrollout.begin_epoch(llm, 5) == 5


def test_an_epoch_that_one_engine_would_refuse_is_begun_in_none():
    engine = AwaitedEngine(set(), set())
    engine.epochs = [2, 6]
    with pytest.raises(EpochError, match="`epoch` is 4, below the present epoch 6\n\nhint: name 6 or a later epoch"):
        asyncio.run(vllm_specrollout.abegin_epoch(engine, 4))
    assert engine.epochs == [2, 6]


@pytest.mark.parametrize("epoch", [-1, 2**31, 1.0, "1", True])
def test_an_epoch_is_a_whole_number_that_fits(epoch):
    with pytest.raises(ConfigError, match="`epoch` is"):
        vllm_specrollout.begin_epoch(CalledEngine(), epoch)


def test_the_history_of_several_engines_is_listed_and_summed():
    engine = AwaitedEngine(set(), set(), set())
    engine.epochs = [1, 3, 2]
    library = {"build_seconds": 0.5, "dir": "somewhere", "rewards": {"late": 1}}
    for i, own in enumerate(engine.engines):
        own.history = {"library": library, "hits": 3 * i, "lookups": 4 * i, "hit_rate": 0.75}
    found = asyncio.run(vllm_specrollout.aread_history(engine))
    assert [kept["store"]["epoch"] for kept in found["engines"]] == [1, 3, 2]
    store, library = {"epoch": 3, "lowest": 3, "answers": 0, "memory_bytes": 3072}, found["total"].pop("library")
    assert library == {"build_seconds": 1.5, "rewards": {"late": 3}}
    assert found["total"] == {"store": store, "hits": 9, "lookups": 12, "hit_rate": 0.75}


def test_a_history_that_was_never_asked_has_hit_nothing():
    llm = CalledEngine()
    llm.engines[0].history = {"hits": 0, "lookups": 0}
    assert vllm_specrollout.read_history(llm)["total"]["hit_rate"] == 0.0


@pytest.mark.parametrize(
    "settings, cause",
    [(None, "spec rollout is off"), ({"drafters": ["ngram"]}, 'keeps no history; its drafters are \\["ngram"\\]')],
)
def test_an_engine_without_history_says_how_to_start_one(settings, cause):
    llm = CalledEngine(settings=settings)
    wrapped = SimpleNamespace(llm_engine=llm, collective_rpc=llm.collective_rpc)
    for engine in (llm, wrapped):
        with pytest.raises(UnsupportedError, match=f'(?s){cause}.*hint: .*"history", "ngram"'):
            vllm_specrollout.report_rewards(engine, {"7": 1.0})


def test_calling_what_is_to_be_awaited_names_the_other_function():
    with pytest.raises(ConfigError, match="is awaited, not called\n\nhint: await `areport_rewards`"):
        vllm_specrollout.report_rewards(AwaitedEngine(), {})
    with pytest.raises(ConfigError, match="is called, not awaited\n\nhint: use `report_rewards`"):
        asyncio.run(vllm_specrollout.areport_rewards(CalledEngine(), {}))
    with pytest.raises(ConfigError, match="is a str, which has no `collective_rpc`"):
        vllm_specrollout.begin_epoch("engine")


# --- names -----------------------------------------------------------------------------------------------------------


def names_in_vllm(request_id, num_prompts, n, endpoint):
    """The names of all answers to one HTTP request, by the index of the choice, as vLLM 0.32.0 makes them."""
    prompts = [request_id]
    if endpoint != "chat":
        prompts = [request_id + {"completions": "-", "batch": "_"}[endpoint] + str(i) for i in range(num_prompts)]
    return [name if n == 1 else f"{sample}_{name}" for name in prompts for sample in range(n)]


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["completions", "chat", "batch"]))
def test_every_choice_of_one_prompt_or_one_sample_is_found_by_its_index_and_never_another(prompts, n, endpoint):
    if endpoint == "batch" or prompts < n:
        n = 1
    else:
        prompts = 1
    names = names_in_vllm("cmpl-x", prompts, n, endpoint)
    for index, name in enumerate(names):
        found = next((c for c in candidates("cmpl-x", index) if c in names), None)
        assert found == name
    if len(names) == 1:
        assert next(c for c in candidates("cmpl-x", None) if c in names) == names[0]


@given(st.integers(2, 6), st.integers(2, 6))
def test_several_samples_of_several_prompts_are_found_by_the_prompts_own_name_and_never_another(prompts, n):
    names = names_in_vllm("cmpl-x", prompts, n, "completions")
    for index, name in enumerate(names):
        assert next((c for c in candidates("cmpl-x", index) if c in names), name) == name
    for prompt in range(prompts):
        for sample in range(n):
            found = next(c for c in candidates(f"cmpl-x-{prompt}", sample) if c in names)
            assert found == names[prompt * n + sample]


@pytest.mark.parametrize(
    "tell",
    [
        lambda llm: vllm_specrollout.report_rewards(llm, {"a": 1}),
        vllm_specrollout.begin_epoch,
        lambda llm: vllm_specrollout.begin_epoch(llm, 7),
        vllm_specrollout.read_history,
    ],
    ids=["rewards", "next epoch", "an epoch", "history"],
)
def test_a_history_that_is_given_up_is_an_error_and_no_empty_answer(tell):
    llm = CalledEngine({"a"})
    llm.engines[0].given_up = "the history drafter failed 5 times and is given up"
    with pytest.raises(UnsupportedError, match="failed 5 times"):
        tell(llm)


def test_of_several_engines_those_that_keep_a_history_go_on():
    engine = AwaitedEngine({"a"}, {"b"})
    engine.engines[0].given_up = "it failed 5 times"
    assert asyncio.run(vllm_specrollout.areport_rewards(engine, {"a": 1, "b": 1}))["matched"] == 1
    assert asyncio.run(vllm_specrollout.abegin_epoch(engine, 3)) == 3
    assert len(asyncio.run(vllm_specrollout.aread_history(engine))["engines"]) == 1


def test_both_functions_of_a_conversation_show_what_they_take_and_mean() -> None:
    for name in ("report_rewards", "begin_epoch", "read_history", "read_drafters", "load_drafter"):
        called, awaited = (getattr(vllm_specrollout, own) for own in (name, f"a{name}"))
        assert (called.__name__, awaited.__name__) == (name, f"a{name}")
        assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(called)
        assert called.__doc__ == awaited.__doc__ and "Raises:" in called.__doc__
        assert inspect.signature(called) == inspect.signature(awaited)
    assert list(inspect.signature(vllm_specrollout.begin_epoch).parameters) == ["llm", "epoch"]
