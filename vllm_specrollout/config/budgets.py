"""Settings of each budget; part of the configuration (engine.py). stdlib only.

What belongs here: one dataclass per budget, and what a published system says of its drafter. A default is the paper's
where the paper gives one. `config.parse` lays `DRAFTER_DEFAULTS` under what the user gave: it never outranks a key that
the user set. Keys that do not fit together are refused as if the user had set them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from vllm_specrollout.config import by_name
from vllm_specrollout.config.checks import Range, check_fields, declared
from vllm_specrollout.errors import ConfigError, named, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """Nothing can be set for most budgets."""

    def __post_init__(self) -> None:
        check_fields(self, "budget.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastGrpoOptions(BudgetOptions):
    """The `fastgrpo` budget (FastGRPO, section 4.1 and appendix B). The text gives no number."""

    c_peak: Annotated[int, Range(0, 1 << 16)] = 0
    """Equation 1: rows of a step from which on its time begins to grow obviously; 0: measured while the engine runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TltOptions(BudgetOptions):
    """The `tlt` budget (TLT, section 5)."""

    threshold: Annotated[int, Range(1, 1 << 16)] = 32
    """Batches of so many running requests or more decode plainly (5.1)."""
    top_k: Annotated[int, Range(1, 64)] = 8
    """Most nodes of a level that are expanded, and most children of each (Table 4); all strategies share it (6.3)."""
    depth: Annotated[int, Range(1, 64)] = 10
    """Levels of the deepest strategy (Table 4); the others have a half and a quarter of it."""
    noise: bool = False
    """Whether a head's nodes are scored with the target's noise, and not by its own probabilities alone (5.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecActorOptions(BudgetOptions):
    """The `specactor` budget (SpecActor, section 4.1), in its coupled form."""

    draft_ms: Annotated[float, Range(0.0, 10_000.0)] = 0.0
    """D: milliseconds per drafted token and step, for the whole batch; 0 where drafts are looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptions(BudgetOptions):
    """Of a class of the user's, whose constructor says what they are."""

    values: Mapping[str, Any] = field(default_factory=dict)


OPTIONS: Mapping[str, type[BudgetOptions]] = {
    "auto": BudgetOptions,
    "fixed": BudgetOptions,
    "off": BudgetOptions,
    "histospec": BudgetOptions,
    "das": BudgetOptions,
    "fastgrpo": FastGrpoOptions,
    "tlt": TltOptions,
    "specactor": SpecActorOptions,
}
"""Every budget there is, and what can be set for it."""

DRAFTER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # RhymeRL, 5.3: the branch of the largest sum of rewards, so that one reward outweighs 255 answers without any
    "histospec": {
        "drafters": ["history"],
        "max_draft_tokens": 32,
        "max_depth": 32,
        "history": {"min_match": 3, "max_match": 7, "epochs": 1, "siblings": False, "reward_weight": 255.0},
    },
    "das": {
        "drafters": ["history"],
        "history": {"epochs": 2, "siblings": False, "decay": 1.0, "reward_weight": 0.0},
    },
}
"""Budget -> configuration that it brings for keys left unset; the others' drafters are trained, and not here."""


def with_drafter_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as the user gave it, with what its budget brings for keys that are not in it."""
    budget = given.get("budget")
    name = budget.get("name") if isinstance(budget, Mapping) else budget
    brought = DRAFTER_DEFAULTS.get(name, {}) if isinstance(name, str) else {}
    merged = {**brought, **given}
    drafters = merged.get("drafters")
    for key, values in brought.items():
        if not isinstance(values, Mapping):
            continue
        if isinstance(given.get(key), Mapping):
            merged[key] = {**values, **given[key]}
        elif key not in given and isinstance(drafters, (list, tuple)) and key not in drafters:
            # the user chose other drafters: these settings have nothing to hold for
            del merged[key]
    return merged


def name_and_options(budget: Any, options: BudgetOptions) -> tuple[str, BudgetOptions]:
    """A budget's name and its options, from what stands under `budget`.

    Args:
        budget: a name, or an object with `name` and options.
        options: holds where `budget` is the name of the budget that these are for.

    Raises:
        ConfigError: no such budget, no such option of it, or a value that cannot be.
    """
    if isinstance(budget, Mapping):
        return _from_object(budget)
    if not isinstance(budget, str):
        raise ConfigError(
            f"`budget` is {shown(budget)}, of type {type(budget).__name__}",
            'give a name, or an object such as {"name": "tlt", "threshold": 48}',
        )
    by_name.check_name("budget", budget, tuple(OPTIONS))
    kind = OPTIONS.get(budget, NamedOptions)
    return budget, options if type(options) is kind else kind()


def as_given(name: str, options: BudgetOptions) -> str | dict[str, Any]:
    """What `name_and_options` takes for these: the name alone where all options have their defaults."""
    values = options.values if isinstance(options, NamedOptions) else dataclasses.asdict(options)
    return name if options == type(options)() else {"name": name, **values}


def _from_object(given: Mapping[str, Any]) -> tuple[str, BudgetOptions]:
    name = given.get("name")
    if name is None:
        raise ConfigError(
            f"`budget` is {shown(dict(given))}, which has no `name`", f"add `name`, one of: {', '.join(OPTIONS)}"
        )
    by_name.check_name("budget.name", name, tuple(OPTIONS))
    values = {key: value for key, value in given.items() if key != "name"}
    if name not in OPTIONS:
        return name, NamedOptions(values=values)
    known = {field.name: field for field in dataclasses.fields(OPTIONS[name])}
    for key, value in values.items():
        if key not in known:
            has = ", ".join(f"`{k}` ({f.default})" for k, f in known.items())
            way = f"it has: {has}" if has else f'it has none: give "budget": "{name}"'
            raise ConfigError(
                f"`budget.{named(key)}` is {shown(value)}, but the budget `{name}` has no such option", way
            )
        declared(OPTIONS[name])[key].check_type(f"budget.{key}", value)
    return name, OPTIONS[name](**values)
