"""Waiting requests get their places longest first, in a real scheduler, and yield the tokens they always did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model

# problem -> tokens of its answers
_LENGTHS = {"short": 4, "middle": 12, "long": 40}
_ASKED = ("short", "short", "middle", "middle", "long", "short")


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


def test_longest_first_by_the_lengths_of_the_pass_before_with_the_same_tokens(tmp_path: Path) -> None:
    path = model(tmp_path, "qwen3", "float32")
    limits = {"max_num_seqs": 1}
    with engine(path, "float32", is_ours=False, **limits) as stock:
        wanted = [_ask(stock.llm, seed, is_ours=False) for seed in (0, 100)]
    with engine(path, "float32", is_ours=True, **limits) as ours:
        admissions = _admissions(ours)
        got = [_ask(ours.llm, 0, is_ours=True)]
        first = admissions()
        got.append(_ask(ours.llm, 100, is_ours=True))
        second = admissions()
        scheduler: Any = ours.llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.is_reordering = False
        _ask(ours.llm, 0, is_ours=True)
        third = admissions()
        assert not scheduler._known and not scheduler.waiting
    assert got == wanted
    assert sorted(first) == sorted(_ASKED) and first[0] == "short"
    assert second == ["long", "middle", "middle", "short", "short", "short"]
    assert third == list(_ASKED)


@pytest.mark.nightly
def test_an_engine_set_to_arrival_order_keeps_it(tmp_path: Path) -> None:
    path = model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout={"queue_order": "arrival"}, max_num_seqs=1) as ours:
        for seed in (0, 100):
            _ask(ours.llm, seed, is_ours=True)
        scheduler: Any = ours.llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler._queue is None and not scheduler._known
