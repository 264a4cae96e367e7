"""The `--spec-rollout` flag, and where the configuration lives while vLLM runs: `additional_config["spec_rollout"]`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_specrollout.config import SpecRolloutConfig, envs, parse
from vllm_specrollout.errors import ConfigError, SpecRolloutError

FLAG = "--spec-rollout"
HELP = (
    "Speculate losslessly: the very tokens of stock vLLM in fewer steps. Without a value: the defaults. "
    "Else a JSON object, the path of a JSON file, or 0 to switch off what VLLM_SPEC_ROLLOUT switched on."
)
COMMANDS = ("vllm",)
KEY = "spec_rollout"
REQUEST_METRICS_KEY = "spec_rollout_request_metrics"
"""`--per-request-spec-decode-metrics` on its way to the scheduler: vLLM refuses it without a `speculative_config`."""


class Hashed(Mapping[str, Any]):
    """An engine's `additional_config` with our entries alone, hashed by what of them can alter a compiled model.

    vLLM keeps compiled models by a hash of the configuration; of a dict it hashes every entry, so each knob would
    compile the model anew. Drafts are inputs of the model, and its attention is an opaque call, looked up by a layer's
    name. What remains is whether hidden states of layers are outputs.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def compute_hash(self) -> str:
        """Without such outputs, what vLLM puts there for an empty dict: the model is compiled as stock's is."""
        config = parse(self._entries[KEY])
        assert config is not None, "it is made where spec rollout is on"
        return "None" if config.coupled_model is None else json.dumps(config.coupled_model, sort_keys=True)


def fold(engine_args: Any, value: Any, origin: str) -> None:
    """Store what a keyword or flag said; it outranks `additional_config` and the environment.

    Raises:
        ConfigError: the value is not a configuration.
    """
    config = parse(value, origin)
    # False, not absence: it must outrank the environment too
    entry = False if config is None else config.as_dict()
    engine_args.additional_config = {**additional(engine_args), KEY: entry}


def requested(engine_args: Any) -> tuple[SpecRolloutConfig | None, bool]:
    """What the engine arguments, or else the environment, ask for; None is off. And whether only the latter asks.

    Raises:
        ConfigError: what they hold is not a configuration.
    """
    given = engine_args.additional_config
    if isinstance(given, Mapping) and given.get(KEY) is not None:
        return parse(given[KEY], f"additional_config[{KEY!r}]"), False
    text = envs.spec_rollout()
    return parse(text, envs.SPEC_ROLLOUT) if text is not None else None, True


def additional(engine_args: Any) -> dict[str, Any]:
    """A copy of the engine arguments' `additional_config`.

    Raises:
        ConfigError: it is no mapping, so there is no place for our entry.
    """
    given = engine_args.additional_config
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"`additional_config` is a {type(given).__name__}, which has no place for `{KEY}`",
            f'give `additional_config` as a dict, for example {{"{KEY}": true}}',
        )
    return dict(given)


def is_on(vllm_config: Any) -> bool:
    """Whether an engine was configured with speculation."""
    given = vllm_config.additional_config
    return isinstance(given, Mapping) and bool(given.get(KEY))


def config_of(vllm_config: Any) -> SpecRolloutConfig | None:
    """An engine's configuration, or None when speculation is off."""
    return parse(dict(vllm_config.additional_config[KEY])) if is_on(vllm_config) else None


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
