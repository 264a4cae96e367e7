"""Transfer of weights into a group's engines by vLLM's own means, such as NCCL or IPC: the four calls, made of all.

A `Transfer` is what vLLM calls a `VLLMWeightSyncClient`, so vLLM's trainer engines take it as their `client`. Nothing
of it is repeated for an engine that is begun anew: such a one loads the path that was named, or stays behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from vllm_specrollout.cluster.batch import GroupError
from vllm_specrollout.cluster.driver import Driver, EngineLost, Lines
from vllm_specrollout.cluster.ladder import GroupEngine
from vllm_specrollout.errors import ConfigError, SpecRolloutError, logger

_START, _UPDATE, _FINISH = "start_weight_update", "update_weights", "finish_weight_update"


class Transfer:
    """
    Args:
        ranks: workers of each engine.
        path: where the same weights are saved, for engines that are begun anew; empty: nowhere.
        run: a coroutine in the driver's loop.
    """

    def __init__(
        self, driver: Driver, lines: Lines, ranks: int, path: str, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self.path = path
        """Of the weights that are sent next."""
        self._driver, self._lines, self._ranks, self._run = driver, lines, ranks, run
        # engine -> its life that was initialised
        self._members: dict[str, GroupEngine] = {}

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Have all engines that are up meet the trainer; again after one was begun anew, if it is to take part.

        Args:
            init_info: vLLM's, for all; a `rank_offset` is the first engine's, and the next ones' follow. Or [engines]
                one for each, in their order.
        """
        self._run(self._init(init_info))

    def start_weight_update(self) -> None:
        """Weights follow. Requests wait from here on, each behind the tokens that have come."""
        self._run(self._start())

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Some of them.

        Args:
            update_info: vLLM's, for all. Or [engines x ranks] one for each worker.
        """
        self._run(self._update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> int:
        """All have come; returns the weights' version, which engines that are begun anew get from the path.

        Args:
            weight_version: vLLM's name of it, which a group does not need.

        Raises:
            GroupError: some engines could not follow.
        """
        version: int = self._run(self._finish())
        return version

    def abandon(self) -> None:
        """No more will come. All engines load anew what the group had before, and requests go on."""
        self._run(self._abandon())

    # --- in the driver's loop -----------------------------------------------------------------------------------------

    async def _init(self, given: Any) -> None:
        engines = self._driver.engines
        if isinstance(given, Mapping):
            offsets = [given.get("rank_offset", 0) + i * self._ranks for i in range(len(engines))]
            given = [{**given, "rank_offset": own} if "rank_offset" in given else given for own in offsets]
        if len(given) != len(engines):
            raise ConfigError(f"`init_info` has {len(given)} entries for {len(engines)} engines", "give one for each")
        infos = zip(engines, given, strict=True)
        calls = {name: {"init_info": dict(own)} for name, own in infos if engines[name].version is not None}
        self._members = {name: engines[name] for name in calls}
        await self._ask("init_weight_transfer_engine", calls, ends=False)

    async def _start(self) -> None:
        driver = self._driver
        if driver.is_held:
            raise GroupError("a transfer is under way", "call `finish_weight_update` or `abandon` before the next one")
        members = self._here()
        driver.hold()
        await self._ask(_START, {name: {} for name in members})

    async def _update(self, given: Any) -> None:
        self._check_held()
        names, ranks, members = list(self._driver.engines), self._ranks, self._here()
        if isinstance(given, Mapping):
            await self._ask(_UPDATE, {name: {"update_info": given} for name in members})
            return
        if len(given) != len(names) * ranks:
            workers = f"{len(names)} engines of {ranks} workers"
            raise ConfigError(f"`update_info` has {len(given)} entries for {workers}", "give one for each worker")
        each = {name: list(given[i * ranks : (i + 1) * ranks]) for i, name in enumerate(names)}
        await self._ask(_UPDATE, {name: {"update_info": each[name]} for name in members})

    async def _finish(self) -> int:
        self._check_held()
        driver = self._driver
        await self._ask(_FINISH, {name: {} for name in self._here()})
        how = ("reload_weights", {"weights_path": self.path}) if self.path else ("", {})
        update = (driver.wanted.version + 1, *how)
        for name in self._here():
            self._lines.send(name, "transferred", update)
        driver.is_held = False
        await driver.bring(update=update)
        return driver.wanted.version

    async def _abandon(self) -> None:
        self._check_held()
        try:
            # so that the next one can start
            await self._ask(_FINISH, {name: {} for name in self._here()})
        except GroupError as error:
            logger.warning("Spec rollout: %s", error)
        self._driver.is_held = False
        await self._driver.bring()

    def _check_held(self) -> None:
        if not self._driver.is_held:
            raise GroupError("no transfer is under way", "call `start_weight_update` first")

    def _here(self) -> list[str]:
        """Engines that took part from the first call on.

        Raises:
            GroupError: none does.
        """
        found = [name for name, life in self._members.items() if self._driver.engines.get(name) is life]
        if not found:
            raise GroupError("no engine takes part in the transfer", "call `init_weight_transfer_engine` first")
        return found

    async def _ask(self, method: str, calls: Mapping[str, Mapping[str, Any]], *, ends: bool = True) -> None:
        """Make a call of all at once. One that fails is begun anew: nobody knows what weights it has.

        Raises:
            GroupError: all failed, or one did before any weights came.
        """

        # the trainer may come late to where they meet; vLLM has a limit for that
        patience_s = self._driver.patience_s if ends else None

        async def ask(name: str, kwargs: Mapping[str, Any]) -> str:
            try:
                await asyncio.wait_for(self._lines.call(name, "transfer", method, kwargs), patience_s)
                return ""
            except EngineLost as error:
                wrong = str(error)
            except (SpecRolloutError, TimeoutError) as error:
                wrong = error.cause if isinstance(error, SpecRolloutError) else "it does not answer"
                if ends:
                    self._lines.end(name)
            self._members.pop(name, None)
            return f"{name}: {wrong}"

        wrong = [one for one in await asyncio.gather(*(ask(*one) for one in calls.items())) if one]
        if wrong and (len(wrong) == len(calls) or not ends):
            raise GroupError(f"`{method}`: {'; '.join(wrong)}", "see the engines' log; `abandon` lets the group go on")
        for one in wrong:
            logger.warning("Spec rollout: `%s` failed, and the engine is begun anew: %s", method, one)
