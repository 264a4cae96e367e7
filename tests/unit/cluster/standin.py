"""An engine without a model, as a group's replica: a token is a function of seed, weights and position, as in one that
is lossless. It runs in an actor, or in this process, where its owner says when a step is done."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted
from vllm_specrollout.errors import ConfigError

STEP_S = 0.004


def token(seed: int, weights: int, position: int) -> int:
    return (seed * 7919 + weights * 104729 + position * 31) % 50021


def answer(params: Mapping[str, Any], weights: int = 0) -> list[int]:
    """What an engine that is never interrupted says."""
    return [token(params["seed"], weights, i) for i in range(params["max_tokens"])]


def generated(group: Any, asked: Sequence[Mapping[str, Any]], weights: int = 0) -> list[Any]:
    """A group's answers, every other one to the same prompt, after a look at each token."""
    found = group.generate([[i // 2] for i in range(len(asked))], asked)
    assert [list(one.token_ids) for one in found] == [answer(one, weights) for one in asked]
    return found


class Engine:
    """What runs, step by step."""

    def __init__(self, places: int = 4) -> None:
        self.at, self.weights, self.places = Wanted(), 0, places
        self.live: dict[str, tuple[Given, list[int], int]] = {}
        self.rewarded: dict[str, float] = {}
        # weights that a transfer brings
        self.coming: int | None = None
        self.met: Mapping[str, Any] = {}

    def admit(self, wanted: Wanted) -> tuple[int, int, str]:
        self.live.clear()
        if wanted.update != self.at.update:
            _, method, kwargs = wanted.update or (0, "load", {"number": 0})
            if method not in ("load", "reload_weights"):
                raise ConfigError(f"it cannot {method or 'have what a transfer brought'}", "none")
            self.weights = int(kwargs.get("number", kwargs.get("weights_path", 0)))
        self.at = wanted
        return wanted.version, self.places, "here"

    def give(self, runs: Sequence[Given]) -> None:
        for run in runs:
            assert run.key not in self.live and len(run.answer) < run.params["max_tokens"] and not self.at.asleep
            assert not run.answer or not run.params.get("stop"), "what cannot be resumed begins anew"
            self.live[run.key] = (run, list(run.answer), len(run.answer))
        assert len(self.live) <= self.places, "an engine gets no more than it has places for"

    def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.live.pop(key, None)

    def transfer(self, method: str, kwargs: Mapping[str, Any]) -> None:
        if method == "init_weight_transfer_engine":
            self.coming, self.met = 0, kwargs["init_info"]
        elif self.coming is None:
            raise ConfigError("it has met no trainer", "none")
        elif method == "start_weight_update":
            self.live.clear()
            self.at = replace(self.at, update=(-1, "", {}))
        elif method == "update_weights":
            (one,) = own if isinstance(own := kwargs["update_info"], list) else [own]
            self.coming = one["number"]
        elif method == "finish_weight_update":
            self.weights = self.coming

    def transferred(self, update: Any) -> None:
        self.at = replace(self.at, update=update)

    def step(self) -> None:
        for run, tokens, _ in self.live.values():
            if len(tokens) < run.params["max_tokens"]:
                tokens.append(token(run.params["seed"], self.weights, len(tokens)))

    def report(self, beat_s: float = 0.0) -> Report:
        parts = {}
        for key, (run, tokens, told) in list(self.live.items()):
            is_over = len(tokens) >= run.params["max_tokens"]
            if is_over or len(tokens) > told:
                new = tokens[told:]
                wrong = run.params.get("wrong", "")
                logprobs = [-float(one) for one in new] if run.params.get("logprobs") is not None else []
                choices = [{one: (-float(one), 1)} for one in new] if run.params.get("logprobs") else []
                finish, text = "error" if wrong else "length" if is_over else "", f"{run.lora}" if is_over else ""
                parts[key] = Part(new, logprobs, len(new), finish, wrong, text, choices)
                self.live[key] = (run, tokens, len(tokens))
                if is_over or wrong:
                    del self.live[key]
        return Report(parts)


class Replica:
    """As `vllm_specrollout.server.replica.Replica` is asked."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        if engine.get("refuses"):
            raise ValueError("no such model")
        self._own = Engine(engine.get("max_num_seqs", 4))
        self._profiles = engine.get("profiles", [])
        self._is_stuck, self._drafter = False, ""
        # drafter -> the requests that it drafts for
        self._attached: dict[str, list[str]] = {}
        self._task: asyncio.Task[None] | None = None

    async def admit(self, wanted: Wanted) -> tuple[int, int]:
        if wanted.update and wanted.update[1] == "nonsense":
            raise AttributeError(wanted.update[1])
        self._task = self._task or asyncio.ensure_future(self._go())
        return self._own.admit(wanted)[:2]

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any) -> Any:
            return getattr(self._own, name)(*args)

        return call

    async def report(self, beat_s: float) -> Report:
        await asyncio.sleep(beat_s)
        return self._own.report()

    async def rewards(self, rewards: Mapping[str, float]) -> int:
        self._own.rewarded |= rewards
        return len(rewards)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    async def rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        self._is_stuck = self._is_stuck or method == "hang"
        state = {"pid": os.getpid(), "at": self._own.at, "attached": self._attached, "env": dict(os.environ)}
        match method:
            case "spec_rollout_profiles":
                return [self._profiles, []]
            case "spec_rollout_history":
                return [{"store": dict.fromkeys(("epoch", "lowest"), self._own.at.epoch or 0)}, {}]
            case "spec_rollout_warm":
                self._drafter = args[0]
            case "attach_drafter" | "assign_drafter":
                self._attached[args[0]] = args[-1]
            case "detach_drafter":
                self._attached.pop(args[0], None)
            case "spec_rollout_standing":
                return [self._standing(), {}]
        return [state.get(method)]

    def _standing(self) -> dict[str, Any]:
        running = {key: (len(run.prompt), len(tokens)) for key, (run, tokens, _) in self._own.live.items()}
        steps = sum(tokens for _, tokens in running.values())
        own = {"drafter": self._drafter and f"ipc://{self._drafter}", "model": self._drafter}
        counts = {"verified": 0, "accepted": 0, "places": self._own.places}
        return {"running": running, "steps": steps, "host": "", "attached": self._attached, **own, **counts}

    def close(self) -> None:
        self._own.live.clear()

    async def _go(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self._is_stuck:
                self._own.step()
