"""Help is whole: every command has `-h`, and no line of a list of commands is cut."""

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app

GROUPS = ["", "history", "dev", "dev bench"]
COMMANDS = [
    *GROUPS, "doctor", "try", "status", "report", "profile", "replay", "train-head", "drafter", "history inspect",
    "history serve", "plan", "dev schema", "dev bench engine",
]  # fmt: skip


def help_of(command: str, flag: str) -> str:
    done = CliRunner().invoke(app, [*command.split(), flag], catch_exceptions=False, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_flag_says_what_the_long_one_says(command):
    text = help_of(command, "-h")
    assert text == help_of(command, "--help") and "-h, --help" in text


@pytest.mark.parametrize("command", GROUPS)
def test_no_line_of_a_list_of_commands_is_cut(command):
    lines = help_of(command, "--help").partition("Commands:")[2].splitlines()
    assert len([line for line in lines if line.strip()]) > 1
    assert not [line for line in lines if line.endswith("...")]
