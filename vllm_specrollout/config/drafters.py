"""Settings of each drafter, and of what heads are trained on; part of the configuration (engine.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from vllm_specrollout.config import by_name
from vllm_specrollout.config.checks import (
    DEVICE,
    FILE,
    NAME,
    Choice,
    Range,
    check_address,
    check_fields,
    check_order,
)
from vllm_specrollout.config.devices import together
from vllm_specrollout.errors import ConfigError, shown

MAX_MATCHES = 32
"""Earlier places compared per context length, at most."""
SINGLE = "drafter"
"""Name of the decoupled drafter of `speculative_config`."""
DRAFTERS = ("history", "ngram")
"""Those of ours that are asked in the step; others are classes of the user's, by their qualified names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """The `ngram` drafter: looks the last tokens up in the request's own prompt and output."""

    max_match: Annotated[int, Range(1, 64)] = 8
    """Longest context looked up, in tokens."""
    min_match: Annotated[int, Range(1, 64)] = 1
    """Shortest context that may draft, in tokens."""

    def __post_init__(self) -> None:
        check_fields(self, "ngram.")
        check_order(self, "ngram.", "min_match", "max_match")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """The `history` drafter: looks the last tokens up in earlier answers to the same problem."""

    dir: Annotated[str, FILE] = ""
    """Directory that keeps the answers across restarts; empty: they are kept in memory only."""
    url: str = ""
    """Where `specrollout history serve` listens, as it prints it: answers of engines on other nodes draft as well.
    Needs `dir`, one folder for all engines of a node; what comes takes at most `max_disk_mib` more."""
    key_file: Annotated[str, FILE] = ""
    """File with the archive's key, which `serve` makes; empty: `SPECROLLOUT_KEY` has it, or its path."""
    run: Annotated[str, NAME] = ""
    """Name of the training run, the same on all its nodes: epochs are compared within one run alone. Empty: one is
    drawn for each `dir`, and newest answers from elsewhere count as those of the last epoch."""
    epochs: Annotated[int, Range(0, 1024)] = 2
    """How many past epochs' answers draft, the running epoch not counted; 0: only this epoch's siblings do."""
    siblings: bool = True
    """Whether other samples of the same problem, running or done in this epoch, draft too."""
    min_match: Annotated[int, Range(1, 64)] = 1
    """Shortest context that may draft, in tokens."""
    max_match: Annotated[int, Range(1, 64)] = 7
    """Longest context looked up, in tokens."""
    decay: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Weight of an answer relative to one of the epoch after it."""
    reward_weight: Annotated[float, Range(0.0, 1024.0)] = 1.0
    """How much a reward of 1 adds to an answer's weight of 1; 0: rewards do not count. Negative rewards count as 0."""
    max_mib: Annotated[int, Range(1, 1 << 20)] = 1024
    """Memory for indices, in MiB; beyond it, those of the problems asked for least recently are dropped. Answers have
    the same limit: in memory so much of them, and of this engine 768 for each MiB; beyond it the oldest are dropped."""
    max_disk_mib: Annotated[int, Range(1, 1 << 30)] = 16384
    """Disk for the files of `dir` that this engine writes or finds without an engine, in MiB; beyond it, the oldest
    answers are dropped. Half of it is for this engine's own file. Files of another vocabulary are left out, with one
    warning."""

    def __post_init__(self) -> None:
        check_fields(self, "history.")
        if not self.epochs and not self.siblings:
            cause = "`history.epochs` is 0 and `history.siblings` is false, so that no answer may draft"
            raise ConfigError(cause, "allow one of them, or leave `history` out of `drafters`")
        check_address("history.url", self.url)
        if self.url and not self.dir:
            cause = "`history.url` is given, and `history.dir` is not"
            raise ConfigError(cause, "name a folder on a local disk in `history.dir`, for what comes from other nodes")
        check_order(self, "history.", "min_match", "max_match")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnConfig:
    """How the head that drafts goes on learning. See docs/guides/train-head.md."""

    mode: Annotated[str, Choice(("off", "auto"))] = "off"
    """`auto`: a trainer beside the engine keeps the head true to the policy; without a head in `speculative_config`, it
    makes one. `{"train": "auto"}` is short for it. `off`: the engine computes hidden states for who asks."""
    dir: Annotated[str, FILE] = ""
    """Folder for heads and the trainer's state; engines that share it have one trainer. Empty: one in the cache, by the
    target and the first head."""
    devices: tuple[Annotated[str, DEVICE], ...] = ()
    """What the trainer runs on, such as `cpu:3` or `cuda:1`; empty: the engine's own, while that idles."""
    memory_gib: Annotated[float, Range(0.01, 4096.0)] = 4.0
    """Memory of the trainer: of hidden states, and on the engine's GPU of all that it has there, which is taken off
    `gpu_memory_utilization`."""
    prefill_tokens: Annotated[int, Range(1, 1 << 20)] = 2048
    """Most tokens of answers that a step computes once more. Such steps are taken only while no request is there, and
    one that arrives waits for the step under way."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        together("train.devices", self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedDrafter:
    """A drafter that the engine begins in a process of its own."""

    model: str
    """The model that drafts: a folder or a name."""
    name: str = ""
    """What it is called, where drafters are attached and detached; empty: its place in the list, as `drafter-1`."""
    devices: tuple[Annotated[str, DEVICE], ...] = ()
    """What it runs on: CPU cores such as `cpu:1` or `cpu:2-3`, or GPUs such as `cuda:1`; empty: all cores."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine in that process."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model:
            raise ConfigError("a drafter of `decoupled.drafters` has an empty `model`", "name a folder or a model")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledConfig:
    """Models that draft in processes of their own, ahead of the target. See docs/concepts/decoupled.md."""

    drafters: tuple[StartedDrafter, ...] = ()
    """Drafters that the engine begins beside that of `speculative_config`, as `{"model": SMALL, "devices": ["cpu:1"]}`;
    further keys: `name` and `engine_args`. Others can be attached while it runs."""

    window: Annotated[int, Range(0, 64)] = 0
    """Tokens of a draft window: the drafter is two of them ahead at most. 0: as what is known of the drafter says
    (docs/concepts/planning.md), and 4 where nothing is."""
    fan_out: Annotated[int, Range(1, 8)] = 4
    """Tokens that it sends for each position: the one that it goes on from, and alternatives."""
    address: str = ""
    """Where a `specrollout drafter` listens that was started by hand, as it prints it: `ipc://PATH` or
    `tcp://HOST:PORT`; empty: the engine starts one of its own, and stops it."""
    key_file: Annotated[str, FILE] = ""
    """File with the key of drafters behind tcp, which each makes; empty: `SPECROLLOUT_KEY` has it, or its path."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine in that process, such as `{"dtype": "bfloat16"}`."""

    def __post_init__(self) -> None:
        check_fields(self, "decoupled.")
        named = (replace(drafter, name=drafter.name or f"drafter-{i}") for i, drafter in enumerate(self.drafters, 1))
        object.__setattr__(self, "drafters", tuple(named))
        names = [drafter.name for drafter in self.drafters]
        if len({*names, SINGLE}) <= len(names):
            cause = f"`decoupled.drafters` are called {shown(names)}"
            raise ConfigError(cause, f"give each a name of its own, and none `{SINGLE}`, which is in use")
        check_address("decoupled.address", self.address)


