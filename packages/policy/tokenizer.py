"""The policy's tokenizer: whole words of the tasks, and bytes for all other text.

It is a byte-level BPE with no merges: a piece of text that is in the vocabulary as a whole is one token, any other
piece falls apart into its UTF-8 bytes. So every string has an encoding. Words and numbers carry their leading space, so
joining the pieces gives the text back.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LEN = 4096
"""Longest prompt plus answer in tokens; the model's max_position_embeddings."""

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

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}" + SYSTEM + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}" + USER + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}" + ASSISTANT + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + ASSISTANT + "{%- endif -%}"
)


def split_words(text: str) -> list[str]:
    """Cuts text as the tokenizer does; the pieces joined are the text."""
    return re.findall(WORD_PATTERN, text)


# In order of first use, then all numbers; a single letter or sign is a byte already. A sentence is given in each form
# in which it occurs: words at a line's start have no space before them.
_PIECES = [piece for line in re.split(r"\n|(?<=[.:]) (?=[A-Z])", _SENTENCES) for piece in split_words(line)]
WORDS = tuple(dict.fromkeys(piece for piece in _PIECES if len(piece) > 1 and piece not in NUMBERS)) + NUMBERS


def prompt_text(prompt: str) -> str:
    """The chat template's text for one user message, ready for the answer; without transformers or jinja."""
    return f"{USER}{prompt}{END}{ASSISTANT}"


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer, made anew; ids: specials, then the 256 bytes, then words, then numbers."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [to_symbols.pre_tokenize_str(word)[0][0] for word in WORDS]
    vocab = {token: token_id for token_id, token in enumerate([*SPECIALS, *byte_symbols, *words])}

    core = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"), to_symbols])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LEN,
        clean_up_tokenization_spaces=False,
    )
