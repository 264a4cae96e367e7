"""One-pass heads: what their levels see, and what a draft is worth."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

import torch
from vllm_specrollout.bench.policy.onepass import Masked, Medusa, StudyLearner, per_step

from tests.unit.training.targets import SOURCE, VOCAB, Prefilled, counting, make_target
from vllm_specrollout.training.heads import logits_of, new_head, target_ends, unrolled
from vllm_specrollout.training.learner import LearnerConfig
from vllm_specrollout.training.windows import batch_of, whole

LEVELS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target: Path) -> list[Any]:
    return list(Prefilled()(target, SOURCE.layers, counting(40)))


def test_the_first_level_of_a_masked_head_is_its_layers_and_no_later_one_sees_a_later_token(target, answers) -> None:
    torch.manual_seed(0)
    head = new_head(target, SOURCE, LEVELS).eval()
    masked = Masked(head, VOCAB).eval()
    batch = batch_of(whole(answers[:1]), LEVELS)
    with torch.no_grad():
        found = list(masked.levels(batch, LEVELS))
        first = next(unrolled(head, batch.tokens, batch.before, batch.positions, 1))
        torch.testing.assert_close(found[0], logits_of(head, first))
        width = batch.positions.shape[1]
        other = batch.tokens.clone()
        other[:, width:] = (other[:, width:] + 1) % VOCAB
        changed = type(batch)(other, batch.before, batch.last, batch.positions, batch.counts, batch.rest)
        for one, same in zip(found, masked.levels(changed, LEVELS), strict=True):
            torch.testing.assert_close(one, same)
    assert not torch.equal(found[1], found[2])


def test_medusa_begins_as_the_output_head_over_the_state_before_and_all_kinds_learn(target, answers) -> None:
    _, output_head = target_ends(target)
    medusa = Medusa(output_head)
    batch = batch_of(whole(answers[:1]), LEVELS)
    for level in medusa.levels(batch, LEVELS):
        torch.testing.assert_close(level, batch.before[:, :, -1] @ output_head.T)
    for head in (medusa, Masked(new_head(target, SOURCE, LEVELS), VOCAB)):
        config = LearnerConfig(rate=1e-2, num_levels=LEVELS, dtype="float32", width=64, batch_rows=128)
        learner = StudyLearner(head, output_head, config)
        for one in answers:
            learner.add(one)
        before = learner.judge(answers)
        list(iter(learner.step, None))
        after = learner.judge(answers)
        assert before is not None and after is not None and after.accepted > before.accepted


def test_a_draft_is_as_deep_as_pays() -> None:
    assert per_step((0.9, 0.0, 0.0), "eagle3")[1] == 1
    assert per_step((0.9, 0.8, 0.7), "eagle3")[1] == 3
    assert per_step((0.5, 0.4, 0.3), "masked")[0] > per_step((0.5, 0.4, 0.3), "eagle3")[0]
