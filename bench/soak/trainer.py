"""What a trainer tells the server beside its requests, and what somebody tells it who got the routes wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..policy.reward import reward
from .client import Answer

_PREFIX = "/spec_rollout"
_JSON = {"Content-Type": "application/json"}
_REWARDS_S = 5.0
"""Between two reports."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A body that no server may take, and the statuses it may be refused with."""

    path: str
    body: bytes
    statuses: tuple[int, ...] = (422,)


MISTAKES = (
    Mistake("/rewards", b"{", (400,)),
    Mistake("/rewards", b"[1, 2]"),
    Mistake("/rewards", b'{"rewards": [{"request_id": "x", "reward": NaN}]}', (400, 422)),
    Mistake("/rewards", b'{"rewards": [], "more": 1}'),
    Mistake("/rewards", b'{"rewards": [' + b",".join([b"{}"] * 2000) + b"]}"),
    Mistake("/rewards", b'{"rewards": [{"request_id": "' + b"x" * 5000 + b'", "reward": 1.0}]}'),
    Mistake("/rewards", b'{"rewards": "' + b"x" * (9 << 20) + b'"}', (413,)),
    Mistake("/epoch", b'{"epoch": -1}'),
    Mistake("/epoch", b'{"epoch": 1e999}', (400, 422)),
    Mistake("/epoch", b'{"epoch": "next"}'),
    # long past
    Mistake("/epoch", b'{"epoch": 0}', (409,)),
    Mistake("/drafter", b'{"path": "/nowhere"}', (403,)),
    Mistake("", b'{"model": "policy", "prompt": "1", "vllm_xargs": {"spec_rollout": "{"}}', (400,)),
    Mistake("", b'{"model": "policy", "prompt": "1", "vllm_xargs": {"spec_rollout": "{\\"limit\\": 1}"}}', (400,)),
)
"""Those without a path go to `/v1/completions`."""


@dataclass(slots=True)
class Trainer:
    """Epochs, rewards and mistakes; counts what came of them."""

    address: str
    seed: int
    epoch_s: float
    mistake_s: float
    # told what a route answered that it should not have
    on_failure: Callable[[str], None]
    epoch: int = 0
    mistakes: int = 0
    rewards: Counter[str] = field(default_factory=Counter)
    _due: list[dict[str, Any]] = field(default_factory=list)

    def finished(self, answer: Answer) -> None:
        """Answers to problems that come back are worth something."""
        if not answer.arrival.is_recurring:
            return
        for index, text in enumerate(answer.texts):
            value = reward(answer.arrival.problem, text)
            self._due.append({"request_id": answer.request_id, "index": index, "reward": value})

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for act in (self._epochs, self._rewards, self._mistakes):
                tasks.create_task(act(session))

    async def _epochs(self, session: aiohttp.ClientSession) -> None:
        # the first one by name, so that a mistake's epoch 0 is always past
        self.epoch = 1
        while True:
            await self._post(session, "/epoch", {"epoch": self.epoch})
            await asyncio.sleep(self.epoch_s)
            self.epoch += 1

    async def _rewards(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(_REWARDS_S)
            due, self._due = self._due, []
            if due and (counts := await self._post(session, "/rewards", {"rewards": due})) is not None:
                self.rewards.update(counts)

    async def _mistakes(self, session: aiohttp.ClientSession) -> None:
        rng = random.Random(f"mistakes/{self.seed}")
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / self.mistake_s))
            mistake = rng.choice(MISTAKES)
            path = f"{_PREFIX}{mistake.path}" if mistake.path else "/v1/completions"
            try:
                async with session.post(self.address + path, data=mistake.body, headers=_JSON) as response:
                    await response.read()
                    status = response.status
            except aiohttp.ClientError:
                # a body that is not read to its end: the connection goes with it
                status = 413 if 413 in mistake.statuses else 0
            self.mistakes += 1
            if status not in mistake.statuses:
                self.on_failure(f"{path} answered {mistake.body[:60]!r} with {status}, not {mistake.statuses}")

    async def _post(self, session: aiohttp.ClientSession, path: str, values: dict[str, Any]) -> Any:
        try:
            async with session.post(f"{self.address}{_PREFIX}{path}", json=values) as response:
                if response.status == 200:
                    return await response.json()
                self.on_failure(f"{path} answered with {response.status}: {(await response.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.on_failure(f"{path}: {type(error).__name__}: {error}")
        return None
