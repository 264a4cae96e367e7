"""Flags that hold lists are parsed, and mistakes are named with their way out."""

import pytest

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError

WHOLE = "give whole numbers from 1 to 256, for example `--batch 1,4,16`"
PER_RANK = "give one probability per rank, for example `--accuracy 0.6,0.2`"


def batch(text):
    return flags.integers(text, "--batch", 1, 256)


def accuracy(text):
    return flags.probabilities(text, "--accuracy")


def drafters(text):
    return flags.names(text, "--drafters", ("a", "b"))


def repeats(text):
    return flags.in_range(int(text), "--repeats", 1, 9)


def test_whole_numbers_are_sorted_and_other_lists_keep_their_order():
    assert (batch("16, 1,4"), batch("7")) == ((1, 4, 16), (7,))
    assert (accuracy("0.2,0.6"), drafters("b,a")) == ((0.2, 0.6), ("b", "a"))


@pytest.mark.parametrize(
    ("read", "text", "cause", "hint"),
    [
        (batch, "1,x", "`--batch` holds 'x', which is no whole number", WHOLE),
        (batch, "1,257", "`--batch` holds 257, outside 1 to 256", WHOLE),
        (batch, "4,4", "`--batch` holds 4 twice", "name each value once"),
        (batch, "1,,4", "`--batch` is '1,,4', with nothing between its commas", WHOLE),
        (accuracy, "0.6,half", "`--accuracy` holds 'half', which is no number", PER_RANK),
        (accuracy, "nan", "`--accuracy` holds nan, outside 0 to 1", PER_RANK),
        (accuracy, "0.6,0.6", "`--accuracy` sums to 1.2, above 1", "the ranks exclude each other: lower them"),
        (drafters, "as", "`--drafters` is 'as', which does not exist", "choose from: a, b"),
        (repeats, "0", "`--repeats` is 0, outside 1 to 9", "choose a value from 1 to 9"),
    ],
)
def test_a_bad_flag_is_named_with_its_limit_and_the_way_out(read, text, cause, hint):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert (caught.value.cause, caught.value.hint) == (cause, hint)
