"""The `--spec-rollout` flag, and how a refusal ends on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

FLAG = "--spec-rollout"
HELP = (
    "Speculate losslessly: the very tokens of stock vLLM in fewer steps. Without a value: the defaults. "
    "Else a JSON object, the path of a JSON file, or 0 to switch off what VLLM_SPEC_ROLLOUT switched on."
)
COMMANDS = ("vllm",)


def add_flag(parser: Any) -> Any:
    """Add `--spec-rollout [JSON|path]` to a parser that takes engine arguments."""
    if FLAG in parser._option_string_actions:  # a parser may pass here twice
        return parser
    group = parser.add_argument_group(title="SpecRollout", description="Lossless tree speculation for RL rollouts.")
    group.add_argument(FLAG, nargs="?", const=True, default=None, metavar="JSON|PATH", help=HELP)
    return parser


@contextmanager
def readable_errors() -> Iterator[None]:
    """Inside the `vllm` command, end with the message alone and status 2; elsewhere let the exception through."""
    try:
        yield
    except SpecRolloutError as error:
        if os.path.basename(sys.argv[0] if sys.argv else "") not in COMMANDS:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
