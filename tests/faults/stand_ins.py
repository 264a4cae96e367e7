"""What stands in for the world around an engine: threads, a device's events, a clock, a disk, grammars, and chance."""

import random
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from vllm.v1.request import Request

from vllm_specrollout.history.database import Database

_WRITE = Database.write


class Background(Executor):
    """Does what others do in threads of their own when it is let: between two steps."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], Any]] = deque()

    def submit(self, what: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._tasks.append(lambda: what(*args, **kwargs))
        return Future()

    def let(self) -> None:
        while self._tasks:
            self._tasks.popleft()()


class Event:
    """Of a device that may be late, though it never lets anybody wait."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self._chance.random() < 0.7


class Disk:
    """Full, or not. It takes what is written until it is turned."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full, self._patch = False, patch

    def turn(self) -> None:
        """Full from now on, or no longer."""
        self.is_full = not self.is_full
        self._patch.setattr(Database, "write", self._refuse if self.is_full else _WRITE)

    @staticmethod
    def _refuse(database: Database, *args: Any) -> list[int]:
        if database.path is None:
            return _WRITE(database, *args)
        raise sqlite3.OperationalError("database or disk is full")


class Clock:
    """Seconds that go by whenever somebody looks, sometimes many."""

    def __init__(self, chance: random.Random) -> None:
        self._now, self._chance = 0.0, chance
        self.is_even = False

    def __call__(self) -> float:
        if self.is_even:
            self._now += 3e-3
            return self._now
        self._now += self._chance.choice((1e-5, 1e-4, 1e-3, 1e-2)) if self._chance.random() < 0.99 else 10.0
        return self._now


class Grammars:
    """In place of vLLM's manager: a grammar by which even and odd tokens take turns."""

    vllm_config: Any = None

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self  # type: ignore[assignment]

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return tokens
        at = request.num_output_tokens
        good = [token % 2 == (at + i) % 2 for i, token in enumerate(tokens)]
        return tokens[: good.index(False)] if False in good else tokens

    def grammar_bitmask(self, requests: Any, names: Iterable[str], drafts: Any) -> list[list[int]]:
        masks = []
        for name in names:
            at, own = requests[name].num_output_tokens, list(drafts.get(name, ()))
            size = 1 + (own.index(-1) if -1 in own else len(own))
            masks.append([(at + i) % 2 for i in range(size)])
        return masks

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        begin = request.num_output_tokens - len(tokens)
        return not request.use_structured_output or all(t % 2 == (begin + i) % 2 for i, t in enumerate(tokens))


class Plain(random.Random):
    """Chooses the first of everything, and never what is rare."""

    def __init__(self) -> None:
        super().__init__(0)

    def random(self) -> float:
        return 1.0 - 1e-9

    def choice(self, seq: Any) -> Any:
        return seq[0]
