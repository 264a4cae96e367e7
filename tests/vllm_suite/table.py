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
    # of a file that skips itself on CPU, whose engines do there what it asks for
    is_unskipped: bool = False


FILES = (
    File(
        "tests/v1/sample/test_sampling_params_e2e.py",
        passed=7,
        drafted=15,
        left_out={"test_seed": "wants answers of more entropy than the hub's models give: fails with stock too"},
    ),
    File("tests/v1/e2e/general/test_min_tokens.py", passed=13, drafted=8),
    # some of its sessions are cut off by the clock
    File("tests/v1/e2e/general/test_streaming_input.py", passed=14, drafted=4, is_unskipped=True),
)
