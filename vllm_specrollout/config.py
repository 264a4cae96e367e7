"""The configuration: one frozen dataclass, validated when made. Defaults live here and nowhere else.

The command line, `LLM(spec_rollout=...)`, `additional_config` and the environment all end in `parse()`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_specrollout.errors import ConfigError

MAX_NODES = 64
"""Most draft nodes of one request in one step: what the kernels' ancestor masks hold."""

DRAFTERS = ("ngram", "oracle")
SCOPES = ("problem", "global")
BUDGETS = ("auto", "fixed")
SHAPES = ("tree", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """The `ngram` drafter: looks the last tokens up in the request's own prompt and output."""

    max_match: int = 8
    """Longest context looked up, in tokens."""
    min_match: int = 2
    """Shortest context that may draft, in tokens."""
    max_matches: int = 32
    """Most recent earlier places compared per context length."""

    def __post_init__(self) -> None:
        _check_range("ngram.max_match", self.max_match, 1, 64)
        _check_range("ngram.min_match", self.min_match, 1, 64)
        _check_range("ngram.max_matches", self.max_matches, 1, 4096)
        if self.min_match > self.max_match:
            raise ConfigError(
                f"`ngram.min_match` is {self.min_match}, above `ngram.max_match` {self.max_match}",
                "lower `min_match` or raise `max_match`",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """The `history` drafter: looks the last tokens up in earlier answers to the same problem."""

    dir: str = ""
    """Directory that keeps the answers across restarts; empty: they are kept in memory only."""
    epochs: int = 2
    """How many past epochs' answers draft, the running epoch not counted; 0: only this epoch's siblings do."""
    siblings: bool = True
    """Whether other samples of the same problem, running or done in this epoch, draft too."""
    scope: str = "problem"
    """`problem` keeps one index per problem, `global` a single one for all of them."""
    min_match: int = 3
    """Shortest context that may draft, in tokens."""
    max_match: int = 7
    """Longest context looked up, in tokens."""
    max_matches: int = 32
    """Most earlier places compared per context length."""
    decay: float = 0.5
    """Weight of an answer relative to one of the epoch after it."""
    reward_weight: float = 1.0
    """How much a reward of 1 adds to an answer's weight of 1; 0: rewards do not count. Negative rewards count as 0."""
    max_mib: int = 1024
    """Memory for indices, in MiB; beyond it, those of the problems asked for least recently are dropped."""

    def __post_init__(self) -> None:
        _check_range("history.epochs", self.epochs, 0, 1024)
        _check_choice("history.scope", self.scope, SCOPES)
        _check_range("history.min_match", self.min_match, 1, 64)
        _check_range("history.max_match", self.max_match, 1, 64)
        _check_range("history.max_matches", self.max_matches, 1, 4096)
        _check_real("history.decay", self.decay, 0.0, 1.0)
        _check_real("history.reward_weight", self.reward_weight, 0.0, 1024.0)
        _check_range("history.max_mib", self.max_mib, 1, 1 << 22)
        if self.min_match > self.max_match:
            raise ConfigError(
                f"`history.min_match` is {self.min_match}, above `history.max_match` {self.max_match}",
                "lower `min_match` or raise `max_match`",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleConfig:
    """The `oracle` drafter (benchmarks only): proposes recorded continuations with a set accuracy."""

    path: str = ""
    """JSON file: {problem id: [token ids]}; requests name theirs in `extra_args`."""
    accuracy: tuple[float, ...] = (1.0,)
    """Probability that the true token is the draft of rank 1, of rank 2, ...; more than one rank makes a tree."""
    seed: int = 0
    """Seed of the decoys and of the ranks drawn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracy", tuple(self.accuracy))
        if not self.accuracy:
            raise ConfigError("`oracle.accuracy` is empty", "give at least one rank, for example [1.0]")
        for value in self.accuracy:
            _check_type("oracle.accuracy", value, (int, float))
            if not 0.0 <= value <= 1.0:
                raise ConfigError(
                    f"`oracle.accuracy` holds {value}, outside 0 to 1", "give probabilities, for example [0.6, 0.2]"
                )
        if sum(self.accuracy) > 1.0 + 1e-9:
            raise ConfigError(
                f"`oracle.accuracy` sums to {sum(self.accuracy):g}, above 1",
                "the ranks exclude each other: lower them so that they sum to at most 1",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRolloutConfig:
    """Everything that can be set for an engine."""

    drafters: tuple[str, ...] = ("ngram",)
    """Which drafters propose, best first."""
    max_draft_tokens: int = 24
    """Most draft tokens (tree nodes) verified for one request in one step."""
    max_depth: int = 16
    """Most draft tokens on one root-to-leaf path."""
    shape: str = "tree"
    """`tree`, or `chain` for drafts without branches."""
    budget: str = "auto"
    """`auto` drafts only what pays at the present batch; `fixed` always drafts up to `max_draft_tokens`."""
    max_graphs: int = 64
    """CUDA only: most CUDA graphs captured for steps with drafts (see `specrollout plan graphs`); 0 captures none."""
    scratch_blocks: int | None = None
    """KV cache blocks set aside for branches beyond the first; unset: chosen from the KV cache's size."""
    block_size: int | None = None
    """KV cache block size in tokens when `--block-size` is not given; unset: 32, which makes branches cheap."""
    ngram: NgramConfig = field(default_factory=NgramConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    oracle: OracleConfig = field(default_factory=OracleConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if not self.drafters:
            raise ConfigError("`drafters` is empty", f"name at least one of: {', '.join(DRAFTERS)}")
        for name in self.drafters:
            _check_choice("drafters", name, DRAFTERS)
        if len(set(self.drafters)) != len(self.drafters):
            raise ConfigError(f"`drafters` names one twice: {list(self.drafters)}", "name each drafter once")
        _check_range("max_draft_tokens", self.max_draft_tokens, 1, MAX_NODES)
        _check_range("max_depth", self.max_depth, 1, MAX_NODES)
        _check_range("max_graphs", self.max_graphs, 0, 4096)
        _check_choice("shape", self.shape, SHAPES)
        _check_choice("budget", self.budget, BUDGETS)
        if self.scratch_blocks is not None:
            _check_range("scratch_blocks", self.scratch_blocks, 0, 1 << 20)
        if self.block_size is not None:
            _check_range("block_size", self.block_size, 32, 1024)
            if self.block_size % 32:
                raise ConfigError(f"`block_size` is {self.block_size}, not a multiple of 32", "use 32, 64 or 128")
        if "oracle" in self.drafters and not self.oracle.path:
            raise ConfigError(
                "the `oracle` drafter has no recorded continuations",
                'set {"oracle": {"path": "FILE.json"}}, or use the `ngram` drafter',
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `parse(config.as_dict()) == config`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What one request may set, in `extra_args["spec_rollout"]` or as JSON in `vllm_xargs`."""

    problem_id: str = ""
    """Requests that share it are samples of one problem; unset: a hash of the prompt's tokens."""
    enabled: bool = True
    """False: this request decodes plainly."""
    max_draft_tokens: int | None = None
    """Most draft tokens of this request in one step; at most the engine's `max_draft_tokens` is used."""

    def __post_init__(self) -> None:
        _check_type("problem_id", self.problem_id, (str,))
        _check_type("enabled", self.enabled, (bool,))
        if self.max_draft_tokens is not None:
            _check_range("max_draft_tokens", self.max_draft_tokens, 0, MAX_NODES)


def parse(value: Any, origin: str = "spec_rollout") -> SpecRolloutConfig | None:
    """Turn what the user gave into a configuration.

    Args:
        value: a `SpecRolloutConfig`, a mapping, True (defaults), False or None (off), or text: `1`/`true`, `0`/`false`,
            a JSON object, or the path of a JSON file.
        origin: where it came from, for messages: a flag, a keyword or a variable.

    Returns:
        The configuration, or None when switched off.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range, unreadable files.
    """
    if value is None or value is False:
        return None
    if isinstance(value, SpecRolloutConfig):
        return value
    if value is True:
        return SpecRolloutConfig()
    if isinstance(value, str):
        value = _load_text(value, origin)
        if isinstance(value, bool):
            return SpecRolloutConfig() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{origin}` is {value!r}, of type {type(value).__name__}",
            'give true, false, a JSON object such as {"max_draft_tokens": 8}, or the path of a JSON file',
        )
    return _build(SpecRolloutConfig, value, origin)


def parse_request(value: Any, origin: str = "extra_args['spec_rollout']") -> RequestOptions:
    """Options of one request from `SamplingParams.extra_args`; over HTTP the value is a JSON string.

    Raises:
        ConfigError: as `parse()`.
    """
    if value is None:
        return RequestOptions()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`{origin}` is not valid JSON: {error.msg} at column {error.colno}",
                'give a JSON object, for example {"enabled": false}',
            ) from None
    if isinstance(value, bool):
        return RequestOptions(enabled=value)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{origin}` is {value!r}, of type {type(value).__name__}",
            'give an object, for example {"problem_id": "aime-7", "max_draft_tokens": 8}',
        )
    return _build(RequestOptions, value, origin)


def _load_text(text: str, origin: str) -> Any:
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("1", "true", "on", "yes", ""):
        return True
    if lowered in ("0", "false", "off", "no"):
        return False
    if stripped.startswith(("{", "[", '"')):
        content, where = stripped, f"`{origin}`"
    elif os.path.isfile(stripped):
        where = f"`{stripped}`"
        try:
            with open(stripped, encoding="utf-8") as handle:
                content = handle.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", "check the file's permissions and encoding") from None
    else:
        raise ConfigError(
            f"`{origin}` is {stripped!r}: neither JSON nor an existing file",
            "give true, false, a JSON object in single quotes, or the path of a JSON file",
        )
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            'quote keys and text with ", and put the whole object in single quotes on the command line',
        ) from None


def _build(cls: type, values: Mapping[str, Any], origin: str, prefix: str = "") -> Any:
    """Make a config dataclass from a mapping: unknown keys and wrong types are errors that name the nearest key."""
    known = {f.name: f for f in fields(cls)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            way = f"did you mean `{prefix}{near[0]}`?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key `{prefix}{key}` in `{origin}`", way)
        nested = _NESTED.get(key) if cls is SpecRolloutConfig else None
        if nested is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"`{prefix}{key}` is {value!r}, of type {type(value).__name__}",
                    f"give an object with the keys: {', '.join(f.name for f in fields(nested))}",
                )
            value = _build(nested, value, origin, f"{key}.")
        else:
            _check_field(prefix + key, value, known[key].type)
        arguments[key] = value
    return cls(**arguments)


_NESTED = {"ngram": NgramConfig, "history": HistoryConfig, "oracle": OracleConfig}


def _check_field(name: str, value: Any, annotation: Any) -> None:
    text = str(annotation)
    if text.startswith("tuple"):
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ConfigError(f"`{name}` is {value!r}, not a list", f"write it as a list, for example [{value!r}]")
        return
    allowed: tuple[type, ...] = ()
    for kind, types in (("bool", (bool,)), ("int", (int,)), ("float", (int, float)), ("str", (str,))):
        if kind in text:
            allowed += types
    if "None" in text and value is None:
        return
    _check_type(name, value, allowed)


def _check_type(name: str, value: Any, allowed: tuple[type, ...]) -> None:
    # bool is an int to Python, but not to a user
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(sorted({t.__name__ for t in allowed}))
        raise ConfigError(f"`{name}` is {value!r}, of type {type(value).__name__}", f"give a value of type {wanted}")


def _check_range(name: str, value: Any, low: int, high: int) -> None:
    _check_type(name, value, (int,))
    if not low <= value <= high:
        raise ConfigError(f"`{name}` is {value}, outside {low} to {high}", f"choose a value from {low} to {high}")


def _check_real(name: str, value: Any, low: float, high: float) -> None:
    _check_type(name, value, (int, float))
    if not low <= value <= high:
        raise ConfigError(
            f"`{name}` is {value}, outside {low:g} to {high:g}", f"choose a value from {low:g} to {high:g}"
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        way = f"did you mean `{near[0]}`?" if near else f"choose from: {', '.join(choices)}"
        raise ConfigError(f"`{name}` names {value!r}, which does not exist", way)
