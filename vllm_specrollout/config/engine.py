"""The configuration: one frozen dataclass, validated when made. Defaults live here and nowhere else.

The command line, `LLM(spec_rollout=...)`, `additional_config` and the environment all end in `parse()`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from vllm_specrollout.config.budgets import OPTIONS, BudgetOptions, as_given, name_and_options, with_drafter_defaults
from vllm_specrollout.config.by_name import QUALIFIED
from vllm_specrollout.config.checks import (
    DEVICE,
    FILE,
    ID,
    Choice,
    FieldRule,
    Range,
    check_fields,
    check_is_on,
    declared,
    nearest,
)
from vllm_specrollout.config.drafters import (
    DRAFTERS,
    SINGLE,
    DecoupledConfig,
    HistoryConfig,
    LearnConfig,
    NgramConfig,
    StartedDrafter,
    check_drafter,
    drafters_as_given,
    names_and_options,
)
from vllm_specrollout.config.resuming import Resume
from vllm_specrollout.errors import ConfigError, named, shown, shown_path

MAX_NODES = 64
"""Most draft nodes of one request in one step: what the kernels' ancestor masks hold."""

MOST_BYTES = 1 << 20
"""Of a configuration in a file."""

ALTERNATIVES = "_alternatives"
MODEL_SOURCES = ("model", "model" + ALTERNATIVES)
DECOUPLED_SOURCES = ("decoupled", "decoupled" + ALTERNATIVES)
PLACEMENTS = ("coupled", "decoupled", "auto")
BUDGETS = tuple(OPTIONS)
PROFILES = ("auto", "off")
SHAPES = ("auto", "tree", "chain")
SELF_CHECKS = ("auto", "always", "off")
QUEUE_ORDERS = ("longest_first", "arrival")
DRAFTER = FieldRule(check_drafter, {"pattern": f"^({'|'.join(DRAFTERS)}|{QUALIFIED})$"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRolloutConfig:
    """Everything that can be set for an engine."""

    drafters: tuple[Annotated[str, DRAFTER], ...] = ("history", "ngram")
    """Which drafters propose, best first: `history`, `ngram`, or a class of your own (docs/guides/your-drafter.md) as
    `my.module:Class`; its options go beside the name: `{"name": "my.module:Class", "levels": 4}`. May be empty beside a
    `speculative_config`, whose model drafts as well."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's own: the model that drafts, as `--speculative-config` takes it. That flag, given beside `--spec-rollout`,
    ends up here; `num_speculative_tokens` is the most levels that the model drafts."""
    placement: Annotated[str, Choice(PLACEMENTS)] = "coupled"
    """Where the model of `speculative_config` drafts: `coupled`, in the target's own steps; or `decoupled`, in a
    process of its own, which drafts ahead while the target verifies; or `auto`: on CPU where it is faster by what
    engines like this have measured of it, or nowhere; in the target's steps where nothing is known. On a GPU `auto` has
    it draft in both places. The last two take method `draft_model`. A decoupled engine needs no `speculative_config`:
    drafters can be attached while it runs."""
    devices: tuple[Annotated[str, DEVICE], ...] = ()
    """What a decoupled drafter runs on: CPU cores, such as `cpu:1` or `cpu:2-3`, or GPUs beside those of the target,
    such as `cuda:1`, or `cuda:1,2` for an engine of two ranks; empty: all cores."""
    max_draft_tokens: Annotated[int, Range(1, MAX_NODES)] = 24
    """Most draft tokens (tree nodes) verified for one request in one step."""
    max_depth: Annotated[int, Range(1, MAX_NODES)] = 16
    """Most draft tokens on one root-to-leaf path."""
    shape: Annotated[str, Choice(SHAPES)] = "auto"
    """`auto` drafts trees, on a CUDA device once the engine's self-check has passed there; `tree` drafts them without
    one as well; `chain` drafts without branches."""
    self_check: Annotated[str, Choice(SELF_CHECKS)] = "auto"
    """Whether the engine compares itself with plain decoding (docs/concepts/self-check.md). At its start, `auto` does
    on CUDA devices; `always`, wherever the V2 runner is, and anew each time. While it serves, both do: now and then
    plain decoding has to find an accepted path's tokens again, in 0.4 % of steps at most. `off`: neither."""
    budget: str = "auto"
    """`auto` drafts for most tokens per millisecond; `fixed` always drafts up to `max_draft_tokens`; `off` never;
    `histospec` grows a window per answer (RhymeRL); `das` drafts for the answers expected to be long (DAS); `fastgrpo`
    fills the batch up to the engine's knee (FastGRPO); `tlt` lets a bandit choose among tree sizes below 32 requests
    (TLT); `specactor` plans one window for the batch and re-plans it every 1000 tokens (SpecActor); or a class of your
    own, as `my.module:Class`. Options go into an object: `{"name": "tlt", "threshold": 48}`."""
    queue_order: Annotated[str, Choice(QUEUE_ORDERS)] = "longest_first"
    """Which waiting request gets the next place in the batch: `longest_first`, by the lengths of earlier answers to the
    same problem, which ends a rollout sooner; or `arrival`, as in vLLM. Where requests have priorities, those hold."""
    profile: Annotated[str, Choice(PROFILES)] = "auto"
    """`auto` starts from what `specrollout profile` measured of this model on this host, if it did; `off` does not."""
    row_invariant: bool = False
    """V1 runner on CPU: where this host rounds the attention of a row otherwise among others of its request (bfloat16
    with AMX), drafted rows attend one by one. It costs time, and takes most ties away (docs/concepts/exactness.md)."""
    record: Annotated[str | None, FILE] = None
    """File that keeps what `specrollout replay` and `report` need; packed if it ends in `.zst` or `.gz`; an older one
    is lost."""
    ngram: NgramConfig = field(default_factory=NgramConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    train: LearnConfig = field(default_factory=LearnConfig)
    decoupled: DecoupledConfig = field(default_factory=DecoupledConfig)
    # no keys of their own: they follow from `budget` and `drafters`, which keep the names alone
    budget_options: BudgetOptions = field(default=BudgetOptions(), metadata={"is_derived": True})
    drafter_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata={"is_derived": True})

    def __post_init__(self) -> None:
        name, options = name_and_options(self.budget, self.budget_options)
        object.__setattr__(self, "budget", name)
        object.__setattr__(self, "budget_options", options)
        names, by_drafter = names_and_options(self.drafters, self.drafter_options)
        object.__setattr__(self, "drafters", names)
        object.__setattr__(self, "drafter_options", by_drafter)
        check_fields(self)
        if len(set(self.drafters)) != len(self.drafters):
            raise ConfigError(f"`drafters` names one twice: {shown(list(self.drafters))}", "name each drafter once")
        self._check_settings_are_used()
        if self.record is not None and not os.path.basename(self.record):
            cause = f"`record` is {shown_path(self.record)}, which names no file"
            raise ConfigError(cause, 'name one, as in "trace.jsonl.zst"')

    def _check_settings_are_used(self) -> None:
        for name in DRAFTERS:
            why = f"`{name}` is not among `drafters` {list(self.drafters)}"
            way = f"add it: {json.dumps({'drafters': [*self.drafters, name]})}"
            check_is_on(name, getattr(self, name), name in self.drafters, why, way)
        if self.train.mode == "auto" and self.placement != "coupled":
            raise ConfigError(
                f"`train` is `auto`, and `placement` is `{self.placement}`; heads learn in the target's own steps",
                "leave one of the two out",
            )
        way = 'set {"placement": "decoupled"}'
        check_is_on("decoupled", self.decoupled, self.is_decoupled, "`placement` is `coupled`", way)
        if self.devices and not (self.is_decoupled and not self.decoupled.address):
            raise ConfigError(
                f"`devices` is {shown(list(self.devices))}, and no drafter is started that could have them",
                'drop `devices`, or set {"placement": "decoupled"}; a drafter begun by hand takes `--cores`',
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """What a node's `source` counts: the drafters, then the chain and the alternatives of a model that drafts."""
        here = () if self.coupled_model is None else MODEL_SOURCES
        return (*self.drafters, *here, *(DECOUPLED_SOURCES if self.is_decoupled else ()))

    @property
    def is_decoupled(self) -> bool:
        """Whether models may draft in processes of their own, begun with the engine or attached later."""
        return self.placement != "coupled"

    @property
    def coupled_model(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config` of the model that drafts in the target's own steps; None: none does."""
        return None if self.placement == "decoupled" else self.speculative_config

    @property
    def begun(self) -> tuple[StartedDrafter, ...]:
        """Drafters that the engine begins in processes of their own."""
        if not self.is_decoupled:
            return ()
        if self.speculative_config is None or self.decoupled.address:
            return self.decoupled.drafters
        given = self.speculative_config
        model, most = str(given.get("model", "")), given.get("max_model_len")
        args = {**({} if most is None else {"max_model_len": most}), **self.decoupled.engine_args}
        return (
            StartedDrafter(name=SINGLE, model=model, devices=self.devices, engine_args=args),
            *self.decoupled.drafters,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `parse(config.as_dict()) == config`."""
        values = dataclasses.asdict(self)
        del values["budget_options"], values["drafter_options"]
        values["budget"] = as_given(self.budget, self.budget_options)
        values["drafters"] = drafters_as_given(self.drafters, self.drafter_options)
        return json.loads(json.dumps(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What one request may set, in `extra_args["spec_rollout"]` or as JSON in `vllm_xargs`."""

    problem_id: Annotated[str, ID] = ""
    """Requests that share it are samples of one problem; unset: those with equal prompts are, and whatever goes on from
    their answers."""
    enabled: bool = True
    """False: this request decodes plainly."""
    max_draft_tokens: Annotated[int | None, Range(0, MAX_NODES)] = None
    """Most draft tokens of this request in one step; at most the engine's `max_draft_tokens` is used."""
    resume: Resume | None = None
    """`{"prompt_tokens": 12, "answer_tokens": 5}`: the prompt ends with an answer's tokens so far, five behind the
    first 12, and it goes on. It takes the seed of the interrupted request; `max_tokens` and `min_tokens` are of what is
    still to come."""

    def __post_init__(self) -> None:
        check_fields(self)


def parse(value: Any, origin: str = "spec_rollout") -> SpecRolloutConfig | None:
    """Turn what the user gave into a configuration.

    A budget that stands for a published system brings that system's drafter settings for the keys that are not given
    (`config.budgets.DRAFTER_DEFAULTS`).

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
        value = load_text(value, origin)
        if isinstance(value, bool):
            return SpecRolloutConfig() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{origin}` is {shown(value)}, of type {type(value).__name__}",
            'give true, false, a JSON object such as {"max_draft_tokens": 8}, or the path of a JSON file',
        )
    return _build(SpecRolloutConfig, with_drafter_defaults(value), origin)


def parse_request(value: Any, origin: str = "extra_args['spec_rollout']") -> RequestOptions:
    """Options of one request from `SamplingParams.extra_args`; over HTTP the value is a JSON string.

    Raises:
        ConfigError: as `parse()`.
    """
    if value is None:
        return RequestOptions()
    if isinstance(value, str):
        value = load_json(value, f"`{origin}`", 'give a JSON object, for example {"enabled": false}')
    if isinstance(value, bool):
        return RequestOptions(enabled=value)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{origin}` is {shown(value)}, of type {type(value).__name__}",
            'give an object, for example {"problem_id": "aime-7", "max_draft_tokens": 8}',
        )
    return _build(RequestOptions, value, origin)


_VLLMS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max")
_GONE: Mapping[str, str] = {
    "block_size": "give vLLM's `--block-size`",
    "scratch_blocks": "leave it out: they follow from the KV cache's memory",
    "time_share": "leave it out: no drafter takes more than the rest of the step does",
    "ngram.max_matches": "leave it out: 32 places are compared",
    "ngram.max_mib": "leave it out: 2 GiB are the most",
    "history.max_matches": "leave it out: 32 places are compared",
    "history.scope": "leave it out: each problem has an index of its own",
    "history.foreign": "leave it out: files of another vocabulary are left out, with one warning",
    "history.reward_priority": 'write {"history": {"reward_weight": 255}}',
    "decoupled.start_s": "leave it out: the engine's start waits for 180 s, and drafters that come later draft as well",
}
"""Keys that there were, and what to write in their place."""


def _way_out(key: Any, known: Mapping[str, Any], prefix: str) -> str:
    """What to write in the place of an unknown key."""
    if isinstance(key, str) and "." in key and key.partition(".")[0] in known:
        outer, _, inner = key.partition(".")
        return f'write {{"{outer}": {{"{inner}": ...}}}}'
    if way := _GONE.get(f"{prefix}{key}"):
        return way
    if key in _VLLMS and not prefix:
        return f'that is vLLM\'s: write {{"speculative_config": {{"{key}": ...}}}}'
    near = nearest(key, known)
    return f"did you mean `{prefix}{near[0]}`?" if near else f"known keys: {', '.join(known)}"


def _build(cls: type, values: Mapping[str, Any], origin: str, prefix: str = "") -> Any:
    """Make a config dataclass from a mapping: unknown keys and wrong types are errors that name the nearest key."""
    known = declared(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key `{prefix}{named(key)}` in `{origin}`", _way_out(key, known, prefix))
        one = known[key]
        if one.nested is not None:
            value = _build_nested(one.nested, value, origin, f"{prefix}{key}")
        elif one.item and one.item.nested and isinstance(value, (list, tuple)):
            value = tuple(_build_nested(one.item.nested, v, origin, f"{prefix}{key}[{i}]") for i, v in enumerate(value))
        elif key != "budget":  # a name or an object: __post_init__ knows both
            one.check_type(prefix + key, value)
        arguments[key] = value
    needed = (f.name for f in fields(cls) if f.default is MISSING is f.default_factory)
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"`{prefix}{missing[0]}` is not given in `{origin}`", "name it")
    return cls(**arguments)


def _build_nested(cls: Any, value: Any, origin: str, name: str) -> Any:
    if isinstance(value, cls):
        return value
    if cls is LearnConfig and isinstance(value, str):
        value = {"mode": value}
    if not isinstance(value, Mapping):
        cause = f"`{name}` is {shown(value)}, of type {type(value).__name__}"
        raise ConfigError(cause, f"give an object with the keys: {', '.join(declared(cls))}")
    return _build(cls, value, origin, f"{name}.")


# --- text: JSON or the path of a JSON file ----------------------------------------------------------------------------


def load_text(text: str, origin: str) -> Any:
    """What the text stands for: true, false, or the JSON's value.

    Args:
        origin: where it came from, for messages.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("1", "true", "on", "yes"):
        return True
    if lowered in ("0", "false", "off", "no"):
        return False
    if not stripped:
        raise ConfigError(f"`{origin}` is empty", "give true, false, a JSON object or a file; or leave it out")
    if stripped.startswith(("{", "[", '"')):
        content, where = stripped, f"`{origin}`"
    elif os.path.isfile(path := os.path.expanduser(stripped)):
        where = f"`{shown_path(path)[1:-1]}`"
        try:
            with open(path, encoding="utf-8") as handle:
                content = handle.read(MOST_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"{where} cannot be read: {said}", "check the file's permissions and encoding") from None
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{where} has more than {MOST_BYTES} characters", "name a file with a JSON object in it")
    elif os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(
            f"`{origin}` is {shown_path(stripped)}, a model's folder",
            "put the model before the flag, as in `vllm serve MODEL --spec-rollout`",
        )
    else:
        raise ConfigError(
            f"`{origin}` is {shown_path(stripped)}: neither a JSON object nor an existing file",
            "give true, false, a JSON object in single quotes, or the path of a JSON file",
        )
    way = 'quote keys and text with ", and put the whole object in single quotes on the command line'
    return load_json(content, where, way)


def load_json(content: str, where: str, way: str) -> Any:
    """The value of a JSON text.

    Args:
        where: what the text is, for messages.
        way: what is suggested where it cannot be read.

    Raises:
        ConfigError: it is no JSON, names a key twice, is nested too deeply or holds a number of thousands of digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ConfigError(f"{where} has the key `{named(twice)}` twice", "give each key once")
        return found

    try:
        return json.loads(content, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at {at}", way) from None
    except ConfigError:
        raise
    except ValueError:
        # Python's own limit, which bounds the time that a number may take
        most = sys.get_int_max_str_digits()
        raise ConfigError(f"{where} holds a number of more than {most} digits", "give a smaller number") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply", "give a JSON object as the reference describes it") from None
