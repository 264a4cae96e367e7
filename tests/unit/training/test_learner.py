"""The learner: what a head learns, how it is judged, and that it goes on as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

import torch

from tests.unit.training.targets import HIDDEN, LAYERS, SOURCE, VOCAB, Prefilled, counting, make_target
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.training.heads import logits_of, new_eagle, new_head, target_ends, unrolled
from vllm_specrollout.training.learner import HeadJudgement, Learner, LearnerConfig
from vllm_specrollout.training.rows import Rows
from vllm_specrollout.training.windows import batch_of, whole

METHODS = ("eagle3", "eagle")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target: Path) -> list[Rows]:
    return list(Prefilled()(target, LAYERS, counting(40)))


def learner_of(target: Path, method: str = "eagle3", seed: int = 0, vocab: list[int] | None = None, **given: Any):
    torch.manual_seed(seed)
    head = new_eagle(target, SOURCE) if method == "eagle" else new_head(target, SOURCE, 3, vocab)
    usual = {"rate": 5e-3, "num_levels": 3, "batch_rows": 128, "dtype": "float32", "seed": seed}
    return Learner(head, target_ends(target)[1], LearnerConfig(**{**usual, **given}))


def fed(learner: Learner, answers: list[Rows]) -> Learner:
    for one in answers:
        learner.add(one)
    return learner


def run(learner: Learner) -> list[float]:
    return list(iter(learner.step, None))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", ["kl_div", "rkl"])
def test_a_head_learns_what_the_target_answers(target, answers, method, loss):
    learner = fed(learner_of(target, method, loss=loss), answers)
    before = learner.judge()
    losses = run(learner)
    after = learner.judge()
    assert losses[-1] < losses[0] and after.accepted > before.accepted
    assert after.accepted == pytest.approx(sum(after.met)) and list(after.met) == sorted(after.met, reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_makes_the_same_head_bit_for_bit_and_another_one_does_not(target, answers, method):
    first, again, other = (fed(learner_of(target, method, seed), answers) for seed in (1, 1, 2))
    losses = [run(one) for one in (first, again, other)]
    assert losses[0] == losses[1] != losses[2]
    for name, one in first.head.state_dict().items():
        assert torch.equal(one, again.head.state_dict()[name]), name


def test_a_learner_that_is_stopped_goes_on_as_one_that_was_not(target, answers, tmp_path):
    expected = run(whole_run := fed(learner_of(target), answers))
    stopped = fed(learner_of(target), answers)
    losses = [stopped.step() for _ in range(4)]
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    again = learner_of(target, seed=9)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    fed(again, answers)
    assert losses + run(again) == expected
    assert (again.steps, again.rows) == (whole_run.steps, whole_run.rows)


def test_adams_state_is_kept_when_other_answers_come(target, answers):
    """Begun anew, the rate would rise from nothing again, and a trained head would get worse at first."""
    learner = fed(learner_of(target), answers[:20])
    run(learner)
    steps = learner.steps
    assert fed(learner, answers[20:]).step() is not None
    state = learner.state_dict()["optimizer"]["state"]
    assert {int(one["step"]) for one in state.values()} == {steps + 1}


def test_each_answer_is_gone_over_three_times_and_no_more(target, answers):
    learner = fed(learner_of(target), answers)
    run(learner)
    seen = learner.rows
    assert learner.step() is None
    fed(learner, answers)
    assert learner.step() is None and learner.rows == seen


@pytest.mark.parametrize("method", METHODS)
def test_levels_are_what_the_head_makes_of_one_answer_token_by_token(target, answers, method):
    """As an engine drafts: a row attends to the rows before it by their first level, and to its own earlier ones."""
    head = learner_of(target, method).head.eval()
    batch = batch_of(whole(answers[:3]), 3)
    with torch.no_grad():
        together = [logits_of(head, one) for one in unrolled(head, batch.tokens, batch.before, batch.positions, 3)]
        for place in (0, 7, 20):
            # what lies behind the row is cut off, so nothing of it can have been looked at
            cut = (batch.tokens[:, : place + 3], batch.before[:, : place + 1], batch.positions[:, : place + 1])
            alone = [logits_of(head, one) for one in unrolled(head, *cut, 3)]
            for level in range(3):
                torch.testing.assert_close(together[level][:, place], alone[level][:, place], atol=1e-5, rtol=1e-4)


def test_the_judgement_is_how_many_drafts_drawn_noise_would_have_accepted(target, answers):
    """The answers are the target's own here, drawn with noise; drafts are drawn with the same."""
    from transformers import LlamaForCausalLM

    model, generator = LlamaForCausalLM.from_pretrained(target).eval(), torch.Generator().manual_seed(0)
    learner = learner_of(target, num_levels=2)
    accepted, length = 0, 60
    tokens = torch.randint(VOCAB, (200, 3), generator=generator)
    noise = -torch.log(-torch.log(torch.rand(200, length, VOCAB, generator=generator).clamp(1e-9, 1 - 1e-7)))
    with torch.no_grad():
        for place in range(3, length):
            logits = model(tokens).logits[:, -1].log_softmax(dim=-1)
            tokens = torch.cat([tokens, (logits + noise[:, place]).argmax(dim=-1)[:, None]], dim=1)
        out = model.model(tokens, output_hidden_states=True)
        hidden = torch.stack([*(out.hidden_states[layer] for layer in LAYERS), out.last_hidden_state], dim=2)
        drawn = [Rows(tokens[i].int(), 3, 0, hidden[i]) for i in range(200)]
        judged = learner.judge(drawn)
        batch = batch_of(whole(drawn), 2)
        alive = batch.counts.clone()
        for level, one in enumerate(unrolled(learner.head.eval(), batch.tokens, batch.before, batch.positions, 2)):
            log_q = (judged.sharpness * logits_of(learner.head, one)).log_softmax(dim=-1)
            for place in range(batch.positions.shape[1]):
                at = place + 2 + level  # of the token that is drafted; the first row is of the second token
                alive[:, place] &= at < length and (log_q[:, place] + noise[:, at]).argmax(dim=-1) == tokens[:, at]
            accepted += int(alive.sum())
    rows = int(batch.counts.sum())
    assert judged.rows == rows and judged.accepted == pytest.approx(accepted / rows, abs=0.03)


