"""Group of engines on Ray that share batches, and help each other at their ends: what a trainer's driver holds.

All that a group knows lies in one event loop, on a thread of its own. Calls from outside go there and wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

import msgspec
import ray

from vllm_specrollout.cluster.batch import GroupAnswer, GroupError, RequestChecker
from vllm_specrollout.cluster.driver import BEHIND, Driver, EngineLost
from vllm_specrollout.cluster.ladder import LADDERS
from vllm_specrollout.cluster.lending import BEAT_S, Ask, Lending, Warm
from vllm_specrollout.cluster.planner import choose_ladder
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.ray.placement import Needs, Placement
from vllm_specrollout.cluster.transfer import Transfer
from vllm_specrollout.config.arguments import check_engine, check_name
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.config.devices import Devices, check_apart, parse_devices
from vllm_specrollout.errors import ConfigError

REPLICA = "vllm_specrollout.server.replica:Replica"
AUTO = "auto"
_END_S = 10.0
_T = TypeVar("_T")

__all__ = ["GroupAnswer", "GroupError", "SpecGroup"]


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
        _check(ladder, models, spec_rollout, is_auto=is_auto)
        for name, count in (("engines", engines), ("most", most)):
            check_range(name, count, 1, 4096)
        for name, seconds in (("patience_s", patience_s), ("start_s", start_s)):
            check_range(name, seconds, 1.0, 86400.0)
        places = _places(devices, engines)
        if is_auto or models:
            # an engine takes no drafters otherwise
            given = dict(spec_rollout) if isinstance(spec_rollout, Mapping) else {}
            spec_rollout = {"placement": "decoupled"} | given
        arguments = {**(engine or {}), "model": model, "spec_rollout": spec_rollout}
        check_engine(arguments)
        check_engine(drafter_engine or {}, "drafter_engine")
        for i, one in enumerate((model, *models)):
            check_name(one, "drafters" if i else "model")
        needs = Needs(REPLICA, arguments, (model, *models), engines, places, gpus, cpus, max_restarts)
        self._asking, self._drafter_engine, self._ranks = RequestChecker(seed), drafter_engine or {}, needs.ranks
        self._placement = Placement(needs)
        self._turn = asyncio.Lock()
        self._is_closed, self._loop = False, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specrollout-group", daemon=True)
        try:
            self._driver = Driver(self._placement, list(self._placement.actors), ladder, patience_s)
            self._lending: Lending | None = None
            self._thread.start()
            self._placement.wait(start_s)
            self._run(self._begin(ladder, models, most, start_s, is_auto=is_auto))
        except BaseException:
            self.close()
            raise

    async def _begin(self, ladder: str, models: Sequence[str], most: int, start_s: float, *, is_auto: bool) -> None:
        """Wait for the engines, and have them begin the drafters that are to help."""
        driver = self._driver
        driver.start()
        try:
            await asyncio.wait_for(driver.until(lambda: not driver.starting), start_s)
        except TimeoutError:
            late = f"{', '.join(driver.starting)} did not start within {start_s:.0f} s"
            raise GroupError(late, "give `start_s` more, or see Ray's logs") from None
        driver.check_any()
        if is_auto:
            ladder, models = choose_ladder(await self._profiles())
            driver.ladder = ladder
        if models:
            self._lending = Lending({}, most=most)
            for i, name in enumerate(self._placement.actors):
                warm: Warm = (models[i % len(models)], [], dict(self._drafter_engine))  # on its own devices
                self._lending.add({name: self._asking_of(name)}, warm)
            self._helping = asyncio.ensure_future(self._help(self._lending))

    async def _profiles(self) -> list[DrafterProfile]:
        """What is known of drafters beside the engines' model, by any of them."""
        known = [one for rows in await self._ask("rpc", "spec_rollout_profiles", [], {}) for one in rows[0]]
        return [msgspec.convert(one, DrafterProfile, str_keys=True) for one in known]

    async def _help(self, lending: Lending) -> None:
        """Drafters of idle engines are lent, where the ladder says so."""
        while True:
            await asyncio.sleep(BEAT_S)
            lending.beat(is_lent=self._driver.ladder == "attach" and not self._driver.wanted.asleep)

    def _asking_of(self, name: str) -> Ask:
        return lambda method, args: asyncio.ensure_future(self._placement.call(name, "rpc", method, list(args), {}))

    # --- what a trainer calls -----------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[str | Sequence[int]], params: Any, *, lora: Any = None) -> list[GroupAnswer]:
        """Answer all prompts.

        Args:
            prompts: [R] token ids, or texts.
            params: `SamplingParams` or its arguments, for all prompts or [R] one for each. Of `n` above 1, each answer
                has the seed behind the one before, as in vLLM.
            lora: vLLM's `LoRARequest` or its arguments, for all.

        Returns:
            [sum of n] the answers, in the prompts' order.

        Raises:
            ConfigError: prompts or parameters that cannot be used.
            GroupError: an engine refused a request, none is left or can follow, or the group is closed.
        """
        return self._run(self._generate(prompts, params, lora))

    def stream(
        self, prompts: Sequence[str | Sequence[int]], params: Any, *, lora: Any = None
    ) -> Iterator[tuple[int, GroupAnswer]]:
        """(index, answer) of each, as they end. As `generate`; several may go on at once."""
        answers = self._stream(prompts, params, lora)
        try:
            while (found := self._run(_next(answers))) is not None:
                yield found
        finally:
            if not self._is_closed:
                self._run(answers.aclose())

    async def agenerate(
        self, prompts: Sequence[str | Sequence[int]], params: Any, *, lora: Any = None
    ) -> list[GroupAnswer]:
        """As `generate`, for a driver that goes on meanwhile."""
        return await asyncio.wrap_future(self._given(self._generate(prompts, params, lora)))

    def update_weights(self, method: str = "reload_weights", **kwargs: Any) -> int:
        """New weights for all, by a method of vLLM's workers; returns the weights' version.

        An engine that is down gets them before it gets a request. What runs goes on with the new weights, behind the
        tokens that have come; `GroupAnswer.versions` says which weights gave which token.
        """
        return self._run(self._bring(update=(self._driver.wanted.version + 1, method, kwargs)))

    def transfer(self, path: str = "") -> Transfer:
        """Weights as vLLM's trainer engines send them, such as by NCCL: it is their `client`.

        Args:
            path: where the same weights are saved, for engines that are begun anew (`Transfer.path` changes it).
                Without one they stay behind until the next weights come.
        """
        return Transfer(self._driver, self._placement, self._ranks, path, self._run)

    def begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch's number: by default one that no engine has begun.

        An engine begins an epoch by itself where a problem comes back; so their numbers may differ before.
        """
        if epoch is None:
            histories = [own for engine in self.collective_rpc("spec_rollout_history") for own in engine]
            begun = [own["store"]["epoch"] for own in histories if own]
            epoch = max(begun, default=self._driver.wanted.epoch or 0) + 1
        self._run(self._bring(epoch=epoch))
        return epoch

    def report_rewards(self, rewards: Mapping[str, float]) -> int:
        """By `GroupAnswer.request`, finite numbers; how many some engine knew."""
        return sum(self._run(self._ask("rewards", dict(rewards))))

    def sleep(self, level: int = 1) -> None:
        """Give the engines' memory back, as vLLM's `sleep`."""
        self._run(self._sleep(level))

    def wake(self) -> None:
        self._run(self._bring(asleep=0))

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """[engines][workers] what a method of vLLM's workers answers; of the engines that are up."""
        return self._run(self._ask("rpc", method, list(args), dict(kwargs or {})))

    def status(self) -> dict[str, Any]:
        """What the group has and does, as plain values."""
        return self._run(self._status())

    def close(self) -> None:
        """End all engines, and Ray where the group started it. Calls that wait end with an error."""
        if self._is_closed:
            return
        if self._thread.is_alive():
            with suppress(GroupError):
                self._run(self._stop())
        self._is_closed = True
        ends = [actor.close.remote() for actor in self._placement.actors.values()]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_END_S)
        self._placement.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _given(self, what: Coroutine[Any, Any, _T]) -> Future[_T]:
        """A coroutine, handed to the loop."""
        if self._is_closed:
            what.close()
            raise _closed()
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _run(self, what: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine comes to in the loop; given up where the caller is."""
        future = self._given(what)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _generate(self, prompts: Sequence[str | Sequence[int]], params: Any, lora: Any) -> list[GroupAnswer]:
        async with aclosing(self._stream(prompts, params, lora)) as answers:
            found = {index: answer async for index, answer in answers}
        return [found[i] for i in range(len(found))]

    async def _stream(
        self, prompts: Sequence[str | Sequence[int]], params: Any, lora: Any
    ) -> AsyncGenerator[tuple[int, GroupAnswer], None]:
        driver = self._driver
        if driver.wanted.asleep:
            raise GroupError("the group sleeps", "call `wake` before it is to answer")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter((await self._ask("encode", texts, most=1))[0] if texts else ())
        ended: asyncio.Queue[tuple[str, GroupAnswer | GroupError]] = asyncio.Queue()
        tokens = [next(encoded) if isinstance(one, str) else one for one in prompts]
        async with self._turn:  # reports are heard while a large batch is looked through
            asked = await asyncio.to_thread(
                self._asking.ask, tokens, params, lora, lambda request, found: ended.put_nowait((request, found))
            )
        places = {request: i for i, request in enumerate(asked)}
        driver.add(asked)
        try:
            while places:
                request, found = await ended.get()
                if isinstance(found, GroupError):
                    raise found
                yield places.pop(request), found
        finally:
            driver.drop(places)  # after an error, or given up: what runs is of no use

    async def _ask(self, method: str, *args: Any, most: int | None = None) -> list[Any]:
        """What each engine that is up answers, or so many of them. One that has died since is asked the next time."""

        async def ask(name: str) -> list[Any]:
            with suppress(EngineLost):
                return [await self._placement.call(name, method, *args)]
            return []

        up = [name for name, one in self._driver.engines.items() if one.version is not None]
        found = [one for own in await asyncio.gather(*map(ask, up[:most])) for one in own]
        if not found:
            raise GroupError("no engine is up", "ask again once one is: `status` says when")
        return found

    async def _bring(self, **what: Any) -> int:
        """All that are up get there before this returns."""
        await self._driver.bring(**what)
        return self._driver.wanted.version

    async def _sleep(self, level: int) -> None:
        if self._driver.open:
            raise GroupError(f"{len(self._driver.open)} requests are not answered", "sleep between two batches")
        await self._driver.bring(asleep=level)

    async def _status(self) -> dict[str, Any]:
        driver, lending = self._driver, self._lending
        lent: dict[str, Any] = lending.status() if lending is not None else {"lent": 0, "engines": {}}
        engines = {}
        for name, one in driver.engines.items():
            own = lent["engines"].get(name, {})
            engines[name] = {
                "is_up": one.version == driver.wanted.version,
                "running": len(one.running),
                "places": one.places,
                "host": one.host,
                "behind": driver.reasons.get(name, "") if one.version == BEHIND else "",
                "drafter": own.get("drafter", ""),
                "lent": own.get("borrowed", {}),
            }
        wanted = driver.wanted
        return {
            "ladder": driver.ladder,
            "version": wanted.version,
            "epoch": wanted.epoch,
            "asleep": wanted.asleep,
            "waiting": len(driver.waiting),
            "open": len(driver.open),
            "engines": engines,
            **driver.counts,
            "lent": lent["lent"],
        }

    async def _stop(self) -> None:
        self._driver.stop(_closed())
        if self._lending is not None:
            self._helping.cancel()
        await asyncio.sleep(0)  # those that wait hear of it


async def _next(answers: AsyncGenerator[tuple[int, GroupAnswer], None]) -> tuple[int, GroupAnswer] | None:
    """None: that was all."""
    return await anext(answers, None)


def _closed() -> GroupError:
    return GroupError("the group is closed", "make another one")


def _places(devices: Sequence[str] | None, engines: int) -> list[Devices] | None:
    """Of each engine."""
    if devices is None:
        return None
    if len(devices) != engines:
        raise ConfigError(f"`devices` names {len(devices)} places for {engines} engines", "name one for each")
    places = [parse_devices("devices", one) for one in devices]
    check_apart("devices", places)
    return places


def _check(ladder: str, drafters: Sequence[str], spec_rollout: bool | Mapping[str, Any], *, is_auto: bool) -> None:
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
