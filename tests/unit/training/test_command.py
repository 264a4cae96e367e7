"""What `specrollout train-head` refuses before it trains, and that its help says how a head is made."""

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError, UnsupportedError

pytest.importorskip("torch")

from vllm_specrollout.training.command import train_head
from vllm_specrollout.training.run import TrainConfig


def test_the_help_leads_a_newcomer_through_all_three_commands():
    text = CliRunner().invoke(app, ["train-head", "--help"], terminal_width=200).output
    for part in (
        '{"collect": {"dir": "DATA"}}',
        "train-head --target TARGET --data DATA --out HEAD",
        '"method": "eagle3"',
    ):
        assert part in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "eagle2"}, "`method` names 'eagle2', which does not exist\n\nhint: did you mean `eagle`?"),
        ({"method": "eagle", "draft_vocab": 9}, "an `eagle` head has its target's output head"),
        ({"epochs": 0}, "`epochs` is 0, outside 1 to 1000"),
        ({"num_levels": 17}, "`num_levels` is 17, outside 1 to 16"),
        ({"learning_rate": 0.0}, "`learning_rate` is 0.0, outside 1e-09 to 1"),
        ({"loss": "kl"}, "`loss` names 'kl', which does not exist\n\nhint: choose from: "),
        ({"dtype": "float16"}, "`dtype` names 'float16', which does not exist"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, told):
    with pytest.raises(ConfigError) as error:
        TrainConfig(**given)
    assert told in str(error.value)


def test_a_folder_without_hidden_states_is_refused_before_any_library_is_needed(tmp_path):
    with pytest.raises(UnsupportedError, match="holds no hidden states"):
        train_head(target=tmp_path, data=tmp_path, out=tmp_path / "out")


def test_the_learning_rate_rises_and_falls():
    rates = [TrainConfig(learning_rate=1.0).rate_at(step, 200) for step in range(200)]
    assert rates[0] == 1 / 20 and max(rates) == rates[20] == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
