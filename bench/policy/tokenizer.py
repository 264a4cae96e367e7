"""The policy's tokenizer: whole words of the tasks, and bytes for all other text.

May enter: the tokenizers library and transformers' wrapper of it. May not: torch, vLLM, task rules.

It is a byte-level BPE with no merges: a piece of text that is in the vocabulary as a whole is one token, any other
piece falls apart into its UTF-8 bytes. So every string has an encoding, and decoding gives the string back.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from .vocabulary import ASSISTANT, END, PAD, SPECIALS, SYSTEM, USER, WORD_PATTERN, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LEN = 4096
"""Longest prompt plus answer in tokens; the model's max_position_embeddings."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}" + SYSTEM + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}" + USER + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}" + ASSISTANT + "{{ message['content'] }}" + END + "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + ASSISTANT + "{%- endif -%}"
)


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


def save_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into `folder` (made if missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(folder)
