"""What a scenario is, and how its fields become the flags of a command.

A flag's name, type and default are its field's, its help is the text below the field, and its limits stand beside the
default. What belongs here: nothing that runs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console

from vllm_specrollout import cli_flags
from vllm_specrollout.errors import ConfigError

from .display import Display
from .models import CACHE, DTYPES
from .report import Found

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What a field does not say about its flag."""

    # instead of the field's name; several stand for the same
    names: tuple[str, ...] = ()
    # least and most value, of each element where there are several
    within: tuple[float, float] | None = None
    choices: tuple[str, ...] | None = None
    # (text, flag) -> value, of what is no plain type; None: by the type
    parse: Callable[[str, str], Any] | None = None
    is_default_shown: bool = True
    # whether figures depend on it: the report tells it then
    is_setting: bool = True


def flag(default: Any, *names: str, **more: Any) -> Any:
    """A field of a scenario; arguments are those of `Flag`."""
    metadata = {"flag": Flag(names=names, **more)}
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
    """The settings of one benchmark, and what it does; `runner.run` does the rest.

    Raises:
        ConfigError: a value outside its limits.
    """

    # in reports
    bench: ClassVar[str]
    # whether rows whose outputs are stock's are drawn beside others whose are not
    draws_what_is_left: ClassVar[bool] = False

    json: Path | None = flag(None, is_setting=False)
    """Also write the report to this file."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            known, value = of(one), getattr(self, one.name)
            for single in value if isinstance(value, tuple) else (value,):
                if single is None:
                    continue
                if known.within is not None:
                    cli_flags.in_range(single, name_of(one), *known.within)
                if known.choices is not None:
                    cli_flags.choice(single, name_of(one), known.choices)

    def resolved(self) -> Scenario:
        """With flags that stand for others put in."""
        return self

    def settings(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if of(one).is_setting}

    def check(self) -> None:
        """Refuse what cannot end well, before minutes are spent on it.

        Raises:
            ConfigError: a file that could not be written.
        """
        cli_flags.check_writable(self.json, "--json")

    def measure(self, session: Session) -> Found:
        raise NotImplementedError

    def show(self, found: Found, out: Console) -> None:
        """Print what was found; no speed of outputs that are not stock's."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class EngineScenario(Scenario):
    """One that starts engines."""

    seed: int = flag(0, within=(0, 1 << 30))
    """Of the first request's noise; the others' follow."""
    dtype: str = flag("bfloat16", choices=DTYPES)
    """bfloat16 or float32."""
    kv_gib: int = flag(1, is_setting=False)
    """GiB of KV cache of each engine."""
    cache: Path = flag(CACHE, is_setting=False, is_default_shown=False)
    """Where models are kept."""
    verbose: bool = flag(False, is_setting=False)
    """Show vLLM's log."""

    def arguments(self, model: Path, *, seqs: int, length: int, width: int, is_eager: bool = True) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for stock and ours.

        Args:
            seqs: requests at once.
            length: most tokens of prompt and answer.
            width: most tokens of one request in one step. No prompt is ever computed in two pieces: with seeds, stock
                vLLM on CPU stops with an error there.
        """
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": is_eager,
            "max_num_seqs": seqs,
            "max_model_len": length,
            "max_num_batched_tokens": max(2048, seqs * width),
        }


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be drawn.

    Raises:
        ConfigError: its folder does not exist, or nothing draws its kind.
        UnsupportedError: matplotlib is not installed.
    """
    from .plots import check_matplotlib

    if path is None:
        return
    cli_flags.check_writable(path, "--plot")
    if path.suffix not in PICTURES:
        raise ConfigError(f"`--plot` is `{path}`, of a kind that cannot be drawn", "end it in .png, .svg or .pdf")
    check_matplotlib()


def of(one: dataclasses.Field[Any]) -> Flag:
    return one.metadata.get("flag") or Flag()


def name_of(one: dataclasses.Field[Any]) -> str:
    """The flag as a user writes it."""
    names = of(one).names or ("--" + one.name.replace("_", "-"),)
    return names[0].partition("/")[0]


def command(scenario: type[Scenario], run: Callable[[Any], None]) -> Callable[..., None]:
    """A function that typer takes for a command: it makes the scenario from its flags and has it run.

    Raises (when called):
        ConfigError: a flag that makes no sense.
    """
    # its own first, then what all scenarios have
    places = {name: place for place, name in enumerate(scenario.__annotations__)}
    fields = sorted(dataclasses.fields(scenario), key=lambda one: places.get(one.name, len(places)))
    types, texts = typing.get_type_hints(scenario), field_texts(scenario)

    def execute(**given: Any) -> None:
        run(scenario(**{one.name: _value(one, types[one.name], given[one.name]) for one in fields}))

    parameters = []
    for one in fields:
        known, default = of(one), _default(one)
        plain = str if _is_text(one, types[one.name]) else types[one.name]
        names = known.names or ("--" + one.name.replace("_", "-"),)
        option = typer.Option(*names, help=texts.get(one.name), show_default=known.is_default_shown)
        shown = _as_text(default) if _is_text(one, types[one.name]) else default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one.name, kind, default=shown, annotation=Annotated[plain, option]))
    execute.__name__ = f"bench_{scenario.bench}"
    execute.__doc__ = (inspect.getdoc(scenario) or "").partition("\n\n")[0]
    execute.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    execute.__annotations__ = {one.name: one.annotation for one in parameters}
    return execute


def field_texts(scenario: type) -> dict[str, str]:
    """The text below each field, inherited ones too: Python keeps it in the source alone."""
    found: dict[str, str] = {}
    for cls in reversed([one for one in scenario.__mro__ if dataclasses.is_dataclass(one)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for node, after in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default is not dataclasses.MISSING else one.default_factory()  # type: ignore[misc]


def _is_text(one: dataclasses.Field[Any], kind: Any) -> bool:
    """Whether the flag is a text that becomes something else."""
    return of(one).parse is not None or typing.get_origin(kind) in (tuple, dict)


def _value(one: dataclasses.Field[Any], kind: Any, given: Any) -> Any:
    if not _is_text(one, kind) or given is None:
        return given
    known, name = of(one), name_of(one)
    if known.parse is not None:
        return known.parse(given, name)
    if typing.get_origin(kind) is dict:
        return cli_flags.json_object(given, name)
    if typing.get_args(kind)[0] is int and known.within is not None:
        return cli_flags.integers(given, name, int(known.within[0]), int(known.within[1]))
    return cli_flags.names(given, name, known.choices or ())


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(f"{part:g}" if isinstance(part, (int, float)) else part for part in value)
    return value
