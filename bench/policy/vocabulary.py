"""Every whole-word token of the tasks, and the pattern that cuts text into them.

May enter: plain strings. May not: torch, tokenizers, or anything about one task's rules.
A text is cut by `WORD_PATTERN`; a piece listed in `WORDS` is one token, any other piece falls back to its bytes.
Words and numbers carry their leading space, so joining the pieces gives the text back unchanged.
"""

import re

LARGEST_NUMBER = 99
"""Largest magnitude that occurs in a task; each number 0..99 is one token."""

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = (PAD, SYSTEM, USER, ASSISTANT, END)

WORD_PATTERN = r" ?\d{1,2}| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s"

NUMBERS = tuple(f" {number}" for number in range(LARGEST_NUMBER + 1))

_SENTENCES = """
Work out 1 + 1 - 2.
Solve this in any order:
Step by step: Let us see: I start. OK, I start. Here we go.
Join 1 and 2 to get 3. Now 1 and 2 give 3. Left: 3
Wait, that is wrong. No, I made a slip. Hmm, wrong.
Check: 3 without 2 is 1, fine. Check: 3 without 2 leaves 1, good.
The answer is 3. So the answer is 3.
"""


def split_words(text: str) -> list[str]:
    """Cuts text as the tokenizer does; the pieces joined are the text."""
    return re.findall(WORD_PATTERN, text)


def _words() -> tuple[str, ...]:
    """Every piece of the sentences that is longer than a byte, in order of first use, then all numbers.

    A sentence is given in each form in which it occurs: words at a line's start have no space before them.
    """
    pieces = [piece for line in re.split(r"\n|(?<=[.:]) (?=[A-Z])", _SENTENCES) for piece in split_words(line)]
    return tuple(dict.fromkeys(piece for piece in pieces if len(piece) > 1 and piece not in NUMBERS)) + NUMBERS


WORDS = _words()
