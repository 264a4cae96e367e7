"""What schedules do to an engine, with a model or without one: the acts that are the same for both, and their order."""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.breaking import HARMLESS, Broken, Errs, Knowing, Reckless, drawn
from tests.faults.leftovers import KEPT, leftovers
from tests.faults.schedule import Schedule
from tests.faults.stand_ins import Disk
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.budgets import OPTIONS

MOST_DRAFTED = 12
MOST_STEPS = 3000


@dataclass
class Asked:
    """One request, as its client knows it."""

    name: str
    # what its answer follows from
    wanted: Any
    # those that came
    tokens: Any
    most: int = 0
    stops: frozenset[int] = frozenset()
    is_over: bool = False
    is_aborted: bool = False


class Acting:
    """Whoever inherits says how an engine is asked and stepped, how its weights change, and how it sleeps."""

    vocab_size: int
    # of the drafter that knows; the one that breaks stands behind it
    source: int
    runner: Any
    speculator: Any
    num_steps = 0

    def _begin(self, schedule: Schedule, patch: pytest.MonkeyPatch) -> None:
        self.schedule, self.disk = schedule, Disk(patch)
        self.asked, self.violations, self._expected_failures = dict[str, Asked](), list[str](), set[str]()
        # (part, fault)
        self.broke = set[tuple[str, str]]()
        self.sound, self.broken = self._knowing(schedule.seed, 0), Broken(self._knowing(schedule.seed + 1, 1))

    def _knowing(self, seed: int, place: int) -> Knowing:
        return Knowing(self._truth, self.vocab_size, seed, source=self.source + place)

    def _choose_budget(self, chance: random.Random) -> Any:
        self._budget_name = chance.choice([name for name in OPTIONS if name != "off"])
        return self._budget()

    def _budget(self) -> Any:
        config = SpecRolloutConfig(budget=self._budget_name, max_draft_tokens=MOST_DRAFTED, max_depth=8)
        return make_budget(config, seed=self.schedule.seed)

    def carry_out(self) -> None:
        """The whole schedule, to the end of all requests, and what must hold then."""
        for act in self.schedule.acts:
            getattr(self, "_" + act.what.replace(" ", "_"))(act.chance())
            assert not self.violations, self.violations[:3]
        self._finish()
        self._resume()
        self._end()

    def running(self) -> list[Asked]:
        return [one for one in self.asked.values() if not one.is_over and not one.is_aborted]

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def _finish(self) -> None:
        begin = self.num_steps
        while self.has_requests():
            self.step()
            assert not self.violations, self.violations[:3]
            assert self.num_steps - begin < MOST_STEPS, f"stuck: {[one.name for one in self.running()]}"
        lost = [one.name for one in self.running()]
        assert not lost, f"lost: {lost}"

    def _check_leftovers(self, pool: Any, roots: Mapping[str, Any], names: Collection[str]) -> None:
        failures = set(self.speculator.guard.failures)
        assert failures <= self._expected_failures, f"failed besides: {self.speculator.guard.failures}"
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are lost"
        found = [path for path in leftovers(roots, names) if not KEPT.search(path)]
        assert not found, f"left behind: {sorted(found)[:5]}"

    # --- acts --------------------------------------------------------------------------------------------------------

    def _step(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 5)):
            self.step()

    def _abort(self, chance: random.Random, share: float = 0.4) -> None:
        for one in self.running():
            if chance.random() < share:
                one.is_aborted = True
                self.cancel(one.name)

    def _break_a_drafter(self, chance: random.Random) -> None:
        part, fault = drawn(chance)
        if part == "budget":
            budget = self.speculator.budget = Errs(MOST_DRAFTED, 8) if fault else Reckless(MOST_DRAFTED, 8)
            if isinstance(budget, Errs):
                budget.break_by(fault)
                self._expected_failures.add("budget")
        elif not self.broken.fault:
            self.broken.break_by(fault)
            if fault not in HARMLESS:
                self._expected_failures.add("drafter broken")
        else:
            return
        self.broke.add((part, fault))

    def _mend(self, chance: random.Random) -> None:
        """A drafter that is well takes the place of the one that is not; and so does a budget."""
        self.broken = Broken(self._knowing(chance.getrandbits(16), 1))
        self.speculator.replace_one(self.source + 1, self.broken)
        if chance.random() < 0.5:
            self.speculator.budget = self._budget()

    def _recover(self, chance: random.Random) -> None:
        self.broken.recover()

    def _empty_sign(self, chance: random.Random) -> None:
        self.runner.weights_version.suspect()

    def _meanwhile(self, chance: random.Random, *more: Callable[[random.Random], None]) -> None:
        for act in chance.sample([self._ask, self._abort, self._epoch, self._reward, *more], 2):
            act(chance)

    def _sleep_1(self, chance: random.Random) -> None:
        self._sleep(chance, 1)

    def _sleep_2(self, chance: random.Random) -> None:
        self._sleep(chance, 2)

    def _disk_full(self, chance: random.Random) -> None:
        self.disk.turn()
