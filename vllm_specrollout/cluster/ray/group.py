"""Group of engines on Ray that share batches, and help each other at their ends: what a trainer's driver holds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from vllm_specrollout.cluster.batch import Answer, GroupError, RequestChecker
from vllm_specrollout.cluster.driver import BEAT_S, BEHIND, Driver
from vllm_specrollout.cluster.ladder import LADDERS, Rules
from vllm_specrollout.cluster.planner import choose_ladder
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.ray.placement import Needs, Placement
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.config.devices import Devices, check_apart, parse_devices
from vllm_specrollout.errors import ConfigError, SpecRolloutError

logger = logging.getLogger("vllm.specrollout")

REPLICA = "vllm_specrollout.server.replica:Replica"
AUTO = "auto"
_END_S = 10.0

__all__ = ["Answer", "GroupError", "SpecGroup"]


class Calls:
    """Calls of actors that are in flight (`driver.Lines`)."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = actors
        # call -> (engine, method, what to do with what comes back)
        self._open: dict[Any, tuple[str, str, Callable[[Any], None]]] = {}

    def call(self, engine: str, then: Callable[[Any], None], method: str, *args: Any) -> None:
        self._open[self.send(engine, method, *args)] = (engine, method, then)

    def send(self, engine: str, method: str, *args: Any) -> Any:
        actor = self._actors[engine]
        return actor.admit.remote(*args) if method == "admit" else actor.ask.remote(method, *args)

    def take(self, wait_s: float, driver: Driver) -> None:
        """Wait for what comes first, and have the driver take it in."""
        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=wait_s)
        for ref in ready:
            engine, method, then = self._open.pop(ref)
            try:
                found = _get(ref)
            except RayActorError as error:
                self._open = {one: own for one, own in self._open.items() if own[0] != engine}
                driver.lose(engine, _said(error))
            except SpecRolloutError as error:
                if method != "admit":
                    raise
                driver.refuse(engine, error)
            else:
                then(found)


