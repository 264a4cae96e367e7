"""GRPO as a scenario: what is asked of every engine, which engines there are, and what is refused."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from bench.scenarios.grpo import Grpo
from vllm_specrollout.errors import ConfigError

PLAN = Grpo(problems=6, problems_per_step=2, samples=3, epochs=3)


def requests(step, plan=PLAN):
    chosen = plan.problem_set()
    return plan.requests_of_step(chosen, {problem.problem_id: [3, i, 4] for i, problem in enumerate(chosen)}, step)


def test_every_epoch_asks_every_problem_once_and_in_another_order():
    chosen = PLAN.problem_set()
    epochs = []
    for epoch in range(PLAN.epochs):
        steps = range(epoch * PLAN.steps_per_epoch, (epoch + 1) * PLAN.steps_per_epoch)
        epochs.append([problem.problem_id for step in steps for problem in PLAN.problems_of_step(chosen, step)])
    assert all(sorted(epoch) == sorted(problem.problem_id for problem in chosen) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_no_two_requests_of_a_run_share_a_name_or_a_seed_and_equal_plans_give_equal_requests():
    everything = [request for step in range(PLAN.num_steps) for request in requests(step)]
    assert len(everything) == 6 * 3 * 3
    assert len({request.request_id for request in everything}) == len(everything)
    assert len({request.seed for request in everything}) == len(everything)
    assert everything == [request for step in range(PLAN.num_steps) for request in requests(step)]
    assert requests(0, dataclasses.replace(PLAN, seed=1))[0].seed not in {request.seed for request in everything}


def test_only_our_engine_is_told_the_problem():
    request = requests(0)[0]
    stock, ours = request.params(9, is_ours=False), request.params(9, is_ours=True)
    assert ours.pop("extra_args") == {"spec_rollout": {"problem_id": request.problem.problem_id}}
    assert stock == ours


def test_the_samples_of_a_problem_stand_together():
    owners = [request.problem.problem_id for request in requests(4)]
    assert owners == [owner for owner in dict.fromkeys(owners) for _ in range(PLAN.samples)]


def test_every_engine_but_for_its_drafts_is_the_same_engine():
    plan = Grpo(engines=("ours", "stock", "ngram"))
    started = []
    engines = SimpleNamespace(start=lambda name, spec_rollout, **more: started.append((name, spec_rollout, more)))
    for arm in plan.arms():
        arm.start(engines)
    assert started == [
        ("stock", None, {}),
        ("ngram", None, {"speculative_config": plan.ngram}),
        ("ours", {"drafters": ["history"]}, {}),
    ]


def test_a_quick_loop_has_few_short_answers_whatever_the_sizes_say():
    plan = Grpo(quick=True, problems=64).resolved()
    assert (plan.problems, plan.num_steps, plan.max_tokens) == (2, 2, 24)


def test_settings_tell_the_engines_and_the_update_and_no_place_of_a_file(tmp_path):
    settings = json.loads(json.dumps(Grpo(clip=0.3, trace=tmp_path).settings()))
    assert [engine["name"] for engine in settings["engines"]] == ["stock", "ours"]
    assert (settings["grpo"]["clip_low"], settings["grpo"]["clip_high"]) == (0.3, 0.3)
    assert str(tmp_path) not in json.dumps(settings)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"problems": 6, "problems_per_step": 4}, "`--problems` is 6, no multiple of `--problems-per-step`, 4"),
        ({"engines": ("ours",)}, "`--engines` is ours, without stock"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0, outside 0 to inf"),
        ({"spec_rollout": {"drafter": ["ngram"]}}, "unknown key `drafter` in `--spec-rollout`"),
    ],
)
def test_bad_settings_are_refused(settings, cause):
    with pytest.raises(ConfigError, match=cause):
        Grpo(**settings).check()


def test_a_folder_with_another_trace_is_refused(tmp_path):
    (tmp_path / "rollout-00000.jsonl.gz").touch()
    with pytest.raises(ConfigError, match="holds another trace"):
        Grpo(trace=tmp_path).check()
