"""What is done to an engine, and what must have come of it: the acts of a schedule, one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.faults.breaking import HARMLESS, Broken, Errs, Knowing, Reckless, drawn
from tests.faults.devices import prompted
from tests.faults.hosts import MOST_DRAFTED, Asked, Engine
from tests.faults.leftovers import KEPT, leftovers
from tests.faults.schedule import Act
from tests.faults.stand_ins import Plain
from tests.faults.target import VOCAB
from tests.unit.replay.builders import ListSink
from tests.unit.report.pages import trace_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.probation import FIRST_PATIENCE
from vllm_specrollout.replay.records import Arrival, End
from vllm_specrollout.report.walk import walk

MOST_STEPS = 3000
MOST_ASKED = 200


class Scheduled(Engine):
    """An engine that carries out its schedule."""

    # --- acts --------------------------------------------------------------------------------------------------------

    def do(self, act: Act) -> None:
        getattr(self, "_" + act.what.replace(" ", "_"))(act.chance())

    def _ask(self, chance: random.Random, prompt: list[int] | None = None, most: int | None = None) -> None:
        """Requests of one prompt: samples, or one."""
        prompt = prompt or chance.choice(self._prompts)
        grammar = StructuredOutputsParams(regex="turns") if chance.random() < 0.2 else None
        stops = [chance.randrange(VOCAB)] if chance.random() < 0.3 else []
        for _ in range(chance.choice((1, 1, 2, 3))):
            self._count += 1
            params = SamplingParams(
                temperature=0.0, seed=chance.randrange(2), max_tokens=most or chance.randrange(1, 40),
                stop_token_ids=stops, structured_outputs=grammar,
                presence_penalty=0.5 if chance.random() < 0.1 else 0.0,
                extra_args={"spec_rollout": {"enabled": False}} if chance.random() < 0.1 else None,
            )  # fmt: skip
            name = f"s{self._count}-{chance.getrandbits(32):08x}"
            request = Request(name, prompt, params, None, block_hasher=self._hasher)
            self.scheduler.structured_output_manager.grammar_init(request)
            if request.structured_output_request is not None:
                request.status = RequestStatus.WAITING
            wanted = prompted(prompt, params)
            self.asked[name] = Asked(name, wanted, params.max_tokens or 0, frozenset(stops))
            self.scheduler.add_request(request)

    def _step(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 5)):
            self.step()

    def _abort(self, chance: random.Random) -> None:
        for one in list(self.running()):
            if chance.random() < 0.4:
                one.is_aborted = True
                self.scheduler.finish_requests(one.name, RequestStatus.FINISHED_ABORTED)

    def _break_a_drafter(self, chance: random.Random) -> None:
        part, fault = drawn(chance)
        if part == "budget":
            budget = Errs(MOST_DRAFTED, 8) if fault else Reckless(MOST_DRAFTED, 8)
            self.speculator.budget = budget
            if isinstance(budget, Errs):
                budget.break_by(fault)
                self._expected_failures.add("budget")
        elif not self.broken.fault:
            self.broken.break_by(fault)
            if fault not in HARMLESS:
                self._expected_failures.add("drafter broken")

    def _mend(self, chance: random.Random) -> None:
        """A drafter that is well takes the place of the one that is not; and so does a budget."""
        self.broken = Broken(Knowing(self._truth, VOCAB, chance.getrandbits(16), source=1))
        self.speculator.replace_one(1, self.broken)
        if chance.random() < 0.5:
            self.speculator.budget = self._budget()

    def _recover(self, chance: random.Random) -> None:
        self.broken.recover()

    def _touch(self) -> None:
        self.runner.weights_version.touch()
        self._is_touched = True

    def _reload(self, chance: random.Random) -> None:
        self._touch()

    def _push(self, chance: random.Random) -> None:
        self._new_weights()
        self._touch()
        if chance.random() < 0.7:
            self._reset(chance)

    def _push_in_pieces(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(2, 5)):
            self._new_weights()
            self._touch()
            if chance.random() < 0.3:
                self.step()
        self._reset(chance)

    def _new_weights(self) -> None:
        self._drain()
        self.device.weights += 1

    def _write_in_place(self, chance: random.Random) -> None:
        self._new_weights()
        self._reset(chance)

    def _empty_sign(self, chance: random.Random) -> None:
        self.runner.weights_version.suspect()

    def _reset(self, chance: random.Random) -> None:
        self._drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=chance.random() < 0.6)
        self._is_signalled = True

    def _pause(self, chance: random.Random) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._meanwhile(chance)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._is_signalled = True

    def _meanwhile(self, chance: random.Random) -> None:
        for act in chance.sample([self._ask, self._abort, self._epoch, self._reward, self._step], 2):
            act(chance)

    def _sleep(self, chance: random.Random, is_lost: bool) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.runner.settle()
        self.device.cache.lose()
        self._meanwhile(chance)
        if is_lost:
            self._new_weights()
            self._touch()
        self.runner.weights_version.suspect()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._is_signalled = True

    def _sleep_1(self, chance: random.Random) -> None:
        self._sleep(chance, is_lost=False)

    def _sleep_2(self, chance: random.Random) -> None:
        self._sleep(chance, is_lost=True)

    def _epoch(self, chance: random.Random) -> None:
        self.history.begin_epoch(None if chance.random() < 0.7 else self.history.store.epoch + chance.randrange(5))

    def _reward(self, chance: random.Random) -> None:
        for one in self.asked.values():
            if chance.random() < 0.2:
                name = one.name[: -len("-00000000")]
                self.history.report_reward([name, "nobody"], chance.choice((0.0, 1.0, -2.5)))

    def _disk_full(self, chance: random.Random) -> None:
        self.disk.turn()

    # --- what must have come of it -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """The whole schedule, to the end of all requests, and what must hold then."""
        for act in self.schedule.acts:
            self.do(act)
            assert not self.violations, self.violations[:3]
        self._finish()
        self._resume()
        self._end()

    def _finish(self) -> None:
        begin = self.num_steps
        while self.scheduler.has_requests() or self._flying:
            self.step()
            assert not self.violations, self.violations[:3]
            assert self.num_steps - begin < MOST_STEPS, f"stuck: {[one.name for one in self.running()]}"
        lost = [one.name for one in self.running()]
        assert not lost, f"lost: {lost}"

    def _resume(self) -> None:
        """Nobody breaks anything more: whoever is well drafts, and drafts are met."""
        self.speculator.budget, self.clock.is_even = FixedBudget(MOST_DRAFTED, 8), True
        assert self.sound in self.speculator.drafters
        before = self.runner.stats.accepted
        self._ask_until(lambda: self.runner.stats.accepted > before, "drafting does not resume")
        # what failed and is well again is not replaced: it comes back
        self.broken.recover()
        count, left = self.broken.num_asked, self.speculator.probation.steps_left(self.broken, self.speculator._step)
        if 0 < left <= FIRST_PATIENCE:
            self._ask_until(lambda: self.broken.num_asked > count, "who is well again is not asked again")
            self.seen.add("a drafter came back by itself")

    def _ask_until(self, holds: Callable[[], bool], otherwise: str) -> None:
        """One request after the other; who has taken more than its share of the time has to be waited for."""
        for _ in range(MOST_ASKED):
            self._ask(Plain(), self._prompts[0], 80)
            self._finish()
            self.runner.settle()
            if holds():
                return
        raise AssertionError(otherwise)

    def _end(self) -> None:
        self.runner.settle()
        for ending in self.runner.unfinished():
            self.speculator.finish(ending)
        self.speculator.close()
        failures = set(self.speculator.guard.failures)
        assert failures <= self._expected_failures, f"failed besides: {self.speculator.guard.failures}"
        assert not set(self.told) - set(self._expected), "more was told than ended"
        for name, (tokens, version) in self._expected.items():
            told = self.told.get(name)
            if told is None:
                assert not tokens, f"nobody was told that {name} ended"
                continue
            assert told.token_ids.tolist() == tokens, f"{name} was told as {told.token_ids.tolist()}, not {tokens}"
            assert told.weights_version == version, f"{name}: weights {told.weights_version}, not {version}"
        withheld = self.runner.drafting.withheld
        assert not withheld.differing, "plain decoding does not find what was withheld"
        if withheld.checked:
            self.seen.add("what was withheld was found again")
        self._check_leftovers()

    def _check_leftovers(self) -> None:
        scheduler = self.scheduler
        scheduler.reset_prefix_cache()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1, "blocks are lost"
        names = {name for one in self.asked for name in (one, one[: -len("-00000000")])}
        roots = {"runner": self.runner, "scheduler": scheduler, "drafter": self.broken}
        if self.sink is not None:
            self._check_trace(self.sink)
        found = [path for path in leftovers(roots, names) if not KEPT.search(path)]
        assert not found, f"left behind: {sorted(found)[:5]}"

    def _check_trace(self, sink: ListSink) -> None:
        """Each request that came has its end in it, and the picture all that was verified."""
        came, went = ({one.request for one in sink.records if isinstance(one, kind)} for kind in (Arrival, End))
        assert came == went and came, "a trace lacks ends"
        trace = trace_of(sink)
        table = walk(trace)
        told = [one for step in trace.steps for one in step.verified]
        assert table.nodes.sum() == sum(one.drafted for one in told), "a picture lacks drafts"
        assert table.accepted.sum() == sum(one.accepted for one in told), "a picture lacks accepted nodes"
        self.seen.add("a trace")
