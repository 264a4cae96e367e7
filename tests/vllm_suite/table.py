"""Which of vLLM's own test files run in both arms, and what each must have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class File:
    """A file of vLLM's tests."""

    path: str
    # tests that pass with stock on CPU, and requests with drafts, at least
    passed: int
    drafted: int
    # test -> why it does not run
    left_out: Mapping[str, str] = field(default_factory=dict)


FILES = (
    File("tests/v1/sample/test_sampling_params_e2e.py", 0, 0),
    File("tests/v1/engine/test_llm_engine.py", 0, 0),
    File("tests/v1/engine/test_async_llm.py", 0, 0),
    File("tests/v1/e2e/general/test_streaming_input.py", 0, 0),
    File("tests/v1/e2e/general/test_min_tokens.py", 0, 0),
    File("tests/v1/sample/test_logprobs.py", 0, 0),
    File("tests/entrypoints/openai/completion/test_completion.py", 0, 0),
    File("tests/entrypoints/openai/test_return_token_ids.py", 0, 0),
    File("tests/entrypoints/openai/chat_completion/test_chat_completion.py", 0, 0),
    File("tests/entrypoints/llm/test_struct_output_generate.py", 0, 0),
    File("tests/detokenizer/test_stop_strings.py", 0, 0),
    File("tests/detokenizer/test_stop_reason.py", 0, 0),
    File("tests/samplers/test_ignore_eos.py", 0, 0),
    File("tests/samplers/test_no_bad_words.py", 0, 0),
    File("tests/v1/shutdown/test_delete.py", 0, 0),
)
