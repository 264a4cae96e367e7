"""A dataclass becomes a command: names, types, defaults, help and limits are its fields'."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import typer
import typer.main

from bench.runner.scenario import Scenario, command, flag
from tests.unit.bench.runner.fake_engines import invoke
from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Cooking(Scenario):
    """Cook it.

    Not told by the command.
    """

    bench: ClassVar[str] = "cooking"

    pots: tuple[int, ...] = flag((1, 4), "Pots at once.", "--pot", within=(1, 8))
    shares: tuple[float, ...] = flag((0.5,), "", parse=cli_flags.shares)
    cooks: tuple[str, ...] = flag(("ann",), "", choices=("ann", "bob"))
    rounds: int = flag(3, "", "--rounds", "--repeats", within=(1, 9))
    heat: float = flag(0.5, "", within=(0, 1))
    is_hot: bool = flag(True, "", "--hot/--cold")
    quick: bool = flag(False, "")
    sauce: dict[str, int] = flag({"salt": 1}, "")
    place: Path | None = flag(None, "", is_setting=False)


def cook(*arguments):
    made = []
    result = invoke(command(Cooking, made.append), *arguments)
    if result.exception is not None:
        raise result.exception
    return made[0]


def test_without_flags_the_scenario_has_its_defaults():
    assert cook() == Cooking()


def test_every_kind_of_flag_becomes_its_fields_type():
    found = cook(
        *("--pot", "4,2", "--shares", "0.9,0.1", "--cooks", "bob,ann", "--repeats", 2, "--heat", 0.25, "--cold"),
        *("--quick", "--sauce", '{"salt": 2}', "--place", "x"),
    )
    assert (found.pots, found.shares, found.cooks, found.rounds) == ((2, 4), (0.9, 0.1), ("bob", "ann"), 2)
    assert (found.heat, found.is_hot, found.quick, found.sauce) == (0.25, False, True, {"salt": 2})
    assert found.place == Path("x")


def test_a_commands_help_is_its_fields_and_its_own_flags_come_first():
    single = typer.Typer()
    single.command()(command(Cooking, print))
    made = typer.main.get_command(single)
    assert made.help == "Cook it."
    assert [option.opts for option in made.params][:3] == [["--pot"], ["--shares"], ["--cooks"]]
    assert made.params[0].help == "Pots at once." and made.params[0].default == "1,4"
    assert {option.name: option.help for option in made.params}["out"] == "Also write the report to this file."


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--pot", "9"], "`--pot` holds 9, outside 1 to 8"),
        (["--repeats", "0"], "`--rounds` is 0, outside 1 to 9"),
        (["--heat", "1.5"], "`--heat` is 1.5, outside 0 to 1"),
        (["--cooks", "eve"], "`--cooks` is 'eve', which does not exist"),
        (["--shares", "0.5,0.5"], "`--shares` is '0.5,0.5', which holds a value twice"),
        (["--sauce", "no.json"], "`--sauce` is neither a JSON object nor a file with one"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_its_flags_name(arguments, cause):
    with pytest.raises(ConfigError) as caught:
        cook(*arguments)
    assert caught.value.cause.startswith(cause)


def test_a_scenario_made_in_code_is_held_to_the_same_limits():
    with pytest.raises(ConfigError, match="`--pot` is 9, outside 1 to 8"):
        Cooking(pots=(1, 9))


def test_settings_leave_out_where_things_are_written():
    assert set(Cooking().settings()) == {"pots", "shares", "cooks", "rounds", "heat", "is_hot", "quick", "sauce"}
