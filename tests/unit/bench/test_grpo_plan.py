"""The RL loop's plan, rows and trace: what is asked of every engine, how figures are summed up, what is written."""

import dataclasses

import pytest

from bench.grpo.loop import reward_notes
from bench.grpo.plan import ABLATIONS, Plan, make_arms, overlaid, problem_set, problems_of_step, requests_of_step
from bench.grpo.rows import EngineRun, StepRow, epoch_rows
from bench.grpo.trace import read_rollouts, write_rollout
from vllm_specrollout.config import DRAFTERS
from vllm_specrollout.errors import ConfigError

PLAN = Plan(problems=6, problems_per_step=2, samples=3, epochs=3)
SPECULATIVE = {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}


def requests(step, plan=PLAN):
    chosen = problem_set(plan)
    return requests_of_step(plan, chosen, {problem.problem_id: [3, i, 4] for i, problem in enumerate(chosen)}, step)


def run(engine, wall_s, num_tokens, **changes):
    values = {"steps": 10, "reward": 0.5, "num_differing": 0, "identical": None, "difference": None, "idle_cores": 0.0}
    values |= {"drafted": None, "accepted": None}
    return EngineRun(engine=engine, wall_s=wall_s, num_tokens=num_tokens, **(values | changes))


def row(step, epoch, runs, reward=0.5):
    return StepRow(
        step=step,
        epoch=epoch,
        weights_version=step,
        reward=reward,
        solved=1.0,
        mean_tokens=10.0,
        cut_share=0.0,
        runs=tuple(runs),
        update={},
        train_s=1.0,
        push_s=1.0,
        inflation_error=None,
    )


def test_every_epoch_asks_every_problem_once_and_in_another_order():
    chosen = problem_set(PLAN)
    epochs = []
    for epoch in range(PLAN.epochs):
        steps = range(epoch * PLAN.steps_per_epoch, (epoch + 1) * PLAN.steps_per_epoch)
        epochs.append([problem.problem_id for step in steps for problem in problems_of_step(PLAN, chosen, step)])
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
    stock, ours = request.params(PLAN, is_ours=False), request.params(PLAN, is_ours=True)
    assert ours.pop("extra_args") == {"spec_rollout": {"problem_id": request.problem.problem_id}}
    assert stock == ours


def test_the_samples_of_a_problem_stand_together():
    owners = [request.problem.problem_id for request in requests(4)]
    assert owners == [owner for owner in dict.fromkeys(owners) for _ in range(PLAN.samples)]


def test_every_engine_but_for_its_drafts_is_the_same_engine(tmp_path):
    arms = make_arms(("ours", "stock", "ngram", "suffix"), {"drafters": ["ngram"]}, SPECULATIVE, "x", is_ablation=False)
    assert [arm.name for arm in arms] == ["stock", "ngram", "suffix", "ours"]
    arguments = PLAN.engine_arguments(tmp_path)
    specs = [arm.engine_spec(arguments, kv_gib=1, is_verbose=False) for arm in arms]
    for spec in specs:
        assert {key: value for key, value in spec.arguments.items() if key != "speculative_config"} == arguments
    assert [spec.has_plugin for spec in specs] == [False, False, False, True]
    assert [dict(spec.environment) for spec in specs] == [{}, {}, {"PYTHONPATH": "x"}, {}]


@pytest.mark.skipif("history" not in DRAFTERS, reason="needs the history drafter")
def test_an_ablation_adds_one_variant_of_ours_per_part_of_the_history():
    base = {"drafters": ["history"], "history": {"epochs": 3}}
    arms = make_arms(("stock",), base, SPECULATIVE, "", is_ablation=True)
    assert [arm.name for arm in arms] == ["stock", "ours", *ABLATIONS]
    assert arms[2].spec_rollout == {"drafters": ["history"], "history": {"epochs": 3, "reward_weight": 0.0}}
    assert base == {"drafters": ["history"], "history": {"epochs": 3}}


def test_an_overlay_changes_what_it_names_and_keeps_the_rest():
    assert overlaid({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: Plan(problems=6, problems_per_step=4), "`--problems` is 6, no multiple of `--problems-per-step`, 4"),
        (lambda: Plan(samples=1), "`--samples` is 1, outside 2 to 1000"),
        (lambda: Plan(family="algebra"), "`--family` is 'algebra', which does not exist"),
        (lambda: make_arms(("ours",), {}, SPECULATIVE, "", is_ablation=False), "`--engines` is ours, without stock"),
        (
            lambda: make_arms(("stock",), {"drafters": ["ngram"]}, SPECULATIVE, "", is_ablation=True),
            r"`--ablate` varies the history drafter, and `--spec-rollout` names \['ngram'\]",
        ),
        (
            lambda: make_arms(("stock", "ours"), {"drafter": ["ngram"]}, SPECULATIVE, "", is_ablation=False),
            "unknown key `drafter` in `--spec-rollout`",
        ),
    ],
)
def test_bad_settings_are_refused(make, cause):
    with pytest.raises(ConfigError, match=cause):
        make()


def test_ratios_are_per_generated_token_and_summed_before_they_are_divided():
    runs = [
        [run("stock", 10.0, 100), run("suffix", 8.0, 160), run("ours", 4.0, 100, identical=True)],
        [run("stock", 20.0, 100), run("suffix", 7.0, 40), run("ours", 5.0, 100, identical=True)],
    ]
    (only,) = epoch_rows([row(0, 0, runs[0], reward=0.2), row(1, 0, runs[1], reward=0.4)])
    stock, suffix, ours = only.engines
    assert only.reward == pytest.approx(0.3)
    assert (stock.speedup, stock.speedup_on_suffix) == (None, pytest.approx((15 / 200) / (30 / 200)))
    assert suffix.speedup == pytest.approx((30 / 200) / (15 / 200))
    assert ours.speedup == pytest.approx(30 / 9)
    assert ours.speedup_on_suffix == pytest.approx((15 / 200) / (9 / 200))
    assert (ours.identical, suffix.identical, ours.tokens_per_step) == (True, None, 10.0)


def test_answers_that_differ_cost_the_epoch_its_speed_and_no_other_epoch():
    good = [run("stock", 10.0, 100), run("ours", 5.0, 100, identical=True)]
    bad = [run("stock", 10.0, 100), run("ours", 5.0, 100, identical=False, num_differing=1, difference="request 0")]
    first, second, whole, later = (r.engines[1] for r in epoch_rows([row(0, 0, bad), row(1, 1, good)]))
    assert (first.identical, first.speedup) == (False, None)
    assert (second.identical, second.speedup) == (True, 2.0)
    assert (whole.identical, whole.speedup) == (False, None)
    assert later.speedup == 2.0


def test_a_trace_reads_back_as_it_was_written_in_the_order_of_steps(tmp_path):
    lines = [{"step": step, "token_ids": [1, 2, step]} for step in range(12)]
    for line in reversed(lines):
        write_rollout(tmp_path, line["step"], [line])
    assert list(read_rollouts(tmp_path)) == [{"schema": 1, **line} for line in lines]


def test_equal_rollouts_give_equal_files(tmp_path):
    one, other = (write_rollout(tmp_path / name, 0, [{"step": 0}]) for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_the_reader_learns_what_became_of_the_rewards():
    assert reward_notes([]) == ()
    assert reward_notes([{"matched": 3, "unknown": 1}, {"matched": 4, "unknown": 0}]) == (
        "rewards reported to ours: 7 met their answer, 1 met none",
    )
    assert "takes no rewards" in reward_notes([{"matched": 3}, None])[0]