class SpecGroup:
    """Engines that share each batch. Use it as a context, or call `close`.

    Ray places them. Where no Ray runs (`RAY_ADDRESS` is not set), it is started on this host and ends with the group.

    Args:
        model: folder or name.
        engines: how many.
        ladder: `off`; `move`: an idle engine takes over requests where that pays; `attach`: else its drafter drafts
            for the stragglers' engines.
        drafters: models that draft, warm beside each engine; of several, the engines have one in turns. `auto` chooses
            them and the ladder by what engines like these have measured (`planner.choose_ladder`).
        engine: further arguments of vLLM's engine; `max_num_seqs` is the most requests that one runs at once.
        spec_rollout: drafting, as `LLM` takes it.
        devices: of each engine, as `["cuda:0,1", "cuda:2,3"]` or `["cpu:0-3", "cpu:4-7"]`; unset: Ray's to choose where
            it has GPUs, and equal shares of the cores where it has none.
        drafter_devices: of each engine's drafter; unset: the engine's cores, or one more GPU of Ray's.
        gpus, cpus: of each engine that Ray counts; `gpus` unset: one for each rank where Ray has GPUs.
        drafter_engine: arguments of the drafters' engines.
        most: requests of others that one engine helps with.
        patience_s: seconds without a word after which an engine is begun anew, and others get its requests.
        start_s: seconds that the engines may take to start.
        max_restarts: times that one engine is begun anew.
        seed: of the seeds that requests without one get.

    Raises:
        ConfigError: something cannot be used.
        GroupError: no engine started.
    """

    def __init__(
        self,
        model: str,
        *,
        engines: int = 2,
        ladder: str = "off",
        drafters: Sequence[str] | str = (),
        engine: Mapping[str, Any] | None = None,
        spec_rollout: bool | Mapping[str, Any] = True,
        devices: Sequence[str] | None = None,
        drafter_devices: Sequence[str] | None = None,
        gpus: float | None = None,
        cpus: float = 1.0,
        drafter_engine: Mapping[str, Any] | None = None,
        most: int = 4,
        patience_s: float = 120.0,
        start_s: float = 900.0,
        max_restarts: int = 2,
        seed: int = 0,
    ) -> None:
        is_auto = drafters == AUTO
        models = () if is_auto else drafters
        _check(engines, ladder, models, spec_rollout, most, is_auto=is_auto)
        for name, value in (("patience_s", patience_s), ("start_s", start_s)):
            check_range(name, value, 1.0, 86400.0)
        places, beside = _both_places(devices, drafter_devices, engines)
        has_drafters = is_auto or bool(models)
        if has_drafters:
            # an engine takes no drafters otherwise
            given = dict(spec_rollout) if isinstance(spec_rollout, Mapping) else {}
            spec_rollout = {"placement": "decoupled"} | given
        arguments = {**(engine or {}), "model": model, "spec_rollout": spec_rollout}
        needs = Needs(
            *(REPLICA, arguments, drafter_engine or {}, engines, has_drafters, places, beside),
            *(gpus, cpus, max_restarts),
        )
        self._asking, self._patience_s = RequestChecker(seed), patience_s
        self._next, self._lock = threading.Lock(), threading.RLock()
        self._placement = Placement(needs)
        try:
            self._begin(Rules(ladder, most), models, start_s, is_auto=is_auto)
        except BaseException:
            self._placement.close()
            raise

    def _begin(self, rules: Rules, models: Sequence[str], start_s: float, *, is_auto: bool) -> None:
        """Wait for the engines, and have them begin the drafters that are to help."""
        self._calls = Calls(self._placement.actors)
        self._driver = Driver(self._calls, list(self._placement.actors), rules)
        self._driver.equip(rules, models)
        self._placement.wait(start_s)
        self._await_all(start_s)
        if is_auto:
            ladder, models = choose_ladder(self._profiles())
            self._driver.equip(Rules(ladder, rules.most), models)

    # --- what a trainer calls -----------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[str | Sequence[int]], params: Any) -> list[Answer]:
        """Answer all prompts.

        Args:
            prompts: [R] token ids, or texts.
            params: `SamplingParams` or its arguments, for all prompts or [R] one for each. `n` is 1. `logprobs` is
                unset, or 0 for those of the tokens themselves.

        Returns:
            [R] the answers, in the prompts' order.

        Raises:
            ConfigError: prompts or parameters that cannot be used.
            GroupError: an engine refused a request, or none is left.
        """
        found = dict(self.stream(prompts, params))
        return [found[i] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[str | Sequence[int]], params: Any, *, step: int | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """(index of its prompt, answer) of each, as they end. As `generate`; several may go on at once."""
        if self._driver.wanted.asleep:
            raise GroupError("the group sleeps", "call `wake` before it is to answer")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._ask("encode", texts)[0] if texts else ())
        asked = self._asking.ask([next(encoded) if isinstance(one, str) else one for one in prompts], params)
        places = {request: i for i, request in enumerate(asked)}
        with self._turnstile():
            self._driver.add(asked)
        try:
            while places:
                ended = self._turn(places)
                for request, answer in ended.items():
                    yield places.pop(request), answer
        finally:
            with self._turnstile():
                self._driver.drop(places)  # after an error, or given up: what runs is of no use

    async def agenerate(
        self, prompts: Sequence[str | Sequence[int]], params: Any, *, step: int | None = None
    ) -> list[Answer]:
        """As `generate`, for a driver that goes on meanwhile."""
        return await asyncio.to_thread(self.generate, prompts, params)

    async def astream(
        self, prompts: Sequence[str | Sequence[int]], params: Any, *, step: int | None = None
    ) -> AsyncIterator[tuple[int, Answer]]:
        """As `stream`."""
        answers = self.stream(prompts, params)
        over = object()
        try:
            while (found := await asyncio.to_thread(next, answers, over)) is not over:
                yield found  # type: ignore[misc]
        finally:
            await asyncio.to_thread(answers.close)  # type: ignore[attr-defined]

    def update_weights(self, method: str = "reload_weights", **kwargs: Any) -> int:
        """New weights for all, by a method of vLLM's workers; returns the weights' version.

        An engine that is down gets them before it gets a request. What runs goes on with the new weights, behind the
        tokens that have come; `Answer.versions` says which weights gave which token.
        """
        with self._turnstile():
            return self._bring(update=(self._driver.wanted.version + 1, method, kwargs))

    def begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch's number: by default one that no engine has begun.

        An engine begins an epoch by itself where a problem comes back; so their numbers may differ before.
        """
        if epoch is None:
            histories = [own for engine in self._ask("rpc", "spec_rollout_history", [], {}) for own in engine]
            begun = [own["store"]["epoch"] for own in histories if own]
            epoch = max(begun, default=self._driver.wanted.epoch or 0) + 1
        with self._turnstile():
            self._bring(epoch=epoch)
        return epoch

    def report_rewards(self, rewards: Mapping[str, float]) -> int:
        """By `Answer.request`, finite numbers; how many some engine knew."""
        return sum(self._ask("rewards", dict(rewards)))

    def sleep(self, level: int = 1) -> None:
        """Give the engines' memory back, as vLLM's `sleep`."""
        with self._turnstile():
            if self._driver.open:
                raise GroupError(f"{len(self._driver.open)} requests are not answered", "sleep between two batches")
            self._bring(asleep=level)

    def wake(self) -> None:
        with self._turnstile():
            self._bring(asleep=0)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """[engines][workers] what a method of vLLM's workers answers; of the engines that are up."""
        return self._ask("rpc", method, list(args), dict(kwargs or {}))

    def status(self) -> dict[str, Any]:
        """What the group has and does, as plain values."""
        with self._turnstile():
            driver = self._driver
            engines = {
                name: {
                    "is_up": one.version == driver.wanted.version,
                    "running": len(one.running),
                    "places": one.places,
                    "host": one.host,
                    "drafter": one.method if one.drafter else "",
                    "lent": {lender: len(requests) for lender, requests in one.lent.items()},
                }
                for name, one in driver.engines.items()
            }
            state: dict[str, Any] = {
                "ladder": driver.rules.ladder,
                "version": driver.wanted.version,
                "epoch": driver.wanted.epoch,
                "asleep": driver.wanted.asleep,
            }
            requests = {"waiting": len(driver.waiting), "open": len(driver.open)}
            return {**state, **requests, "engines": engines, **driver.counts}

    def close(self) -> None:
        """End all engines, and Ray where the group started it."""
        ends = [actor.close.remote() for actor in self._placement.actors.values()]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_END_S)
        self._placement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self, requests: Mapping[str, int]) -> dict[str, Answer]:
        """Decide, wait for whatever comes first, take it in; the answers that there are to these requests."""
        with self._turnstile():
            self._driver.decide()
            self._take()
            self._watch()
            return self._driver.take_answers(requests)

    def _take(self) -> None:
        self._driver.check_any()
        self._calls.take(BEAT_S, self._driver)

    def _watch(self) -> None:
        """An engine that says nothing new while it runs requests hangs: it is ended, and Ray begins it anew."""
        now = time.monotonic()
        for name, at in self._driver.heard.items():
            if self._driver.engines[name].running and now - at > self._patience_s:
                logger.warning("Spec rollout: %s said nothing for %.0f s and is begun anew", name, self._patience_s)
                self._driver.heard[name] = now
                ray.kill(self._placement.actors[name], no_restart=False)

    def _profiles(self) -> list[DrafterProfile]:
        """What is known of drafters beside the engines' model."""
        known: list[Any] = self._one("engine-0", "rpc", "spec_rollout_profiles", [], {})[0]
        return [msgspec.convert(one, DrafterProfile, str_keys=True) for one in known]

    def _await_all(self, most_s: float) -> None:
        until = time.monotonic() + most_s
        while late := [name for name, one in self._driver.engines.items() if one.version is None]:
            self._take()
            if time.monotonic() > until:
                raise GroupError(
                    f"{', '.join(late)} did not start within {most_s:.0f} s", "give `start_s` more, or see Ray's logs"
                )
        self._driver.check_any()

    def _bring(self, **what: Any) -> int:
        """All that are up get there before this returns."""
        driver = self._driver
        driver.bring(**what)
        while not driver.is_brought:
            self._take()
        behind = [f"{name}: {driver.reasons[name]}" for name, one in driver.engines.items() if one.version == BEHIND]
        if behind:
            raise GroupError(
                f"{len(behind)} of {len(driver.engines)} engines could not follow: {'; '.join(behind)}",
                "they get no request until they can follow the next change",
            )
        return driver.wanted.version

    @contextmanager
    def _turnstile(self) -> Iterator[None]:
        """One at a time, in their order: a loop that turns at once again would let nobody else in."""
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """What each engine that is up answers."""
        with self._turnstile():
            up = [name for name, one in self._driver.engines.items() if one.version is not None]
            refs = [self._calls.send(name, method, *args) for name in up]
        found = []
        for ref in refs:
            # one that has died since is asked in its next life, the next time
            with suppress(RayActorError):
                found.append(_get(ref))
        if not found:
            raise GroupError("no engine is up", "ask again once one is: `status` says when")
        return found

    def _one(self, name: str, method: str, *args: Any) -> Any:
        return _get(self._calls.send(name, method, *args))


