"""Flags that hold lists are parsed, and mistakes are named with their way out."""

import pytest

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError


def test_a_list_of_whole_numbers_is_sorted():
    assert flags.integers("16, 1,4", "--batch", 1, 256) == (1, 4, 16)


def test_a_single_number_is_a_list_too():
    assert flags.integers("7", "--draft", 1, 64) == (7,)


def test_probabilities_keep_their_order():
    assert flags.probabilities("0.2,0.6", "--accuracy") == (0.2, 0.6)


def test_names_keep_their_order():
    assert flags.names("b,a", "--drafters", ("a", "b")) == ("b", "a")


@pytest.mark.parametrize(
    ("case", "cause", "hint"),
    [
        (
            lambda: flags.integers("1,x", "--batch", 1, 256),
            "`--batch` holds 'x', which is no whole number",
            "give whole numbers from 1 to 256, for example `--batch 1,4,16`",
        ),
        (
            lambda: flags.integers("1,65", "--draft", 1, 64),
            "`--draft` holds 65, outside 1 to 64",
            "give whole numbers from 1 to 64, for example `--draft 1,4,16`",
        ),
        (lambda: flags.integers("4,4", "--batch", 1, 256), "`--batch` holds 4 twice", "name each value once"),
        (
            lambda: flags.integers("1,,4", "--batch", 1, 256),
            "`--batch` is '1,,4', with nothing between its commas",
            "give whole numbers from 1 to 256, for example `--batch 1,4,16`",
        ),
        (
            lambda: flags.probabilities("0.6,half", "--accuracy"),
            "`--accuracy` holds 'half', which is no number",
            "give one probability per rank, for example `--accuracy 0.6,0.2`",
        ),
        (
            lambda: flags.probabilities("nan", "--accuracy"),
            "`--accuracy` holds nan, outside 0 to 1",
            "give one probability per rank, for example `--accuracy 0.6,0.2`",
        ),
        (
            lambda: flags.probabilities("0.6,0.6", "--accuracy"),
            "`--accuracy` sums to 1.2, above 1",
            "the ranks exclude each other: lower them",
        ),
        (
            lambda: flags.names("ngrams", "--drafters", ("ngram",)),
            "`--drafters` is 'ngrams', which does not exist",
            "choose from: ngram",
        ),
        (
            lambda: flags.in_range(0, "--repeats", 1, 9),
            "`--repeats` is 0, outside 1 to 9",
            "choose a value from 1 to 9",
        ),
    ],
)
def test_a_bad_flag_is_named_with_its_limit_and_the_way_out(case, cause, hint):
    with pytest.raises(ConfigError) as caught:
        case()
    assert (caught.value.cause, caught.value.hint) == (cause, hint)
