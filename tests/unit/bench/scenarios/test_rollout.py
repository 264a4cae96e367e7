"""What a rollout asks, and how our engine is configured."""

from vllm_specrollout.bench.policy.reward import problems

from bench.scenarios.rollout import Rollout
from vllm_specrollout.config import parse


def test_samples_of_a_problem_share_its_id_and_no_seed():
    plan = Rollout(prompts=3, samples=2, seed=1)
    chosen = problems(3, 1)
    ours = plan.params(chosen, is_ours=True)
    ids = [values.pop("extra_args")["spec_rollout"]["problem_id"] for values in ours]
    assert ids == [problem.problem_id for problem in chosen for _ in range(2)]
    assert len({values["seed"] for values in ours}) == 6
    assert ours == plan.params(chosen, is_ours=False)


def test_the_settings_are_a_configuration_our_engine_takes():
    assert parse(Rollout(max_draft_tokens=5).spec_rollout()).max_draft_tokens == 5