def _places(name: str, devices: Sequence[str] | None, engines: int) -> list[Devices] | None:
    """Of each engine."""
    if devices is None:
        return None
    if len(devices) != engines:
        raise ConfigError(f"`{name}` names {len(devices)} places for {engines} engines", "name one for each")
    return [parse_devices(name, one) for one in devices]


def _both_places(
    devices: Sequence[str] | None, drafter_devices: Sequence[str] | None, engines: int
) -> tuple[list[Devices] | None, list[Devices] | None]:
    """Of each engine, and of each one's drafter."""
    places, beside = _places("devices", devices, engines), _places("drafter_devices", drafter_devices, engines)
    if beside is not None and places is None:
        raise ConfigError("`drafter_devices` is given, and `devices` is not", "name both, or neither")
    check_apart("devices", [*(places or ()), *(beside or ())])
    return places, beside


def _said(error: Exception) -> str:
    """The last line of an actor's end, where what ended it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _get(ref: Any) -> Any:
    """
    Raises:
        RayActorError: the engine died.
        GroupError: it raised what is not ours; what is ours is raised as it is.
    """
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SpecRolloutError):
            raise cause from None
        raise GroupError(f"an engine refused: {type(cause).__name__}: {cause}", "see Ray's logs") from error


def _check(
    engines: int,
    ladder: str,
    drafters: Sequence[str],
    spec_rollout: bool | Mapping[str, Any],
    most: int,
    *,
    is_auto: bool,
) -> None:
    check_range("engines", engines, 1, 4096)
    check_range("most", most, 1, 4096)
    check_choice("ladder", ladder, LADDERS)
    if isinstance(drafters, str) or not all(isinstance(model, str) and model for model in drafters):
        raise ConfigError(f"`drafters` is {drafters!r}", "give a list of models")
    if is_auto and ladder != "off":
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` is 'auto'", "drop `ladder`: it is chosen as well")
    if ladder == "attach" and not drafters:
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` names none", "name the models that are to help")
    if ladder in ("off", "move") and drafters:
        raise ConfigError(f"`ladder` is {ladder!r}, and `drafters` is {list(drafters)!r}", "choose 'attach'")
    if not spec_rollout:
        raise ConfigError(
            "`spec_rollout` is off, and without it no request can go on elsewhere",
            'set {"budget": "off"} to decode plainly',
        )
