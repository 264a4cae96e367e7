"""Scenarios: a frozen dataclass whose fields become the flags of a command, and what that command does."""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from rich.console import Console

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.errors import ConfigError

from .display import Display
from .engines import Engines, Report
from .models import CACHE, DTYPES, check_length
from .report import Found, Table, as_json, paired, print_all

E = TypeVar("E", bound=Engines)


def flag(
    default: Any,
    help: str,
    *names: str,
    within: tuple[float, float] | None = None,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str, str], Any] | None = None,
    is_default_shown: bool = True,
    is_setting: bool = True,
    is_argument: bool = False,
) -> Any:
    """A field of a scenario, and what it does not say about its flag by itself.

    Args:
        names: instead of the field's name; several stand for the same.
        within: least and most value, of each element where there are several.
        parse: (text, flag) -> value, of what is no plain type; None: by the type.
        is_setting: whether figures depend on it: the report tells it then.
        is_argument: it is given without a flag.
    """
    keys = {"help": help, "names": names, "within": within, "choices": choices, "parse": parse}
    kinds = {"is_default_shown": is_default_shown, "is_setting": is_setting, "is_argument": is_argument}
    metadata = {**keys, **kinds}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Session:
    """What a scenario is given to measure with."""

    display: Display
    # a folder that goes with the session
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of one benchmark, each within its limits, and what it does; `run` does the rest."""

    # in reports
    bench: ClassVar[str]

    out: Path | None = flag(None, "Also write the report to this file.", is_setting=False)

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            known, value = one.metadata, getattr(self, one.name)
            for single in value if isinstance(value, tuple) else (value,):
                if single is not None and known["within"] is not None:
                    cli_flags.in_range(single, _name(one), *known["within"])
                if single is not None and known["choices"] is not None:
                    cli_flags.choice(single, _name(one), known["choices"])

    def resolved(self) -> Scenario:
        """With flags that stand for others put in."""
        return self

    def settings(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.metadata["is_setting"]}

    def check(self) -> None:
        """Refuse what cannot end well, before minutes are spent on it."""
        cli_flags.check_writable(self.out, "--out")

    def measure(self, session: Session) -> Found:
        raise NotImplementedError

    def title(self, found: Found) -> str:
        """The line above what is printed."""
        raise NotImplementedError

    def told(self, found: Found) -> Iterable[Table | str]:
        """What is printed below it; no speed of outputs that are not stock's."""
        return paired(found.rows)

    def show(self, found: Found, out: Console) -> None:
        """Print what was found."""
        print_all([self.title(found), *self.told(found)], out)


@dataclass(frozen=True, kw_only=True)
class EngineScenario(Scenario):
    """One that starts engines."""

    seed: int = flag(0, "Of the first request's noise; the others' follow.", within=(0, 1 << 30))
    dtype: str = flag("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    kv_gib: int = flag(1, "GiB of KV cache of each engine.", is_setting=False)
    cache: Path = flag(CACHE, "Where models are kept.", is_setting=False, is_default_shown=False)
    verbose: bool = flag(False, "Show vLLM's log.", is_setting=False)

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}"

    def make_engines(
        self,
        model: Path,
        report: Report,
        *,
        seqs: int,
        length: int,
        width: int,
        is_eager: bool = True,
        kind: type[E] = Engines,  # type: ignore[assignment]
        **more: Any,
    ) -> E:
        """None started yet; the arguments of `vllm.LLM` are the same for stock and ours.

        Args:
            seqs: requests at once.
            length: most tokens of prompt and answer.
            width: most tokens of one request in one step. No prompt is ever computed in two pieces: with seeds, stock
                vLLM on CPU stops with an error there.
            more: of this kind of engines.
        """
        check_length(model, length)
        arguments = {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": is_eager,
            "max_num_seqs": seqs,
            "max_model_len": length,
            "max_num_batched_tokens": max(2048, seqs * width),
        }
        return kind(arguments, report, kv_gib=self.kv_gib, is_verbose=self.verbose, **more)


