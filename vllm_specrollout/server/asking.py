"""Conversations with a running engine: calls of one method of all its workers, whether its client is called or awaited.

A conversation is a generator that yields calls and is sent their answers, so that it is written once for engines that
are called (`LLM`, `LLMEngine`) and for engines that are awaited (`AsyncLLM`). Nothing here imports vLLM.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_specrollout.errors import ConfigError, UnsupportedError

_SETTINGS = "spec_rollout"  # our entry in vLLM's `additional_config`
_OFF = "spec rollout is off in this engine"

P = ParamSpec("P")
T = TypeVar("T")
# [engines][workers] what each worker answered
Answers = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One method of all workers, and its arguments."""

    method: str
    args: tuple[Any, ...] = ()


Check = Callable[[Any], None]
Conversation = Generator[Call, Answers, T]


def both(
    name: str, converse: Callable[P, Conversation[T]], check: Check
) -> tuple[Callable[Concatenate[Any, P], T], Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]]:
    """A conversation as two functions: of an engine that is called, and, with an `a` before its name, of one awaited.

    Args:
        name: of the first of them.
        converse: the conversation, of what they take behind the engine.
        check: refuses an engine that has not what the conversation is about.
    """

    def called(llm: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return ask(llm, converse(*args, **kwargs), check)

    async def awaited(llm: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await aask(llm, converse(*args, **kwargs), check)

    taken = inspect.signature(converse)
    engine = inspect.Parameter("llm", inspect.Parameter.POSITIONAL_ONLY)
    shown = taken.replace(parameters=[engine, *taken.parameters.values()])
    twins: tuple[tuple[str, Any], ...] = ((name, called), (f"a{name}", awaited))
    for own, function in twins:
        function.__name__ = function.__qualname__ = own
        function.__module__, function.__doc__ = converse.__module__, converse.__doc__
        function.__signature__ = shown
    return called, awaited


def ask(engine: Any, conversation: Conversation[T], check: Check) -> T:
    """Lead a conversation with an engine that is called.

    Raises:
        ConfigError: it is no such engine.
        UnsupportedError: it is refused.
    """
    _check(engine, check, is_async=False)
    answers: Any = None
    while True:
        try:
            call = conversation.send(answers)
        except StopIteration as end:
            return end.value
        answers = [engine.collective_rpc(call.method, args=call.args)]


async def aask(engine: Any, conversation: Conversation[T], check: Check) -> T:
    """Lead a conversation with an engine that is awaited, or with all of them behind its client.

    Raises:
        as `ask`.
    """
    _check(engine, check, is_async=True)
    client: Any = getattr(engine, "engine_core", None)
    # data parallel: `AsyncLLM.collective_rpc` reaches every engine, but returns the first one's answers alone
    has_several = len(getattr(client, "core_engines", ())) > 1
    answers: Any = None
    while True:
        try:
            call = conversation.send(answers)
        except StopIteration as end:
            return end.value
        if has_several:
            answers = await client.call_utility_all_async("collective_rpc", call.method, None, call.args, None)
        else:
            answers = [await engine.collective_rpc(call.method, args=call.args)]


def _check(engine: Any, check: Check, *, is_async: bool) -> None:
    rpc = getattr(engine, "collective_rpc", None)
    if not callable(rpc):
        raise ConfigError(
            f"the engine is a {type(engine).__name__}, which has no `collective_rpc`",
            "give the `LLM`, `LLMEngine` or `AsyncLLM`",
        )
    if inspect.iscoroutinefunction(rpc) != is_async:
        name = type(engine).__name__
        if is_async:
            way = "use `report_rewards`, `begin_epoch`, `read_history` or `load_drafter`"
            raise ConfigError(f"the engine is a {name}, which is called, not awaited", way)
        way = "await `areport_rewards`, `abegin_epoch`, `aread_history` or `aload_drafter`"
        raise ConfigError(f"the engine is a {name}, which is awaited, not called", way)
    check(engine)


def check_keeps_history(engine: Any) -> None:
    """Refuse an engine whose configuration says that it keeps no history; one that hides its configuration passes.

    Raises:
        UnsupportedError: spec rollout is off, or has no `history` drafter.
    """
    settings = _settings(engine)
    if settings is None:
        return
    if not settings:
        raise UnsupportedError(_OFF, 'start it with --spec-rollout \'{"drafters": ["history", "ngram"]}\'')
    drafters = list(settings.get("drafters", ()))
    if "history" not in drafters:
        raise UnsupportedError(
            f"this engine keeps no history; its drafters are {json.dumps(drafters)}",
            f"start it with --spec-rollout '{json.dumps({'drafters': ['history', *drafters]})}'",
        )


def recording(engine: Any, number: int) -> Path:
    """The file into which an engine records its rollout.

    Args:
        number: of several engines behind one client, which.

    Raises:
        UnsupportedError: it records none.
    """
    check_is_on(engine)
    path = (_settings(engine) or {}).get("record")
    if not path:
        raise UnsupportedError("this engine records no rollout", 'start it with --spec-rollout \'{"record": "FILE"}\'')
    from vllm_specrollout.replay.files import recorded_by  # numpy: not when the plugin is registered

    own = recorded_by(Path(path), number)
    # a data-parallel engine has a file of its own
    found = own if own.exists() or number else Path(path)
    if not found.is_file():
        raise UnsupportedError(
            f"there is no recording of engine {number}", "is it on another node? Read the file there"
        )
    return found


def check_is_on(engine: Any) -> None:
    """Refuse an engine whose configuration says that spec rollout is off.

    Raises:
        UnsupportedError: it is.
    """
    settings = _settings(engine)
    if settings is not None and not settings:
        raise UnsupportedError(_OFF, "start it with --spec-rollout")


def check_has_model(engine: Any) -> None:
    """Refuse an engine whose configuration names no model that drafts; one that hides its configuration passes.

    Raises:
        UnsupportedError: spec rollout is off, or has no `speculative_config`.
    """
    settings = _settings(engine)
    if settings is not None and not settings.get("speculative_config"):
        cause = "no model drafts in this engine" if settings else _OFF
        raise UnsupportedError(cause, "start it with --spec-rollout and --speculative-config")


def _settings(engine: Any) -> Mapping[str, Any] | None:
    """Our configuration in an engine; empty: spec rollout is off; None: the engine does not show its configuration."""
    vllm_config = getattr(getattr(engine, "llm_engine", engine), "vllm_config", None)
    if vllm_config is None:
        return None
    given = getattr(vllm_config, "additional_config", None)
    settings = given.get(_SETTINGS) if isinstance(given, Mapping) else None
    return settings or {}
