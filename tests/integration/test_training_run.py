"""The run around the head: what it resumes, refuses and reports. Needs the `speculators` library."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.training.buffer import Buffer, BufferWriter, Example, Source, paths_in
from vllm_specrollout.training.command import _tell
from vllm_specrollout.training.run import METRICS, STATE, Measured, TrainConfig, TrainingRun

VOCAB, HIDDEN, LAYERS = 24, 16, (1, 2)
CONFIG = TrainConfig(epochs=2, batch_tokens=128, num_levels=2, dtype="float32", save_every=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=64, head_dim=8, **shape)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(target, tmp_path_factory) -> Path:
    """Answers that count upwards, with the target's own hidden states."""
    model = LlamaForCausalLM.from_pretrained(target).eval()
    folder = tmp_path_factory.mktemp("data")
    writer = BufferWriter(folder, Source(str(target), LAYERS, HIDDEN), 1 << 20)
    for first in range(40):
        token_ids = (torch.arange(20) + first) % VOCAB
        with torch.no_grad():
            out = model.model(token_ids[None], output_hidden_states=True)
        hidden = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        writer.add(Example(token_ids, hidden, out.last_hidden_state[0], 3, 0))
    writer.close()
    return folder


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_head_learns_what_the_target_answers(target, data, tmp_path, method):
    training = TrainingRun(
        target,
        data,
        tmp_path / "head",
        TrainConfig(method=method, epochs=12, batch_tokens=128, learning_rate=5e-3, num_levels=2),
    )
    before = training.measure()
    after = training.train()
    assert after.loss < 0.5 * before.loss and after.tokens_per_step > before.tokens_per_step
    assert after.tokens_per_step == pytest.approx(1.0 + sum(after.agreement))


def test_a_run_that_was_stopped_ends_as_one_that_was_not(target, data, tmp_path):
    whole = TrainingRun(target, data, tmp_path / "whole", CONFIG)
    expected = whole.train()

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise Stopped

    with pytest.raises(Stopped):
        TrainingRun(target, data, tmp_path / "stopped", CONFIG).train(stop)
    again = TrainingRun(target, data, tmp_path / "stopped", CONFIG)
    assert again.step == 3, "the last saved state"
    found = again.train()
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "whole" / METRICS).read_text().splitlines()]
    assert lines[-1]["step"] == whole.num_steps


class Stopped(Exception):
    pass


def test_answers_that_a_rollout_evicts_are_passed_over_and_a_stopped_run_goes_on_with_those_it_began_with(
    target, data, tmp_path, monkeypatch
):
    monkeypatch.setattr("vllm_specrollout.training.buffer.FILE_TOKENS", 200)
    answers = list(Buffer(data))

    def roll_out(kept: list[Example]) -> None:
        rollout = BufferWriter(tmp_path / "data", Source(str(target), LAYERS, HIDDEN), 800)
        for one in kept:
            rollout.add(one)
        rollout.close()

    roll_out(answers)

    def meanwhile(step: int, loss: float) -> None:
        if step == 2:
            roll_out(answers[:10])
        if step == 5:
            raise Stopped

    with pytest.raises(Stopped):
        TrainingRun(target, tmp_path / "data", tmp_path / "head", CONFIG).train(meanwhile)
    again = TrainingRun(target, tmp_path / "data", tmp_path / "head", CONFIG)
    assert again.step == 3 and len(again.buffer) == len(answers)
    found = again.train()
    assert len(again.buffer.evicted) == 10 and found.loss > 0
    for path in paths_in(tmp_path / "data"):
        path.unlink()
    with pytest.raises(UnsupportedError, match="all 2 answers held out of the run were evicted"):
        again.measure()


