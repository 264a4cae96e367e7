"""An engine without a model, as a group's replica: a token is a function of seed, weights and position, as in one that
is lossless. It runs in an actor, or in this process, where its owner says when a step is done."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted

STEP_S = 0.004


def token(seed: int, weights: int, position: int) -> int:
    return (seed * 7919 + weights * 104729 + position * 31) % 50021


def answer(params: Mapping[str, Any], weights: int = 0) -> list[int]:
    """What an engine that is never interrupted says."""
    return [token(params["seed"], weights, i) for i in range(params["max_tokens"])]


class Engine:
    """What runs, step by step."""

    def __init__(self, places: int = 4) -> None:
        self.at, self.weights, self.places, self.drafter = Wanted(), 0, places, ""
        self.live: dict[str, tuple[Given, list[int], int]] = {}
        self.attached: dict[str, list[str]] = {}
        self.rewarded: dict[str, float] = {}

    def admit(self, wanted: Wanted) -> tuple[int, int]:
        self.live.clear()
        if wanted.update:
            self.weights = wanted.update[2]["number"]
        self.at = wanted
        return wanted.version, self.places

    def give(self, runs: Sequence[Given]) -> None:
        for run in runs:
            assert run.key not in self.live and len(run.answer) < run.params["max_tokens"] and not self.at.asleep
            self.live[run.key] = (run, list(run.answer), len(run.answer))
        assert len(self.live) <= self.places, "an engine gets no more than it has places for"

    def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.live.pop(key, None)

    def step(self) -> None:
        for run, tokens, _ in self.live.values():
            if len(tokens) < run.params["max_tokens"]:
                tokens.append(token(run.params["seed"], self.weights, len(tokens)))

    def report(self) -> Report:
        parts = {}
        for key, (run, tokens, told) in list(self.live.items()):
            is_over = len(tokens) >= run.params["max_tokens"]
            if is_over or len(tokens) > told:
                new = tokens[told:]
                wrong = run.params.get("wrong", "")
                logprobs = [-float(one) for one in new] if run.params.get("logprobs") == 0 else []
                parts[key] = Part(new, logprobs, len(new), "error" if wrong else "length" if is_over else "", wrong)
                self.live[key] = (run, tokens, len(tokens))
                if is_over or wrong:
                    del self.live[key]
        return Report(parts, None, (0, 0.0), self.drafter and f"ipc://{self.drafter}")

    def warm(self, model: str) -> None:
        self.drafter = model

    def attach(self, lender: str, address: str, requests: Sequence[str]) -> str:
        self.attached[lender] = list(requests)
        return ""


class Replica:
    """As `vllm_specrollout.server.replica.Replica` is asked."""

    def __init__(self, engine: Mapping[str, Any], drafter_engine: Mapping[str, Any], devices: Any) -> None:
        if engine.get("refuses"):
            raise ValueError("no such model")
        self._own, self._devices = Engine(engine.get("max_num_seqs", 4)), devices
        self._profiles = engine.get("profiles", [])
        self._news, self._is_stuck = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None

    async def admit(self, wanted: Wanted) -> tuple[int, int]:
        if wanted.update and wanted.update[1] != "load":
            raise AttributeError(wanted.update[1])
        self._task = self._task or asyncio.ensure_future(self._go())
        return self._own.admit(wanted)

    async def warm(self, model: str) -> None:
        self._own.warm(model)

    async def give(self, runs: Sequence[Given]) -> None:
        self._own.give(runs)

    async def cancel(self, keys: Sequence[str]) -> None:
        self._own.cancel(keys)

    async def report(self, beat_s: float) -> Report:
        await asyncio.sleep(beat_s)
        return self._own.report()

    async def attach(self, lender: str, address: str, requests: Sequence[str]) -> str:
        return self._own.attach(lender, address, requests)

    async def rewards(self, rewards: Mapping[str, float]) -> int:
        self._own.rewarded |= rewards
        return len(rewards)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    async def host(self) -> str:
        return "here"

    async def rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        self._is_stuck = self._is_stuck or method == "hang"
        state = {
            "pid": os.getpid(),
            "at": self._own.at,
            "attached": self._own.attached,
            "env": dict(os.environ),
            "drafter": self._devices,
        }
        if method == "spec_rollout_profiles":
            return [self._profiles, []]
        if method == "spec_rollout_history":
            return [{"store": dict.fromkeys(("epoch", "lowest"), self._own.at.epoch or 0)}, {}]
        return [state.get(method)]

    def close(self) -> None:
        self._own.live.clear()

    async def _go(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self._is_stuck:
                self._own.step()
