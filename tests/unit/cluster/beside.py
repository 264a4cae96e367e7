"""A drafter's process without a model, beside an engine without one: what both do is written down in their order.

python beside.py ADDRESS DIARY
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.unit.cluster import standin
from vllm_specrollout.cluster.child import Command, WarmDrafter
from vllm_specrollout.cluster.mail import MailServer
from vllm_specrollout.cluster.reports import Given
from vllm_specrollout.cluster.serving import Grown, Serving
from vllm_specrollout.config.devices import shared


def write(diary: str, what: str) -> None:
    """A line, behind whatever stands there: what several processes write does not mix."""
    with open(diary, "a", encoding="ascii") as file:
        file.write(f"{what}\n")


class Silent:
    """An engine that has nothing to say."""

    model, device, vocab_size, max_requests, most_tokens = "small", "", 64, 4, 100

    def __init__(self, diary: str) -> None:
        self._diary, self._gpus = diary, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def add(self, ask: object, sampling: object) -> None: ...

    def abort(self, names: Sequence[str]) -> None: ...

    def step(self) -> list[Grown]:
        return []

    def sleep(self) -> None:
        write(self._diary, f"asleep on {self._gpus}")

    def wake(self) -> None:
        write(self._diary, f"awake on {self._gpus}")


@dataclass(frozen=True, slots=True)
class Beside(Command):
    """Its model's name is the diary's."""

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-m", "tests.unit.cluster.beside", self.address, self.model]


class Engine(standin.Replica):
    """One that works, with such a drafter beside it: as `worker.calls.DrafterMixin` and its engine do."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        super().__init__(engine)
        self._diary = os.path.join(engine["diary"], os.environ["CUDA_VISIBLE_DEVICES"])
        self._beside: WarmDrafter | None = None

    async def give(self, runs: Sequence[Given]) -> None:
        if self._beside is not None:
            self._beside.sleep()
        write(self._diary, "prefill")
        self._own.give(runs)

    async def rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if method == "spec_rollout_warm":
            self._beside = self._beside or WarmDrafter(Beside.of(self._diary, shared("cuda", 0), {}))
        if method != "spec_rollout_standing" or self._beside is None:
            return await super().rpc(method, args, kwargs)
        if not self._own.live:
            self._beside.wake()
        return [{**self._standing(), "drafter": self._beside.address}]

    def close(self) -> None:
        super().close()
        if self._beside is not None:
            self._beside.stop()


if __name__ == "__main__":
    address, diary = sys.argv[1:3]
    parent = os.getppid()
    office = MailServer(address)
    serving = Serving(Silent(diary), office, lambda: os.getppid() != parent)
    serving.rest(True)
    serving.run()
