"""A whole engine but for the model and the processes: vLLM's scheduler, our runner, driven from outside.

What belongs here: the steps of an engine in vLLM's order, what schedules do to it, and what must have come of it.
"""

import functools
import math
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus
from vllm_specrollout.kernels.draft_choice.naive import choose
from vllm_specrollout.kernels.tree_rows.naive import lay_out

from tests.faults.acting import MOST_DRAFTED, Acting, Asked
from tests.faults.breaking import Deaf
from tests.faults.devices import Device, Output, RunnerV1, RunnerV2, prompted
from tests.faults.schedule import Schedule
from tests.faults.stand_ins import Background, Clock, Event, Grammars, Plain
from tests.faults.target import VOCAB, Cache, extend, following, state_of
from tests.unit.replay.builders import ListSink
from tests.unit.report.pages import trace_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.config.drafters import HistoryConfig, NgramConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.drafters.looked_up import LookedUpHistory, LookedUpNgram
from vllm_specrollout.drafters.ngram import NgramDrafter
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.observe.probation import FIRST_PATIENCE
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.replay.records import Arrival, End, Header
from vllm_specrollout.report.walk import walk
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import Answer, RequestView
from vllm_specrollout.worker.scheduler import endings_of

KINDS = ("v1", "v2", "v2 ahead")
MOST_REQUESTS = 6
MOST_ASKED = 200
WITHOUT_A_DEVICE: dict[str, Any] = {
    "inputs.lay_out": lay_out,
    "lane.async_copy_to_np": lambda words: words.clone().numpy(),
    "device_drafts.get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
    "device_drafts.choose": choose,
    "device_drafts.Lookup": lambda *args, **kwargs: None,
}
"""What of a V2 device is called by its name -> what stands in for it."""


