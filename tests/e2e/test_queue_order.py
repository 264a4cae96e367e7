"""Waiting requests get their places longest first, in a real scheduler, and yield the tokens they always did; how long
answers were is learned of all that ended, at a stop string too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model
from vllm_specrollout.types import Answer, FinishReason

# problem -> tokens of its answers
_LENGTHS = {"short": 4, "middle": 12, "long": 40}
_ASKED = ("short", "short", "middle", "middle", "long", "short")


_ONE_PLACE = {"max_num_seqs": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.mktemp("model"), "qwen3", "float32")


@pytest.fixture(scope="module")
def wanted(path: str) -> list[list[list[int]]]:
    """Stock's answers."""
    with engine(path, "float32", is_ours=False, **_ONE_PLACE) as stock:
        return [_ask(stock.llm, seed, is_ours=False) for seed in (0, 100)]


@pytest.fixture(scope="module")
def ours(path: str, wanted: object) -> Iterator[Engine]:
    """Made when stock is gone: one process has one engine."""
    with engine(path, "float32", is_ours=True, **_ONE_PLACE) as made:
        yield made


def _ask(llm: Any, seed: int, is_ours: bool) -> list[list[int]]:
    """One answer at a time has a place."""
    params = []
    for i, problem in enumerate(_ASKED):
        own = {"extra_args": {"spec_rollout": {"problem_id": problem}}} if is_ours else {}
        params.append(SamplingParams(seed=seed + i, max_tokens=_LENGTHS[problem], ignore_eos=True, **own))
    prompts = [{"prompt_token_ids": [10 + i, 20, 30, 40 + seed]} for i in range(len(_ASKED))]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def _admissions(ours: Engine) -> Callable[[], list[str]]:
    """What was given places since the last call: problems, in order."""
    scheduler: Any = ours.llm.llm_engine.engine_core.engine_core.scheduler
    order: list[str] = []
    scheduled = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = scheduled(*args, **kwargs)
        order.extend(scheduler._known[new.req_id].problem_id for new in output.scheduled_new_reqs)
        return output

    def take() -> list[str]:
        taken = list(order)
        order.clear()
        return taken

    scheduler.schedule = schedule
    return take


def test_longest_first_by_the_lengths_of_the_pass_before_with_the_same_tokens(
    ours: Engine, wanted: list[list[list[int]]]
) -> None:
    admissions = _admissions(ours)
    got = [_ask(ours.llm, 0, is_ours=True)]
    first = admissions()
    got.append(_ask(ours.llm, 100, is_ours=True))
    second = admissions()
    scheduler: Any = ours.llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.is_reordering = False
    _ask(ours.llm, 0, is_ours=True)
    third = admissions()
    scheduler.is_reordering = True
    assert not scheduler._known and not scheduler.waiting
    assert got == wanted
    assert sorted(first) == sorted(_ASKED) and first[0] == "short"
    assert second == ["long", "middle", "middle", "short", "short", "short"]
    assert third == list(_ASKED)


_STATUS = {"stop": FinishReason.FINISHED, "length": FinishReason.TRUNCATED}


def test_an_answer_that_ends_at_a_stop_string_is_one_and_a_request_taken_back_is_none(
    ours: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Answer] = {}
    monkeypatch.setattr(ours.runner.spec_rollout, "finish", lambda one: told.update({one.problem_id: one}))
    scheduler: Any = ours.llm.llm_engine.engine_core.engine_core.scheduler
    known, drafted = scheduler._queue._lengths.num_known, ours.runner.stats.drafted

    def params(problem: str, **own: Any) -> SamplingParams:
        return SamplingParams(ignore_eos=True, extra_args={"spec_rollout": {"problem_id": problem}}, **own)

    prompts = [{"prompt_token_ids": [10 + i, 20, 30, 20, 30]} for i in range(8)]
    asked = [params(f"p{i}", seed=i, max_tokens=60, stop=["12", "= ", "7"], temperature=1.2) for i in range(7)]
    outputs = [
        one.outputs[0] for one in ours.llm.generate(prompts, [*asked, params("p7", max_tokens=5)], use_tqdm=False)
    ]
    front_end = ours.llm.llm_engine
    front_end.add_request("gone", prompts[0], params("gone", max_tokens=60, stop=["no such"]))
    front_end.step()
    front_end.abort_request(["gone"])
    ours.llm.generate(prompts[:1], params("last", max_tokens=1), use_tqdm=False)
    assert told.pop("gone").status is FinishReason.ABORTED
    assert {one.stop_reason for one in outputs} >= {"7", None} and ours.runner.stats.drafted > drafted
    for i, output in enumerate(outputs):
        assert told[f"p{i}"].status is _STATUS[str(output.finish_reason)]
        assert told[f"p{i}"].token_ids.tolist() == list(output.token_ids)
    assert scheduler._queue._lengths.num_known == known + 9


@pytest.mark.nightly
def test_an_engine_set_to_arrival_order_keeps_it(path: str) -> None:
    with engine(path, "float32", is_ours=True, spec_rollout={"queue_order": "arrival"}, **_ONE_PLACE) as arrival:
        for seed in (0, 100):
            _ask(arrival.llm, seed, is_ours=True)
        scheduler: Any = arrival.llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler._queue is None and not scheduler._known
