"""Forecasts: the product's drafters over answers that are known, and what that saves."""

import dataclasses

import numpy as np
import pytest

from tests.unit.replay.test_dump import GRPO, TRACE
from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.config import parse
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.replay.dump import DumpedAnswer, DumpedRollout, read_dump
from vllm_specrollout.replay.forecast import StepTimes, forecast, step_times

LINE = StepTimes(name="line", told="", cost=CostLine(fixed=10.0, request=1.0, node=0.1))
FIXED = {"budget": "fixed", "shape": "chain"}


def told(answer, problem="p", prompt=(1, 2, 3)):
    return DumpedAnswer(problem, np.asarray(prompt, np.int32), np.asarray(answer, np.int32))


def new_text(seed, length=40):
    """Tokens of which none comes twice: nothing in them drafts for the rest."""
    return np.random.default_rng(seed).permutation(np.arange(10, 10_000))[:length]


def test_an_answer_that_comes_again_is_drafted_from_the_epoch_before():
    answer = new_text(0)
    rollouts = [DumpedRollout(epoch, (told(answer),)) for epoch in (1, 2)]
    first, second = forecast(rollouts, parse(FIXED), LINE, 4)
    # nothing is known in the first: a step a token, each of 11 ms
    assert (first.plain_steps, first.ours_steps, first.accepted) == (40, 40, 0)
    assert first.plain_ms == pytest.approx(40 * 11.0) and first.speedup == pytest.approx(1.0)
    assert second.plain_steps == 40 and second.ours_steps < 8 and second.accepted > 30
    assert second.tokens_per_step > 5.0 and second.speedup > 3.0


def test_another_problems_answer_does_not_draft():
    answer = new_text(0)
    rollouts = [DumpedRollout(1, (told(answer, "p"),)), DumpedRollout(2, (told(answer, "q"),))]
    assert forecast(rollouts, parse(FIXED), LINE, 4)[1].accepted == 0


def test_a_sibling_that_is_ahead_drafts_in_the_first_epoch():
    answer = new_text(0, 60)
    # a sibling is admitted once the first one is over
    (epoch,) = forecast([DumpedRollout(1, (told(answer), told(answer)))], parse(FIXED), LINE, 1)
    assert epoch.plain_steps == 120 and epoch.ours_steps < 75


def test_epochs_are_summed_over_their_rollouts():
    rollouts = [DumpedRollout(1, (told(new_text(i), f"p{i}"),)) for i in range(3)]
    (epoch,) = forecast(rollouts, parse({}), LINE, 4)
    assert (epoch.num_answers, epoch.num_tokens, epoch.plain_steps) == (3, 120, 120)


def test_a_prompt_is_computed_once_for_all_its_samples():
    cost = StepTimes(name="prompts", told="", cost=CostLine(fixed=1.0, prompt_row=1.0))
    prompt = tuple(range(1, 101))
    rollout = DumpedRollout(1, tuple(told([5], prompt=prompt) for _ in range(3)))
    (epoch,) = forecast([rollout], parse({}), cost, 4)
    assert epoch.plain_ms == pytest.approx(1.0 + 100 + 2 * 16)


def test_long_answers_are_admitted_first_once_their_lengths_are_known():
    answers = [told(new_text(i, 10), f"s{i}") for i in range(8)] + [told(new_text(9, 80), "long")]
    rollouts = [DumpedRollout(epoch, tuple(answers)) for epoch in (1, 2)]
    plain_line = parse({"budget": "off"})
    first, second = forecast(rollouts, plain_line, LINE, 2)
    assert first.ours_steps == first.plain_steps == second.plain_steps
    # the long one beside all others, and not behind them
    assert second.ours_steps == 80 < second.plain_steps
    _, by_arrival = forecast(rollouts, parse({"budget": "off", "queue_order": "arrival"}), LINE, 2)
    assert by_arrival.ours_steps == second.plain_steps


@pytest.mark.parametrize("name", ["h200-7b", "h200-7b-first"])
def test_a_forecast_is_the_same_twice_and_later_epochs_gain_more(name):
    rollouts = [one for path in GRPO[:4] for one in read_dump(path)]
    times = step_times(name)
    found = forecast(rollouts, parse({}), times, 16)
    assert found == forecast(rollouts, parse({}), times, 16)
    assert [one.epoch for one in found] == [0, 1]
    assert 1.0 < found[0].speedup < found[1].speedup
    assert all(one.accepted > 0 and one.accepted < one.drafted for one in found)


def test_the_users_own_folder_is_left_alone(tmp_path):
    folder = tmp_path / "history"
    config = parse({"history": {"dir": str(folder)}})
    forecast([DumpedRollout(1, (told(new_text(0)),))], config, LINE, 4)
    assert not folder.exists()


def test_a_recorded_trace_gives_the_steps_of_its_engine():
    times = step_times(str(TRACE))
    assert times.name == TRACE.name and times.runner == "v1"
    assert times.cost.fixed > 0.0 and times.cost.prompt_share == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafters": ["history", "tests.drafters:Own"]}, "names `tests.drafters:Own`"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "`speculative_config`"),
    ],
)
def test_what_needs_an_engine_is_refused(given, words):
    config = dataclasses.replace(parse({}), **given)
    with pytest.raises(SpecRolloutError, match=words):
        forecast([DumpedRollout(1, (told([5]),))], config, LINE, 4)


def test_steps_of_no_name_are_refused_with_the_names_there_are():
    with pytest.raises(SpecRolloutError, match="neither an anchor nor a file") as error:
        step_times("h100")
    assert "h200-7b" in error.value.hint
