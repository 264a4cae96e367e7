"""The acts of a schedule over a live engine in this process, and what must hold of it.

What belongs here: how each act is done to vLLM. Every request's answer is known beforehand, under each of two sets of
weights, from stock vLLM. Other weights come when nobody runs; the same ones come, in every way there is, while some do.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.e2e.identity.cases import Case
from tests.e2e.identity.engines import Engine
from tests.faults.acting import MOST_DRAFTED, Acting, Asked
from tests.faults.schedule import Schedule
from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.types import RequestView

VOCAB = 400
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


class Live(Acting):
    """One engine for many schedules.

    Args:
        truth: by set of weights, stock's answers to the cases.
        patch: of what the disk does.
    """

    vocab_size, source = VOCAB, 2

    def __init__(
        self, ours: Engine, cases: Sequence[Case], truth: Sequence[Answers], patch: pytest.MonkeyPatch
    ) -> None:
        self.ours, self.cases, self.answers, self._patch = ours, cases, truth, patch
        self.runner = ours.runner
        self.speculator = ours.runner.spec_rollout
        self._engine = ours.llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._own = list(self.speculator.drafters)
        self.runner.metrics = Metrics(("history", "ngram", "knowing", "broken"))
        self.speculator.listeners[:] = [self.runner.metrics]
        self._first = norm_of(self.runner).clone()
        self.weights = 0
        self.num_requests = self.num_tokens = 0
        self.failures: set[str] = set()
        # the engine's own names of its requests
        self._names: set[str] = set()
        add = self._core.scheduler.add_request

        def adding(request: Any) -> None:
            self._names.add(request.request_id)
            add(request)

        self._core.scheduler.add_request = adding

    # --- one schedule ------------------------------------------------------------------------------------------------

    def meet(self, schedule: Schedule) -> None:
        self._begin(schedule, self._patch)
        self.speculator.replace_drafters([*self._own, self.sound, self.broken])
        self.speculator.budget, self.speculator.backoff = self._choose_budget(schedule.chance("setting")), Backoff()
        self.speculator.guard.failures.clear()
        self.speculator.guard.is_strict = False

    def _truth(self, view: RequestView, count: int) -> list[int]:
        done = len(view.token_ids) - view.num_prompt_tokens
        return self.answers[self.weights][view.problem_id][0][done : done + count]

    # --- requests and steps ------------------------------------------------------------------------------------------

    def _ask(self, chance: random.Random) -> None:
        for case in chance.sample(list(self.cases), chance.randrange(1, 4)):
            self._ask_one(case)

    def _ask_one(self, case: Case) -> None:
        name = f"schedule-{self.schedule.seed}-{len(self.asked)}"
        self.asked[name] = Asked(name, case, {})
        self._engine.add_request(name, {"prompt_token_ids": case.prompt}, case.sampling())

    def has_requests(self) -> bool:
        return self._engine.has_unfinished_requests()

    def step(self) -> None:
        if not self.has_requests():
            return
        if all(one.status is GRAMMAR for one in self._core.scheduler.requests.values()):
            time.sleep(0.001)  # it is made in a thread, and no step goes by
        else:
            self.num_steps += 1
        for output in self._engine.step():
            asked = self.asked[output.request_id]
            self._check(not asked.is_over and not asked.is_aborted, f"{asked.name} goes on after its end")
            wanted = self.answers[self.weights][asked.wanted.problem_id]
            for sample in output.outputs:
                got = asked.tokens[sample.index] = list(sample.token_ids)
                stocks = wanted[sample.index]
                holds = got == (stocks if sample.finish_reason else stocks[: len(got)])
                self._check(holds, f"{asked.name} ({asked.wanted.name}): {got}, stock's {stocks}")
            asked.is_over = output.finished

    def cancel(self, name: str) -> None:
        self._engine.abort_request([name])

    # --- weights -----------------------------------------------------------------------------------------------------

    def _load(self, norm: torch.Tensor) -> None:
        self.runner.get_model().load_weights([("model.norm.weight", norm.clone())])

    def _reload(self, chance: random.Random) -> None:
        self._load(norm_of(self.runner))

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
            self._abort(chance, share=1.0)
        self._finish()
        self.weights = 1 - self.weights
        if chance.random() < 0.5:
            write(norm_of(self.runner), self._first, self.weights)
        else:
            norm = self._first.clone()
            write(norm, self._first, self.weights)
            self._load(norm)
        self._engine.reset_prefix_cache()

    def _reset(self, chance: random.Random) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=chance.random() < 0.6)

    # --- pauses ------------------------------------------------------------------------------------------------------

    def _pause(self, chance: random.Random) -> None:
        self._core.pause_scheduler(mode="keep", clear_cache=chance.random() < 0.5)
        self._meanwhile(chance)
        self._core.resume_scheduler()

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

    # --- the history -------------------------------------------------------------------------------------------------

    def _epoch(self, chance: random.Random) -> None:
        self.ours.llm.collective_rpc("spec_rollout_begin_epoch")

    def _reward(self, chance: random.Random) -> None:
        rewards = [((name, "nobody"), chance.choice((0.0, 1.0))) for name in self.asked if chance.random() < 0.3]
        self.ours.llm.collective_rpc("spec_rollout_report_rewards", args=(rewards,))

    # --- what must have come of it -----------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Nobody breaks anything more: whoever is well drafts, and drafts are met."""
        self.speculator.budget, self.speculator.backoff = FixedBudget(MOST_DRAFTED, 8), Backoff()
        assert self.sound in self.speculator.drafters
        before = self.runner.stats.accepted
        self._ask_one(self.cases[0])
        self._finish()
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
        self.failures |= set(self.speculator.guard.failures)
        assert not self.runner.requests and not self.runner.book._entries, "the runner still has requests"
        self._engine.reset_prefix_cache()
        roots = {
            "runner.spec_rollout": self.speculator, "runner.book": self.runner.book, "broken": self.broken,
            "runner.drafting": self.runner.drafting, "scheduler": self._core.scheduler,
        }  # fmt: skip
        names = self._names | set(self.asked)
        self._check_leftovers(self._core.scheduler.kv_cache_manager.block_pool, roots, names)
        self._names.clear()
        self.speculator.guard.is_strict = True
        self.num_requests += len(self.asked)
        self.num_tokens += sum(len(own) for one in self.asked.values() for own in one.tokens.values())