def test_a_head_that_is_of_no_use_is_said_to_be_none(tmp_path, capsys):
    for agreement, is_useful in (((0.37, 0.06, 0.005, 0.001), False), ((0.74, 0.58, 0.42, 0.29), True)):
        _tell(tmp_path, 23, Measured(1.0, agreement), is_json=False)
        assert ("this head is of no use: 0.44 of its 4 drafts" in capsys.readouterr().out) is not is_useful
        _tell(tmp_path, 23, Measured(1.0, agreement), is_json=True)
        assert json.loads(capsys.readouterr().out)["is_useful"] is is_useful


def test_a_finished_head_can_be_trained_further_and_has_the_targets_dtype(target, data, tmp_path):
    TrainingRun(target, data, tmp_path / "first", CONFIG).train()
    further = TrainingRun(target, data, tmp_path / "second", CONFIG, start=tmp_path / "first")
    fresh = TrainingRun(target, data, tmp_path / "third", CONFIG)
    assert further.measure().loss < fresh.measure().loss
    about = json.loads((tmp_path / "first" / "config.json").read_text())
    assert about["speculators_model_type"] == "eagle3" and about["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)


def test_an_eagle_head_can_be_trained_further_and_vllm_finds_it_in_its_own_form(target, data, tmp_path):
    config = TrainConfig(**{**CONFIG_VALUES, "method": "eagle"})
    trained = TrainingRun(target, data, tmp_path / "first", config)
    found = trained.train()
    further = TrainingRun(target, data, tmp_path / "second", config, start=tmp_path / "first")
    assert further.measure().loss == pytest.approx(found.loss, rel=1e-4)
    about = json.loads((tmp_path / "first" / "config.json").read_text())
    assert about["num_hidden_layers"] == 1 and about["architectures"] == ["LlamaForCausalLM"]
    names = set(load_file(tmp_path / "first" / "model.safetensors"))
    assert "fc.weight" in names and not any(
        part in name for name in names for part in ("embed", "lm_head", "input_layernorm")
    )
    with pytest.raises(ConfigError, match="is no EAGLE head for"):
        TrainingRun(target, data, tmp_path / "third", config, start=tmp_path / "nothing")


def test_a_head_may_draft_the_most_frequent_tokens_alone(target, data, tmp_path):
    config = TrainConfig(batch_tokens=128, num_levels=2, draft_vocab=10)
    training = TrainingRun(target, data, tmp_path / "head", config)
    training.train()
    assert training.head.lm_head.weight.shape == (10, HIDDEN) and int(training.head.t2d.sum()) == 10


def test_what_cannot_go_on_is_refused_with_the_way_out(target, data, tmp_path):
    TrainingRun(target, data, tmp_path / "head", CONFIG).train()
    with pytest.raises(ConfigError, match=rf"{STATE}` is of another run: seed differ\n\nhint: choose another --out"):
        TrainingRun(target, data, tmp_path / "head", TrainConfig(**{**CONFIG_VALUES, "seed": 1}))
    few = BufferWriter(tmp_path / "few", Source(str(target), LAYERS, HIDDEN), 1 << 20)
    few.add(Example(torch.arange(5), torch.zeros(5, 2 * HIDDEN), torch.zeros(5, HIDDEN), 1, 0))
    few.close()
    with pytest.raises(UnsupportedError, match="holds 1 answers, at least 20 are needed"):
        TrainingRun(target, tmp_path / "few", tmp_path / "other", CONFIG)
    wrong = BufferWriter(tmp_path / "wrong", Source("big", LAYERS, 2 * HIDDEN), 1 << 20)
    wrong.add(Example(torch.arange(5), torch.zeros(5, 4 * HIDDEN), torch.zeros(5, 2 * HIDDEN), 1, 0))
    wrong.close()
    with pytest.raises(ConfigError, match=r"hidden states have 32 values per token, .* has 16\n\nhint: .*: big"):
        TrainingRun(target, tmp_path / "wrong", tmp_path / "other", CONFIG)
    with pytest.raises(ConfigError, match="is no EAGLE-3 head"):
        TrainingRun(target, data, tmp_path / "other", CONFIG, start=tmp_path / "nothing")


CONFIG_VALUES = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
