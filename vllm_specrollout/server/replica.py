"""Replica: one engine of a group, in the process that its group began. It does what it is asked, and decides nothing.

It is driven by calls that are awaited, so many at a time. What comes of them is told by `report`, for all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_specrollout.cluster.leftovers import note_shared
from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted
from vllm_specrollout.config import envs
from vllm_specrollout.config.resuming import resumed
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server.reports import abegin_epoch, areport_rewards

SELDOM = 5
"""Beats between two reports of what goes on."""
_MOST_REASON = 1000  # characters
_TORN = (-1, "", {})  # an update that nobody wants


@dataclass(slots=True)
class _Generating:
    """A run: what came of it and was not told yet."""

    task: asyncio.Task[None]
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[float] = field(default_factory=list)
    choices: list[dict[int, tuple[float, int]]] = field(default_factory=list)
    steps: int = 0
    # nothing of it was told yet
    is_new: bool = True
    finish: str = ""
    reason: str = ""
    text: str = ""


class Replica:
    """
    Args:
        engine: arguments of vLLM's engine, `spec_rollout` among them.
    """

    def __init__(self, engine: Mapping[str, Any]) -> None:
        # the engine's processes outlive one that is killed, and keep its memory
        os.environ[envs.ENDS_WITH_PARENT] = "1"
        # a rank's place in its group is the driver's alone
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        self._at = Wanted()
        self._live: dict[str, _Generating] = {}
        # tokens of prompts and their seconds, as they were told last
        self._filled: tuple[int, float] = (0, 0.0)
        self._news = asyncio.Event()
        # when the requests that run were others the last time, when all was told, and when anything was
        self._changed_at = self._told_at = self._heard_at = time.monotonic()
        given: dict[str, Any] = {"max_num_seqs": 32, **engine}
        if given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1) > 1:
            # in an actor, vLLM would place ranks by Ray, which has given the devices to this one
            given.setdefault("distributed_executor_backend", "mp")
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        note_shared()

    async def admit(self, wanted: Wanted) -> tuple[int, int]:
        """Get to where the group is: (version, requests that it runs at once). What runs is of no use any more.

        A process that was begun anew has the weights of its start, and gets all that came since.

        Raises:
            ConfigError: it cannot.
        """
        await self.cancel(list(self._live))
        if self._at.asleep and self._at.asleep != wanted.asleep:
            await self.llm.wake_up()
        if wanted.update != self._at.update:
            _, method, kwargs = wanted.update or (0, "reload_weights", {})
            if not method:
                cause = "its process lacks the weights of the last transfer, which named no `path` to load them from"
                raise ConfigError(cause, "say where the same weights are saved: `transfer(path=...)`; or transfer anew")
            await self.llm.collective_rpc(method, kwargs=dict(kwargs))
            await self.llm.reset_prefix_cache()
        if wanted.epoch is not None and wanted.epoch != self._at.epoch:
            await abegin_epoch(self.llm, wanted.epoch)
        if wanted.asleep and self._at.asleep != wanted.asleep:
            await self.llm.sleep(wanted.asleep)
        self._at = wanted
        await self._prefills()  # from now on they are counted
        return wanted.version, int(self.llm.vllm_config.scheduler_config.max_num_seqs)

    async def transfer(self, method: str, kwargs: Mapping[str, Any]) -> None:
        """One of vLLM's calls of a weight transfer."""
        if method == "start_weight_update":
            await self.cancel(list(self._live))
            self._at = replace(self._at, update=_TORN)
        await self.llm.collective_rpc(method, kwargs=dict(kwargs))

    async def transferred(self, update: tuple[int, str, Mapping[str, Any]]) -> None:
        """These weights have come by a transfer."""
        self._at = replace(self._at, update=update)
        await self.llm.reset_prefix_cache()

    async def give(self, runs: Sequence[Given]) -> None:
        """Run these as well."""
        self._changed_at = time.monotonic()
        for run in runs:
            self._live[run.key] = _Generating(asyncio.ensure_future(self._run(run)))

    async def cancel(self, keys: Sequence[str]) -> None:
        """End these runs; their KV blocks are free before the next step. Those that have ended are left alone."""
        tasks = [self._live.pop(key).task for key in keys if key in self._live]
        for task in tasks:
            task.cancel()
        if tasks:
            self._changed_at = time.monotonic()
            await asyncio.wait(tasks)
        self._news.set()  # whoever cancels may wait for the report

    async def report(self, beat_s: float) -> Report:
        """What came since the last report: after a beat where an answer is complete, and else after some beats.

        What goes on is told seldom, as nothing hurries with it: so a driver has time for many engines.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), SELDOM * beat_s)
        # ends of one beat come together
        await asyncio.sleep(max(self._heard_at + beat_s - time.monotonic(), 0.0))
        self._news.clear()
        now, parts, most = time.monotonic(), {}, 0
        self._heard_at, is_whole = now, now - self._told_at >= SELDOM * beat_s
        pace, count, has_filled = None, len(self._live), False
        for key, own in list(self._live.items()):
            if own.finish or (is_whole and own.tokens):
                reason, text = own.reason, own.text
                parts[key] = Part(own.tokens, own.logprobs, own.steps, own.finish, reason, text, own.choices)
                most, has_filled = max(most, own.steps), has_filled or own.is_new
                own.tokens, own.logprobs, own.choices, own.steps, own.is_new = array("i"), [], [], 0, False
            if own.finish:
                del self._live[key]
        if is_whole and most and self._changed_at <= self._told_at:
            pace = (count, most, now - self._told_at)
        if len(self._live) < count:
            self._changed_at = now
        if is_whole:
            self._told_at = now
        return Report(parts, pace, await self._prefills() if has_filled else (0, 0.0))

    async def rewards(self, rewards: Mapping[str, float]) -> int:
        """How many of these runs are known."""
        return int((await areport_rewards(self.llm, rewards))["matched"])

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as the model's tokenizer has them."""
        tokenizer = await self._tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    async def rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """A method of vLLM's workers."""
        return await self.llm.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs or {}))

    async def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """End the engine, and the drafter beside it."""
        self.llm.shutdown()

    async def _run(self, run: Given) -> None:
        live, answer = self._live[run.key], list(run.answer)
        try:
            params = sampling(run.params)
            prompt, own = resumed(params, run.prompt, answer)
            own.detokenize = bool(params.stop)  # nobody else looks at texts before the end
            lora = LoRARequest(**run.lora) if isinstance(run.lora, Mapping) else run.lora
            async for output in self.llm.generate({"prompt_token_ids": prompt}, own, run.key, lora_request=lora):
                one = output.outputs[0]
                live.steps += 1
                answer += one.token_ids
                live.tokens.extend(one.token_ids)
                if one.logprobs is not None:
                    _tell(live, one, all_of=params.logprobs != 0)
                if output.finished:
                    live.reason = "" if one.stop_reason is None else str(one.stop_reason)[:_MOST_REASON]
                    live.text = await self._text(run.prompt, params, answer, one)
                    live.finish = one.finish_reason or "stop"
        except EngineDeadError:
            os._exit(1)  # whoever began this process begins it anew
        except Exception as error:
            live.finish, live.reason = "error", f"{type(error).__name__}: {error}"[:_MOST_REASON]
        self._news.set()

    async def _text(self, prompt: Sequence[int], params: SamplingParams, answer: list[int], last: Any) -> str:
        """Of a whole answer, as vLLM has it; empty without a tokenizer, or where the request wants none."""
        tokenizer = await self._tokenizer() if params.detokenize else None
        request: Any = SimpleNamespace(
            request_id="", prompt_token_ids=list(prompt), prompt_embeds=None, sampling_params=params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        detokenizer.update(answer, last.finish_reason == "stop" and not isinstance(last.stop_reason, str))
        return detokenizer.get_next_output_text(finished=True, delta=False)

    async def _tokenizer(self) -> Any:
        if self.llm.vllm_config.model_config.skip_tokenizer_init:
            return None
        found = self.llm.get_tokenizer()
        return await found if inspect.isawaitable(found) else found

    async def _prefills(self) -> tuple[int, float]:
        """Tokens of prompts that were computed since this was asked last, and how much longer steps took for them."""
        try:
            found = next(one for one in await self.rpc("spec_rollout_prefills") if one)
        except EngineDeadError:
            os._exit(1)
        before, self._filled = self._filled, (int(found["tokens"]), float(found["seconds"]))
        return self._filled[0] - before[0], self._filled[1] - before[1]


def _tell(live: _Generating, output: Any, *, all_of: bool) -> None:
    """Log probabilities of a step's tokens, and of what else vLLM tells of."""
    pairs = list(zip(output.logprobs, output.token_ids, strict=True))
    live.logprobs += [own[token].logprob for own, token in pairs]
    if all_of:
        live.choices += [{token: (one.logprob, one.rank) for token, one in own.items()} for own, _ in pairs]


def sampling(given: Any) -> SamplingParams:
    """vLLM's parameters with tokens told step by step.

    Raises:
        ValueError: vLLM's, or one for a key that it does not know.
    """
    if isinstance(given, SamplingParams):
        params = given.clone()
        params.output_kind = RequestOutputKind.DELTA
        return params
    values = dict(given)
    if isinstance(values.get("structured_outputs"), Mapping):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    try:
        return SamplingParams(**{**values, "output_kind": RequestOutputKind.DELTA})
    except TypeError as error:
        raise ConfigError(f"`sampling_params` cannot be used: {error}", "give arguments of `SamplingParams`") from None