class Engine(Acting):
    """One engine of a kind, for one schedule.

    Args:
        kind: of KINDS.
        scheduler: makes vLLM's, for a kind and a number of blocks of so many tokens.
        folder: where a history is kept, if the schedule wants that.
    """

    vocab_size, source = VOCAB, 0

    def __init__(self, schedule: Schedule, kind: str, bench: Any, folder: str, patch: pytest.MonkeyPatch) -> None:
        self.kind, self._patch = kind, patch
        self._begin(schedule, patch)
        chance = schedule.chance("setting")
        self.clock = Clock(schedule.chance("clock"))
        self.block_size = bench.block_size
        # some have hardly room for two
        self.num_blocks = chance.choice((26, 40, 200))
        self.scheduler = bench.scheduler(kind, self.num_blocks, Grammars())
        self.device = Device(Cache(self.block_size))
        self.told: dict[str, Answer] = {}
        self._expected: dict[str, tuple[list[int], int]] = {}
        self._count = 0
        self._hasher = get_request_block_hasher(self.block_size, sha256)
        self._flying: deque[tuple[Any, Any, int]] = deque()
        # which weights were noticed, as it has to be
        self._version = self._computed = 0
        self._seen: int | None = None
        self._is_touched = self._is_signalled = False
        self._prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))] for _ in range(3)]
        # what schedules are to bring about now and then
        self.seen: set[str] = set()
        self._make_speculator(chance, folder)
        self._make_runner()

    # --- set-up ------------------------------------------------------------------------------------------------------

    def _make_speculator(self, chance: random.Random, folder: str) -> None:
        history = HistoryConfig(dir=folder if chance.random() < 0.4 else "", max_mib=1, epochs=2)
        self.background = Background()
        store = HistoryStore(history, self.background.submit)
        if self.kind == "v1":
            cache = IndexCache(history, store, lambda: self.history._make_index(), self.background, self.clock)
            self.history: Any = HistoryDrafter(history, MOST_DRAFTED, 2, store=store, cache=cache)
            ngram: Any = NgramDrafter(NgramConfig(), MOST_DRAFTED, 3)
        else:
            self.history, ngram = LookedUpHistory(history, self._texts, store=store), LookedUpNgram()
        drafters = [self.sound, self.broken, self.history, ngram]
        own = self.schedule.chance("beside")
        self.metrics = Metrics(("knowing 0", "broken", "history", "ngram"))
        self.speculator = Speculator(
            drafters, self._choose_budget(chance), vocab_size=VOCAB, guard=Guard(is_strict=False),
            listeners=[*self._watching(own), self.metrics], time_share=own.choice((math.inf, math.inf, 1.0, 0.2)),
            clock=self.clock,
        )  # fmt: skip
        finish = self.sound.finish

        def finishing(ending: Answer) -> None:
            self._check(ending.request_id not in self.told, f"{ending.request_id} ended twice")
            self.told[ending.request_id] = ending
            finish(ending)

        self.sound.finish = finishing  # type: ignore[method-assign]

    def _texts(self, store: HistoryStore) -> Texts:
        """Of few problems and tokens, so that texts come and go."""
        config = HistoryConfig(max_mib=1, epochs=2)
        return Texts(config, store, most_problems=2, past=2, most_tokens=2048, executor=self.background)

    def _watching(self, chance: random.Random) -> list[Listener]:
        """Who watches beside the metrics."""
        self.sink: ListSink | None = None
        kind = chance.random()
        if kind < 0.1:
            self._expected_failures.add("watching")
            return [Deaf()]
        if kind > 0.3:
            return []
        self.sink = ListSink()
        header = Header(runner=self.kind[:2], max_num_seqs=MOST_REQUESTS, max_draft_tokens=MOST_DRAFTED, max_depth=8)
        return [Recorder(header, self.sink, self.clock)]

    def _make_runner(self) -> None:
        patched, chance = SimpleNamespace(perf_counter=self.clock), self.schedule.chance("withheld")
        self._patch.setattr("vllm_specrollout.worker.drafting.time", patched)
        # schedules are short, so that some verdicts are withheld in a few
        self._patch.setattr("vllm_specrollout.worker.withheld.STEPS_PER_TOKEN", chance.choice((2, 20, 250)))
        self._patch.setattr("vllm_specrollout.worker.v1.runner.time", patched)
        late = functools.partial(Event, self.schedule.chance("device"))
        cuda = SimpleNamespace(cuda=SimpleNamespace(Event=late))
        self._patch.setattr("vllm_specrollout.worker.v2.runner.torch", cuda)
        if self.kind == "v1":
            self.runner: Any = RunnerV1(self.device, self.speculator, self.metrics, MOST_REQUESTS)
        else:
            for name, stands_in in WITHOUT_A_DEVICE.items():
                self._patch.setattr(f"vllm_specrollout.worker.v2.{name}", stands_in)
            self.runner = RunnerV2(
                self.device, self.speculator, self.metrics, MOST_DRAFTED, MOST_REQUESTS, self.history, self.clock, late,
                self.schedule.seed,
            )  # fmt: skip
            self.scheduler.meet_workers(SimpleNamespace(take_draft_token_ids=self.runner.take_draft_token_ids))
        self.runner.weights_version._look = lambda: str(self.device.weights).encode()

    def _truth(self, view: RequestView, count: int) -> list[int]:
        """What comes, for drafters that know; and whether they are shown the request as it is."""
        row, shown = self.device.rows.get(view.request_id), view.token_ids.tolist()
        # on V2 the device goes ahead of what is home
        known = [] if row is None else row.tokens if self.kind == "v1" else row.tokens[: len(shown)]
        self._check(row is not None and shown == known, f"{view.request_id} is shown otherwise")
        if row is None:
            return []
        return [*row.tokens[len(shown) :], *row.comes(count, self.device.weights)][:count]

    # --- steps -------------------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        return self.scheduler.has_requests() or bool(self._flying)

    def step(self) -> None:
        """As vLLM's engine core does it."""
        if not self.has_requests():
            return
        self.num_steps += 1
        self.background.let()
        if self.speculator._asking.overruns:
            self.seen.add("a drafter was in debt")
        deferred = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._note(output)
            done = self.runner.execute_model(output)
            ran = output.total_num_scheduled_tokens > 0
            if self.kind == "v2 ahead":
                if ran and output.pending_structured_output_tokens:
                    deferred = output
                else:
                    self._fly(output, done)
                    if len(self._flying) < 2 and (ran or self.scheduler.has_requests()):
                        return
            else:
                self._fly(output, done)
        if self._flying:
            self._land()
        if deferred is not None:
            self._fly(deferred, None)

    def _fly(self, output: Any, done: Any) -> None:
        if done is None:
            done = self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(output))
        self._flying.append((output, done, self.device.weights))

    def _land(self) -> None:
        output, done, weights = self._flying.popleft()
        if isinstance(done, Output):
            done = done.get_output()
        for outputs in self.scheduler.update_from_output(output, done).values():
            for one in outputs.outputs:
                self._receive(one, weights)

    def _note(self, output: Any) -> None:
        """What the runner has to find out by itself, when it begins this step."""
        for name in endings_of(output):
            self._expected[name] = (list(self.asked[name].tokens), self._computed)
        if not output.total_num_scheduled_tokens:
            return
        if self._is_touched or (self._is_signalled and self._seen not in (None, self.device.weights)):
            self._version += 1
        self._is_touched = self._is_signalled = False
        self._seen, self._computed = self.device.weights, self._version

    def _receive(self, one: Any, weights: int) -> None:
        asked = self.asked[one.request_id]
        self._check(not asked.is_over and not asked.is_aborted, f"{asked.name} goes on after its end")
        state = state_of([*asked.wanted.prompt, *asked.tokens])
        for token in one.new_token_ids:
            self._check(not asked.tokens or asked.tokens[-1] not in asked.stops, f"{asked.name} goes on after its stop")
            parity = asked.wanted.parity(len(asked.tokens))
            stocks = following(state, weights, asked.wanted.salt, parity)
            self._check(token == stocks, f"{asked.name} token {len(asked.tokens)}: {token}, stock's is {stocks}")
            asked.tokens.append(token)
            state = extend(state, token)
        if one.finish_reason is not None:
            asked.is_over = True
            ends = len(asked.tokens) == asked.most or asked.tokens[-1] in asked.stops
            self._check(ends, f"{asked.name} ends with {one.finish_reason}")

    def _drain(self) -> None:
        while self._flying:
            self._land()

    # --- acts --------------------------------------------------------------------------------------------------------

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
            self.asked[name] = Asked(name, wanted, [], params.max_tokens or 0, frozenset(stops))
            self.scheduler.add_request(request)

    def cancel(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

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
