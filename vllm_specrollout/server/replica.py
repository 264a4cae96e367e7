"""Replica: one engine of a group, in the process that its group began. It does what it is asked, and decides nothing.

It is driven by calls that are awaited, so many at a time. What comes of them is told by `report`, for all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_specrollout.cluster.child import Command, WarmDrafter
from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted
from vllm_specrollout.config import envs
from vllm_specrollout.config.resuming import resumed
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server.reports import abegin_epoch, areport_rewards

_MOST_REASON = 1000  # characters


@dataclass(slots=True)
class _Generating:
    """A run: what came of it and was not told yet."""

    task: asyncio.Task[None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: int = 0
    # nothing of it was told yet
    is_new: bool = True
    finish: str = ""
    reason: str = ""


class Replica:
    """
    Args:
        engine: arguments of vLLM's engine, `spec_rollout` among them.
        drafter_engine: arguments of the engine of a drafter beside it.
        drafter_devices: such as `cpu:2` or `cuda:1`, as this process counts them.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        drafter_engine: Mapping[str, Any] | None = None,
        drafter_devices: Sequence[str] = (),
    ) -> None:
        # the engine's processes outlive one that is killed, and keep its memory
        os.environ[envs.ENDS_WITH_PARENT] = "1"
        # a rank's place in its group is the driver's alone
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        self._at = Wanted()
        self._live: dict[str, _Generating] = {}
        # tokens of prompts and their seconds, as they were told last
        self._filled: tuple[int, float] = (0, 0.0)
        self._attached: set[str] = set()
        self._news = asyncio.Event()
        # when the requests that run were others the last time
        self._changed_at = self._told_at = time.monotonic()
        given: dict[str, Any] = {"max_num_seqs": 32, **engine}
        if given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1) > 1:
            # in an actor, vLLM would place ranks by Ray, which has given the devices to this one
            given.setdefault("distributed_executor_backend", "mp")
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        self._warm: WarmDrafter | None = None
        self._drafter_engine, self._drafter_devices = drafter_engine or {}, drafter_devices

    async def admit(self, wanted: Wanted) -> tuple[int, int]:
        """Get to where the group is: (version, requests that it runs at once). What runs is of no use any more.

        A process that was begun anew has the weights of its start, and gets all that came since.
        """
        await self.cancel(list(self._live))
        if self._at.asleep and self._at.asleep != wanted.asleep:
            await self.llm.wake_up()
        if wanted.update and wanted.update != self._at.update:
            _, method, kwargs = wanted.update
            await self.llm.collective_rpc(method, kwargs=dict(kwargs))
            await self.llm.reset_prefix_cache()
        if wanted.epoch is not None and wanted.epoch != self._at.epoch:
            await abegin_epoch(self.llm, wanted.epoch)
        if wanted.asleep and self._at.asleep != wanted.asleep:
            await self.llm.sleep(wanted.asleep)
        self._at = wanted
        await self._prefills()  # from now on they are counted
        return wanted.version, int(self.llm.vllm_config.scheduler_config.max_num_seqs)

    async def warm(self, model: str) -> None:
        """Begin a drafter, to be lent."""
        self._warm = self._warm or WarmDrafter(Command.of(model, self._drafter_devices, self._drafter_engine))

    async def give(self, runs: Sequence[Given]) -> None:
        """Run these as well."""
        self._changed_at = time.monotonic()
        for run in runs:
            task = asyncio.ensure_future(self._run(run))
            self._live[run.key] = _Generating(task)

    async def cancel(self, keys: Sequence[str]) -> None:
        """End these runs; their KV blocks are free before the next step. Those that have ended are left alone."""
        tasks = [self._live.pop(key).task for key in keys if key in self._live]
        for task in tasks:
            task.cancel()
        if tasks:
            self._changed_at = time.monotonic()
            await asyncio.wait(tasks)

    async def report(self, beat_s: float) -> Report:
        """What came within a beat, sooner where an answer is complete. Whoever asks again at once hears all."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), beat_s)
        self._news.clear()
        now, parts, most = time.monotonic(), {}, 0
        pace, count, has_filled = None, len(self._live), False
        for key, own in list(self._live.items()):
            if own.tokens or own.finish:
                parts[key] = Part(own.tokens, own.logprobs, own.steps, own.finish, own.reason)
                most, has_filled = max(most, own.steps), has_filled or own.is_new
                own.tokens, own.logprobs, own.steps, own.is_new = [], [], 0, False
            if own.finish:
                del self._live[key]
        if most and self._changed_at <= self._told_at:
            pace = (count, most, now - self._told_at)
        if len(self._live) < count:
            self._changed_at = now
        self._told_at = now
        return Report(parts, pace, await self._prefills() if has_filled else (0, 0.0), self._drafter())

    async def attach(self, lender: str, address: str, requests: Sequence[str]) -> str:
        """Have a drafter draft for these runs alone; none: let go of it. What was wrong comes back; empty: nothing."""
        is_there = lender in self._attached
        (self._attached.add if requests else self._attached.discard)(lender)
        if not requests:
            found = await self._worker("detach_drafter", lender)
        elif is_there:
            found = await self._worker("assign_drafter", lender, list(requests))
        else:
            found = await self._worker("attach_drafter", lender, address, None, None, list(requests))
        return f"{found['cause']}; {found['hint']}" if "cause" in found else ""

    async def rewards(self, rewards: Mapping[str, float]) -> int:
        """How many of these runs are known."""
        return int((await areport_rewards(self.llm, rewards))["matched"])

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as the model's tokenizer has them."""
        found = self.llm.get_tokenizer()
        tokenizer: Any = await found if inspect.isawaitable(found) else found
        return [list(tokenizer.encode(text)) for text in texts]

    async def rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """A method of vLLM's workers."""
        return await self.llm.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs or {}))

    async def pid(self) -> int:
        return os.getpid()

    async def host(self) -> str:
        return socket.gethostname()

    def close(self) -> None:
        """End the engine and the drafter."""
        if self._warm is not None:
            self._warm.stop()
        self.llm.shutdown()

    async def _run(self, run: Given) -> None:
        live = self._live[run.key]
        try:
            prompt, params = resumed(sampling(run.params), run.prompt, run.answer)
            async for output in self.llm.generate({"prompt_token_ids": prompt}, params, run.key):
                one = output.outputs[0]
                live.steps += 1
                live.tokens += one.token_ids
                if one.logprobs is not None:
                    live.logprobs += [
                        own[token].logprob for own, token in zip(one.logprobs, one.token_ids, strict=True)
                    ]
                if output.finished:
                    live.reason = "" if one.stop_reason is None else str(one.stop_reason)[:_MOST_REASON]
                    live.finish = one.finish_reason or "stop"
        except EngineDeadError:
            os._exit(1)  # whoever began this process begins it anew
        except Exception as error:
            live.finish, live.reason = "error", f"{type(error).__name__}: {error}"[:_MOST_REASON]
        self._news.set()

    async def _worker(self, method: str, *args: Any) -> dict[str, Any]:
        """What the rank that drafts answers."""
        found = await self.rpc(method, args)
        return next((one for one in found if one), {})

    async def _prefills(self) -> tuple[int, float]:
        """Tokens of prompts that were computed since this was asked last, and how much longer steps took for them."""
        try:
            found = next(one for one in await self.rpc("spec_rollout_prefills") if one)
        except EngineDeadError:
            os._exit(1)
        before, self._filled = self._filled, (int(found["tokens"]), float(found["seconds"]))
        return self._filled[0] - before[0], self._filled[1] - before[1]

    def _drafter(self) -> str:
        return "" if self._warm is None else self._warm.address


def sampling(given: Any) -> SamplingParams:
    """vLLM's parameters with tokens told step by step.

    Raises:
        ValueError: vLLM's, or one for a key that it does not know.
    """
    # texts are looked at for stop strings alone
    if isinstance(given, SamplingParams):
        params = given.clone()
        params.output_kind, params.detokenize = RequestOutputKind.DELTA, bool(params.stop)
        return params
    values = dict(given)
    if isinstance(values.get("structured_outputs"), Mapping):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    own = {"output_kind": RequestOutputKind.DELTA, "detokenize": bool(values.get("stop"))}
    try:
        return SamplingParams(**{**values, **own})
    except TypeError as error:
        raise ConfigError(f"`sampling_params` cannot be used: {error}", "give arguments of `SamplingParams`") from None