@dataclass(frozen=True, kw_only=True)
class RoundsScenario(EngineScenario):
    """One whose engines take turns, round by round."""

    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 1000))


@dataclass(frozen=True, kw_only=True)
class ModelScenario(RoundsScenario):
    """One that runs random weights, or a model that is named."""

    size: str | None = flag(None, "Random weights of this size (default: 150M); or the policy's.", is_setting=False)
    model: Path | None = flag(None, "A model's folder, instead of random weights.", is_setting=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.model is not None:
            raise ConfigError("`--size` and `--model` are both given", "give one: a size is of random weights")


def run(scenario: Scenario) -> None:
    """Check, measure, write, print; ends with status 1 if one output was not stock's, or a check failed."""
    scenario = scenario.resolved()
    scenario.check()
    with Display() as display, tempfile.TemporaryDirectory(prefix="specrollout-") as scratch:
        found = scenario.measure(Session(display, Path(scratch)))
    # first of all: what was measured is kept, whatever fails afterwards
    if scenario.out is not None:
        scenario.out.write_text(as_json(scenario.bench, scenario.settings(), found), encoding="utf-8")
        display.out.print(f"wrote {scenario.out}", markup=False)
    scenario.show(found, display.out)
    if not found.is_passed:
        raise typer.Exit(1)


def command(scenario: type[Scenario], run: Callable[[Any], None] = run) -> Callable[..., None]:
    """A function that typer takes for a command: it makes the scenario from its flags and has it run."""
    # its own first, then what all scenarios have
    own = list(scenario.__annotations__)
    fields = sorted(dataclasses.fields(scenario), key=lambda one: own.index(one.name) if one.name in own else len(own))
    types = typing.get_type_hints(scenario)
    parsers = {one.name: parse for one in fields if (parse := _parser(one, types[one.name])) is not None}

    def execute(**values: Any) -> None:
        for one in fields:
            if one.name in parsers:
                values[one.name] = parsers[one.name](values[one.name], _name(one))
        run(scenario(**values))

    parameters = []
    for one in fields:
        known, kind = one.metadata, types[one.name]
        default = one.default if one.default is not dataclasses.MISSING else one.default_factory()  # type: ignore[misc]
        if one.name in parsers:
            kind, default = str, _as_text(default)
        names = known["names"] or (_name(one),)
        option: Any = typer.Option(*names, help=known["help"], show_default=known["is_default_shown"])
        if known["is_argument"]:
            option = typer.Argument(metavar=one.name.upper(), help=known["help"], show_default=False)
        more = {"default": default, "annotation": Annotated[kind, option]}
        parameters.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, **more))
    execute.__name__ = f"bench_{scenario.bench}"
    execute.__doc__ = (inspect.getdoc(scenario) or "").partition("\n\n")[0]
    execute.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    execute.__annotations__ = {one.name: one.annotation for one in parameters}
    return execute


def _name(one: dataclasses.Field[Any]) -> str:
    """The flag as a user writes it: of `--on/--off`, the first."""
    names: tuple[str, ...] = one.metadata["names"] or ("--" + one.name.replace("_", "-"),)
    return names[0].partition("/")[0]


def _parser(one: dataclasses.Field[Any], kind: Any) -> Callable[[str, str], Any] | None:
    """(text, flag) -> value, where the flag is a text that becomes something else."""
    parse, within, origin = one.metadata["parse"], one.metadata["within"], typing.get_origin(kind)
    if parse is not None or origin not in (tuple, dict):
        return typing.cast("Callable[[str, str], Any] | None", parse)
    if origin is dict:
        return cli_flags.json_object
    if typing.get_args(kind)[0] is int and within is not None:
        return lambda text, name: cli_flags.integers(text, name, *within)
    return lambda text, name: cli_flags.names(text, name, one.metadata["choices"] or ())


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(f"{part:g}" if isinstance(part, (int, float)) else str(part) for part in value)
    return value
