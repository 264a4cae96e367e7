"""The acts of a schedule over a live engine in this process, and what must hold of it.

What belongs here: how each act is done to vLLM. Every request's answer is known beforehand, under each of two sets of
weights, from stock vLLM. Other weights come when nobody runs; the same ones come, in every way there is, while some do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.e2e.identity.cases import Case
from tests.e2e.identity.engines import Engine
from tests.faults.breaking import HARMLESS, Broken, Errs, Knowing, drawn
from tests.faults.leftovers import KEPT, leftovers
from tests.faults.schedule import Schedule
from tests.faults.stand_ins import Disk
from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.budgets import OPTIONS
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.types import RequestView

VOCAB = 400
MOST_DRAFTED = 12
MOST_STEPS = 3000
GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
Answers = Mapping[str, list[list[int]]]
"""By problem, the tokens of each of a request's samples."""


def norm_of(runner: Any) -> torch.Tensor:
    """The weights that a set of weights differs in."""
    return runner.get_model().model.norm.weight


@torch.no_grad()
def write(norm: torch.Tensor, first: torch.Tensor, weights: int) -> None:
    factor = 0.6 + 0.8 * torch.rand(first.shape, generator=torch.Generator().manual_seed(weights)) if weights else 1.0
    norm.copy_(first * factor)


@dataclass
class Asked:
    """One request, and what its samples have so far."""

    name: str
    case: Case
    tokens: dict[int, list[int]] = field(default_factory=dict)
    is_over: bool = False
    is_aborted: bool = False