def names_and_options(
    drafters: Any, options: Mapping[str, Mapping[str, Any]]
) -> tuple[Any, dict[str, Mapping[str, Any]]]:
    """The names of drafters, and the options of those that have any, from what stands under `drafters`.

    Args:
        drafters: each a name, or an object with `name` and options.
        options: hold for those that are given as a name.

    Raises:
        ConfigError: an object without a name, or options beside the name of one of ours.
    """
    if not isinstance(drafters, Sequence) or isinstance(drafters, str):
        return drafters, {}  # its type is checked with all others
    names: list[str] = []
    found: dict[str, Mapping[str, Any]] = {}
    for one in drafters:
        given = dict(one) if isinstance(one, Mapping) else {"name": one, **options.get(str(one), {})}
        name = given.pop("name", None)
        check_drafter("drafters", name)
        if given and not by_name.is_qualified(name):
            cause = f"`drafters` gives `{name}` options beside its name"
            raise ConfigError(cause, f'write them under its own key, as in {{"{name}": {{"min_match": 2}}}}')
        names.append(name)
        if given:
            found[name] = given
    return tuple(names), found


def drafters_as_given(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """What `names_and_options` takes for these."""
    return [{"name": name, **options[name]} if name in options else name for name in names]


def check_drafter(key: str, value: Any) -> str:
    """A name of ours, or one of a class."""
    by_name.check_name(key, value, DRAFTERS)
    return str(value)
