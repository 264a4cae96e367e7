"""The tokenizer takes any text and gives it back; its chat template is what the training data used."""

import random

import pytest

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import demonstrate
from vllm_specrollout.bench.policy.tokenizer import SPECIALS, WORDS, build_tokenizer, prompt_text, split_words

TOKENIZER = build_tokenizer()


def test_task_text_is_one_token_per_piece():
    rng = random.Random(0)
    for problem in problems(60, seed=0):
        for text in (problem.prompt, demonstrate(problem, rng)):
            assert [TOKENIZER.decode([i]) for i in TOKENIZER(text)["input_ids"]] == split_words(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_unchanged(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_the_vocabulary_is_specials_bytes_and_words():
    assert len(TOKENIZER) == len(SPECIALS) + 256 + len(WORDS)
    assert TOKENIZER.eos_token == "<|end|>" and TOKENIZER.pad_token == "<|pad|>"


def test_the_chat_template_opens_an_answer_as_in_training():
    chat = [{"role": "user", "content": "Work out 1 + 2."}]
    assert TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt_text(
        "Work out 1 + 2."
    )


def test_the_chat_template_takes_system_and_earlier_turns():
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in chat)


def test_a_saved_tokenizer_loads_the_same(tmp_path):
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Wait, that is wrong. é 世界 12345\n"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.chat_template == TOKENIZER.chat_template