class Live:
    """One engine for many schedules.

    Args:
        truth: by set of weights, stock's answers to the cases.
        patch: of what the disk does.
    """

    def __init__(
        self, ours: Engine, cases: Sequence[Case], truth: Sequence[Answers], patch: pytest.MonkeyPatch
    ) -> None:
        self.ours, self.cases, self.truth, self._patch = ours, cases, truth, patch
        self.runner = ours.runner
        self.speculator = ours.runner.spec_rollout
        self._engine = ours.llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._own = list(self.speculator.drafters)
        self.runner.metrics = Metrics(("history", "ngram", "knowing", "broken"))
        self.speculator.listeners[:] = [self.runner.metrics]
        self._first = norm_of(self.runner).clone()
        self.weights = 0
        self.num_requests = self.num_tokens = self.num_steps = 0
        self.failures: set[str] = set()
        self.violations: list[str] = []
        # the engine's own names of its requests
        self._names: set[str] = set()
        add = self._core.scheduler.add_request

        def adding(request: Any) -> None:
            self._names.add(request.request_id)
            add(request)

        self._core.scheduler.add_request = adding

    # --- one schedule ------------------------------------------------------------------------------------------------

    def carry_out(self, schedule: Schedule) -> None:
        self._begin(schedule)
        for act in schedule.acts:
            getattr(self, "_" + act.what.replace(" ", "_"))(act.chance())
            assert not self.violations, self.violations[:3]
        self._drain()
        self._resume()
        self._end()

    def _begin(self, schedule: Schedule) -> None:
        chance = schedule.chance("setting")
        self._prefix, self._asked = f"schedule-{schedule.seed}", dict[str, Asked]()
        self._expected_failures: set[str] = set()
        self.disk = Disk(self._patch)
        self.sound = Knowing(self._next_of, VOCAB, schedule.seed, source=2)
        self.broken = Broken(Knowing(self._next_of, VOCAB, schedule.seed + 1, source=3))
        self.speculator.replace_drafters([*self._own, self.sound, self.broken])
        self._budget_name, self._seed = chance.choice([name for name in OPTIONS if name != "off"]), schedule.seed
        self.speculator.budget, self.speculator.backoff = self._budget(), Backoff()
        self.speculator.guard.failures.clear()
        self.speculator.guard.is_strict = False

    def _budget(self) -> Any:
        config = SpecRolloutConfig(budget=self._budget_name, max_draft_tokens=MOST_DRAFTED, max_depth=8)
        return make_budget(config, seed=self._seed)

    def _next_of(self, view: RequestView, count: int) -> list[int]:
        done = len(view.token_ids) - view.num_prompt_tokens
        return self.truth[self.weights][view.problem_id][0][done : done + count]

    # --- requests and steps ------------------------------------------------------------------------------------------

    def _ask(self, chance: random.Random) -> None:
        for case in chance.sample(list(self.cases), chance.randrange(1, 4)):
            self._ask_one(case)

    def _ask_one(self, case: Case) -> None:
        name = f"{self._prefix}-{len(self._asked)}"
        self._asked[name] = Asked(name, case)
        self._engine.add_request(name, {"prompt_token_ids": case.prompt}, case.sampling())

    def _running(self) -> list[Asked]:
        return [one for one in self._asked.values() if not one.is_over and not one.is_aborted]

    def _step(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 6)):
            self._step_once()

    def _step_once(self) -> None:
        if not self._engine.has_unfinished_requests():
            return
        if all(one.status is GRAMMAR for one in self._core.scheduler.requests.values()):
            time.sleep(0.001)  # it is made in a thread, and no step goes by
        else:
            self.num_steps += 1
        for output in self._engine.step():
            asked = self._asked[output.request_id]
            if asked.is_over or asked.is_aborted:
                self.violations.append(f"{asked.name} goes on after its end")
            wanted = self.truth[self.weights][asked.case.problem_id]
            for sample in output.outputs:
                got = list(sample.token_ids)
                asked.tokens[sample.index] = got
                stocks = wanted[sample.index]
                if got != (stocks if sample.finish_reason else stocks[: len(got)]):
                    self.violations.append(f"{asked.name} ({asked.case.name}): {got}, stock's {stocks}")
            asked.is_over = output.finished

    def _drain(self) -> None:
        begin = self.num_steps
        while self._engine.has_unfinished_requests():
            self._step_once()
            assert not self.violations, self.violations[:3]
            assert self.num_steps - begin < MOST_STEPS, f"stuck: {[one.name for one in self._running()]}"
        lost = [one.name for one in self._running()]
        assert not lost, f"lost: {lost}"

    def _abort(self, chance: random.Random) -> None:
        for one in self._running():
            if chance.random() < 0.4:
                one.is_aborted = True
                self._engine.abort_request([one.name])

    # --- drafters ----------------------------------------------------------------------------------------------------

    def _break_a_drafter(self, chance: random.Random) -> None:
        part, fault = drawn(chance)
        if part == "budget":
            budget = self.speculator.budget = Errs(MOST_DRAFTED, 8)
            budget.break_by(fault or "choose")
            self._expected_failures.add("budget")
        elif not self.broken.fault:
            self.broken.break_by(fault)
            if fault not in HARMLESS:
                self._expected_failures.add("drafter broken")

    def _mend(self, chance: random.Random) -> None:
        mended = Broken(Knowing(self._next_of, VOCAB, chance.getrandbits(16), source=3))
        self.broken = mended
        self.speculator.replace_one(self.speculator.names.index("broken"), mended)
        self.speculator.budget = self._budget()

    def _recover(self, chance: random.Random) -> None:
        self.broken.recover()

    # --- weights -----------------------------------------------------------------------------------------------------

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("model.norm.weight", norm_of(self.runner).clone())]

    def _reload(self, chance: random.Random) -> None:
        self.runner.get_model().load_weights(self._weights())

    def _push_in_pieces(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(2, 4)):
            self._reload(chance)
            self._step(chance)
        self._reset(chance)

    def _write_in_place(self, chance: random.Random) -> None:
        write(norm_of(self.runner), self._first, self.weights)
        self._reset(chance)

    def _push(self, chance: random.Random) -> None:
        """The other weights, when nobody runs: what does is aborted, or finished first."""
        if chance.random() < 0.5:
            self._engine.abort_request([one.name for one in self._running()])
            for one in self._running():
                one.is_aborted = True
        self._drain()
        self.weights = 1 - self.weights
        if chance.random() < 0.5:
            write(norm_of(self.runner), self._first, self.weights)
        else:
            norm = self._first.clone()
            write(norm, self._first, self.weights)
            self.runner.get_model().load_weights([("model.norm.weight", norm)])
        self._engine.reset_prefix_cache()

    def _empty_sign(self, chance: random.Random) -> None:
        self.runner.weights_version.suspect()

    def _reset(self, chance: random.Random) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=chance.random() < 0.6)

    # --- pauses ------------------------------------------------------------------------------------------------------

    def _pause(self, chance: random.Random) -> None:
        self._core.pause_scheduler(mode="keep", clear_cache=chance.random() < 0.5)
        self._meanwhile(chance)
        self._core.resume_scheduler()

    def _meanwhile(self, chance: random.Random) -> None:
        for act in chance.sample([self._ask, self._abort, self._epoch, self._reward], 2):
            act(chance)

    def _sleep(self, chance: random.Random, level: int) -> None:
        """vLLM's worker on CPU keeps its memory, so what sleeping engines lose is lost here."""
        self._core.sleep(level=level, mode="keep")
        with torch.no_grad():
            for cache in self.runner.kv_caches:
                cache.zero_()
            if level == 2:
                norm_of(self.runner).zero_()
        self._meanwhile(chance)
        if level == 2:
            write(norm_of(self.runner), self._first, self.weights)
        self._core.wake_up(["weights"] if chance.random() < 0.5 else None)
        self._core.wake_up()

    def _sleep_1(self, chance: random.Random) -> None:
        self._sleep(chance, 1)

    def _sleep_2(self, chance: random.Random) -> None:
        self._sleep(chance, 2)

    # --- the history -------------------------------------------------------------------------------------------------

    def _epoch(self, chance: random.Random) -> None:
        self.ours.llm.collective_rpc("spec_rollout_begin_epoch")

    def _reward(self, chance: random.Random) -> None:
        rewards = [((name, "nobody"), chance.choice((0.0, 1.0))) for name in self._asked if chance.random() < 0.3]
        self.ours.llm.collective_rpc("spec_rollout_report_rewards", args=(rewards,))

    def _disk_full(self, chance: random.Random) -> None:
        self.disk.turn()

    # --- what must have come of it -----------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Nobody breaks anything more: whoever is well drafts, and drafts are met."""
        self.speculator.budget, self.speculator.backoff = FixedBudget(MOST_DRAFTED, 8), Backoff()
        assert self.sound in self.speculator.drafters
        before = self.runner.stats.accepted
        self._ask_one(self.cases[0])
        self._drain()
        assert self.runner.stats.accepted > before, "drafting does not resume"

    def _end(self) -> None:
        if self.disk.is_full:
            self.disk.turn()
        # what has ended is told with one more step
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        # whoever is on probation comes back, well
        self.broken.recover()
        self.speculator._try_again(1 << 40)
        failures = set(self.speculator.guard.failures)
        self.failures |= failures
        assert failures <= self._expected_failures, f"failed besides: {self.speculator.guard.failures}"
        self._check_leftovers()
        self.speculator.guard.is_strict = True
        self.num_requests += len(self._asked)
        self.num_tokens += sum(len(own) for one in self._asked.values() for own in one.tokens.values())

    def _check_leftovers(self) -> None:
        assert not self.runner.requests and not self.runner.book._entries, "the runner still has requests"
        pool = self._core.scheduler.kv_cache_manager.block_pool
        self._engine.reset_prefix_cache()
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are lost"
        names = self._names | set(self._asked)
        roots = {
            "runner.spec_rollout": self.speculator, "runner.book": self.runner.book, "broken": self.broken,
            "runner.drafting": self.runner.drafting, "scheduler": self._core.scheduler,
        }  # fmt: skip
        found = [path for path in leftovers(roots, names) if not KEPT.search(path)]
        assert not found, f"left behind: {sorted(found)[:5]}"
        self._names.clear()