def test_a_head_that_says_what_the_target_says_is_met_always(target, answers):
    learner = learner_of(target, "eagle", num_levels=2)

    def knows(batch, num_levels):
        width = batch.positions.shape[1]
        return (batch.last[:, level : level + width] for level in range(num_levels))

    learner._unrolled = knows  # type: ignore[method-assign]
    judged = learner.judge(answers)
    inside = sum(len(one.token_ids) - 1 - one.prompt_tokens - 1 for one in answers)
    assert judged.sharpness == 1.0 and judged.met[0] == pytest.approx(1.0, abs=1e-4)
    assert judged.met[1] == pytest.approx(inside / judged.rows, abs=1e-4), "an answer's end is no draft's"


def test_tokens_that_a_head_cannot_draft_are_never_met(target, answers):
    learner, whole_vocabulary = (fed(learner_of(target, vocab=own), answers) for own in (list(range(12)), None))
    for one in (learner, whole_vocabulary):
        run(one)
    judged = learner.judge()
    assert learner.head.lm_head.weight.shape == (12, HIDDEN)
    assert 0.0 < judged.met[0] < 0.75 and judged.accepted < whole_vocabulary.judge().accepted


def test_the_output_head_that_labels_follow_can_be_replaced(target, answers):
    learner = fed(learner_of(target, "eagle"), answers)
    before = learner.judge()
    learner.retarget(-learner.head.output_head)
    assert learner.judge() != before and torch.equal(learner.head.output_head, learner._output_head)


def test_one_level_is_refused_and_nothing_to_judge_by_is_no_error(target):
    with pytest.raises(ConfigError, match="`num_levels` is 1"):
        LearnerConfig(rate=1e-3, num_levels=1)
    assert learner_of(target).judge() == HeadJudgement((0.0, 0.0, 0.0), 1.0, 0)
