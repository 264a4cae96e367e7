"""What is done to an engine, and what must have come of it: the acts of a schedule, one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.faults.acting import MOST_DRAFTED
from tests.faults.devices import prompted
from tests.faults.hosts import Asked, Engine
from tests.faults.stand_ins import Plain
from tests.faults.target import VOCAB
from tests.unit.replay.builders import ListSink
from tests.unit.report.pages import trace_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.probation import FIRST_PATIENCE
from vllm_specrollout.replay.records import Arrival, End
from vllm_specrollout.report.walk import walk

MOST_ASKED = 200


class Scheduled(Engine):
    """An engine that carries out its schedule."""

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

    def _abort(self, chance: random.Random) -> None:
        for one in self.running():
            if chance.random() < 0.4:
                one.is_aborted = True
                self.scheduler.finish_requests(one.name, RequestStatus.FINISHED_ABORTED)

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

    def _reset(self, chance: random.Random) -> None:
        self._drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=chance.random() < 0.6)
        self._is_signalled = True

    def _pause(self, chance: random.Random) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._meanwhile(chance, self._step)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._is_signalled = True

    def _sleep(self, chance: random.Random, level: int) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.runner.settle()
        self.device.cache.lose()
        self._meanwhile(chance, self._step)
        if level == 2:
            self._new_weights()
            self._touch()
        self.runner.weights_version.suspect()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._is_signalled = True

    def _epoch(self, chance: random.Random) -> None:
        self.history.begin_epoch(None if chance.random() < 0.7 else self.history.store.epoch + chance.randrange(5))

    def _reward(self, chance: random.Random) -> None:
        for one in self.asked.values():
            if chance.random() < 0.2:
                name = one.name[: -len("-00000000")]
                self.history.report_reward([name, "nobody"], chance.choice((0.0, 1.0, -2.5)))

    # --- what must have come of it -----------------------------------------------------------------------------------

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
        if self.sink is not None:
            self._check_trace(self.sink)
        self.scheduler.reset_prefix_cache()
        names = {name for one in self.asked for name in (one, one[: -len("-00000000")])}
        roots = {"runner": self.runner, "scheduler": self.scheduler, "drafter": self.broken}
        self._check_leftovers(self.scheduler.kv_cache_manager.block_pool, roots, names)

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
