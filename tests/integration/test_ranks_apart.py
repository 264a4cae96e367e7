"""Ranks that schedule for themselves (vLLM's external launchers): they disagree on the time and on how requests are
called, and must decide alike, or they wait for each other for ever."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from tests.drafters import views_of
from tests.e2e.identity.engines import model
from tests.e2e.schedulers import BLOCK, Bench
from tests.faults.hosts import WITHOUT_A_DEVICE
from tests.integration.test_v2_device_drafts import WIDTH, batch_of, carry, drafts_of
from tests.integration.test_v2_verify import verifier_that_finds
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.config import RequestOptions
from vllm_specrollout.config.drafters import NgramConfig
from vllm_specrollout.drafters.ngram import NgramDrafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import DraftMode, RequestBatch, RequestView, StepTiming, empty_trees
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import Drafting, drafted_tokens, scheduled_trees
from vllm_specrollout.worker.models.drafter import Ranks
from vllm_specrollout.worker.request import Admission
from vllm_specrollout.worker.scheduler import DraftReport, SpecRolloutOutput
from vllm_specrollout.worker.v2.host import Host, HostRequest, InFlight, StepState
from vllm_specrollout.worker.v2.lane import Lane
from vllm_specrollout.worker.v2.runner import SpecRolloutV2
from vllm_specrollout.worker.v2.told import Told

PLACES = 6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model(tmp_path_factory.mktemp("models"), "qwen3", "bfloat16"), PLACES)


class Wire:
    """What the first rank broadcasts, until the other one has heard it."""

    def __init__(self) -> None:
        self._sent: deque[Any] = deque()

    def group(self, rank: int) -> Any:
        def broadcast(what: Any, src: int) -> Any:
            if rank == src:
                self._sent.append(what)
                return what
            return self._sent.popleft()

        return SimpleNamespace(rank_in_group=rank, world_size=2, broadcast_object=broadcast, broadcast=broadcast)

    @property
    def is_quiet(self) -> bool:
        return not self._sent


def drafting_of(
    rank: int, wire: Wire, monkeypatch: pytest.MonkeyPatch, seed: int = 0, backend: str = "external_launcher"
) -> Drafting:
    """Of a rank with a clock of its own, which runs as it likes."""
    chance = random.Random(f"{seed} {rank}")
    drafters = [NgramDrafter(NgramConfig(min_match=1))] if rank == 0 else []
    clock = iter(lambda: chance.random() * 1e3, None).__next__
    speculator = Speculator(drafters, GoodputBudget(8, 8), guard=Guard(is_strict=True), clock=clock)
    monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: wire.group(rank))
    config = SimpleNamespace(tensor_parallel_size=2, distributed_executor_backend=backend)
    return Drafting.of(speculator, config)


class Rank:
    """A scheduler of vLLM's with our code, and what a worker does with drafts; the model is a table of its answers."""

    def __init__(self, number: int, bench: Bench, wire: Wire, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.scheduler = bench.scheduler("v1", 24)
        self.drafting = drafting_of(number, wire, monkeypatch, seed)
        self._chance = random.Random(f"{seed} {number}")
        # by the name on this rank: its number, tokens so far, and all that it would ever answer
        self.asked: dict[str, tuple[int, list[int], list[int]]] = {}
        self._planned = self.drafting.plan(lambda: None, 0) if number == 0 else None
        self._views: dict[str, RequestView] = {}
        self._step = 0

    def add(self, number: int, prompt: list[int], answer: list[int], most: int) -> None:
        name = f"{number}-{self._chance.getrandbits(32):08x}"
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
        self.asked[name] = (number, list(prompt), answer)

    def abort(self, number: int) -> None:
        name = next(name for name, (own, _, _) in self.asked.items() if own == number)
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> tuple[SchedulerOutput, Any]:
        """A step, and what of it must be the same on all ranks."""
        output = self.scheduler.schedule()
        self._step += 1
        for name in sorted(output.finished_req_ids):
            if self._views.pop(name, None) is not None:
                self.drafting.forget(name)
        number = {name: own for name, (own, _, _) in self.asked.items()}
        seeds = [(number[new.req_id], new.sampling_params.seed) for new in output.scheduled_new_reqs]
        drafts = {number[name]: list(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        return output, ([(number[n], c) for n, c in output.num_scheduled_tokens.items()], drafts, seeds)

    def carry_out(self, output: SchedulerOutput) -> None:
        names = list(output.num_scheduled_tokens)
        is_sampling = [not self.scheduler.requests[name].is_prefill_chunk for name in names]
        scheduled = output.scheduled_spec_decode_tokens
        trees = None if self._planned is None else scheduled_trees(self._planned, names, scheduled)
        sampled, accepted = [], []
        for name, is_one in zip(names, is_sampling, strict=True):
            _, tokens, answer = self.asked[name]
            num_prompt = self.scheduler.requests[name].num_prompt_tokens
            own: list[int] = []
            while is_one:
                own.append(answer[len(tokens) + len(own) - num_prompt])
                if scheduled.get(name, ())[len(own) - 1 : len(own)] != own[-1:]:
                    break
            tokens += own
            sampled.append(own)
            accepted.append(max(len(own) - 1, 0))
            if name not in self._views:
                self._views[name] = RequestView(name, np.asarray(tokens, np.int32), num_prompt, 100)
                self.drafting.admit(self._views[name])
        if trees is not None:
            nodes = np.concatenate([np.arange(count) for count in accepted]).astype(np.int32)
            self.drafting.observe(self.drafting.planned, trees, np.asarray(accepted, np.int32), nodes)
            rows = sum(output.num_scheduled_tokens.values())
            took = StepTiming(len(names), rows, trees.num_nodes, 0, sum(map(len, sampled)), self._chance.random(), True)
            self.drafting.timed(took)
        self._planned = self.drafting.plan(lambda: self._batch(names, sampled), self._step + 1)
        made = {"req_ids": names, "req_id_to_index": {name: i for i, name in enumerate(names)}}
        drafts = DraftTokenIds(*drafted_tokens(self._planned))
        self.scheduler.update_from_output(output, SpecRolloutOutput(**made, sampled_token_ids=sampled, drafts=drafts))

    def _batch(self, names: list[str], sampled: list[list[int]]) -> RequestBatch | None:
        if self.drafting.is_paused(self._step + 1, len(names)):
            return None
        views = [self._views[name] for name, own in zip(names, sampled, strict=True) if own]
        for view in views:
            view.token_ids = np.asarray(self.asked[view.request_id][1], np.int32)
        return RequestBatch.of(views)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_disagree_on_time_and_names_schedule_and_verify_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Few blocks and places: requests wait, are preempted, and are put into order by how long others became."""
    chance, wire = random.Random(seed), Wire()
    ranks = [Rank(number, bench, wire, monkeypatch, seed) for number in (0, 1)]
    wire._sent.clear()
    count = num_drafted = steps = 0
    while count < 40 or any(rank.scheduler.has_unfinished_requests() for rank in ranks):
        while count < 40 and chance.random() < 0.3:
            prompt = [chance.randrange(5, 9) for _ in range(chance.randrange(4, 40))]
            answer = [chance.randrange(5, 8) for _ in range(12)] * 30
            most = chance.randrange(4, 90)
            for rank in ranks:
                rank.add(count, prompt, answer, most)
            count += 1
        if count and chance.random() < 0.03:
            victim = chance.randrange(count)
            for rank in ranks:
                rank.abort(victim)
        outputs, plans = zip(*(rank.schedule() for rank in ranks), strict=True)
        assert plans[0] == plans[1], f"step {steps}"
        num_drafted += sum(map(len, plans[0][1].values()))
        for rank, output in zip(ranks, outputs, strict=True):
            if output.total_num_scheduled_tokens:
                rank.carry_out(output)
        assert wire.is_quiet, "one rank would wait for the other"
        steps += 1
        assert steps < 5000
    assert num_drafted > 100
    assert [own[1] for own in ranks[0].asked.values()] == [own[1] for own in ranks[1].asked.values()]
    assert set(ranks[0].asked).isdisjoint(ranks[1].asked)
    # what has ended is forgotten, but for what ended in the very last step
    assert all(len(rank.drafting._numbers) <= PLACES for rank in ranks)


def test_a_models_passes_are_asked_for_by_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    first, other = (drafting_of(number, wire, monkeypatch) for number in (0, 1))
    for rank, suffix in ((first, "-0000aaaa"), (other, "-1111bbbb")):
        for view in views_of(3):
            view.request_id += suffix
            rank.admit(view)
        rank.forget(f"0{suffix}")
    ran: list[tuple[list[str], int]] = []
    Ranks(SimpleNamespace(), other).follow(lambda names, depth: ran.append((list(names), depth)))
    lead = Ranks(SimpleNamespace(model_drafter=None, spec_rollout=first.speculator), first)
    lead._has_told = True
    lead.order(["2-0000aaaa", "1-0000aaaa"], 3)
    first.plan(lambda: None, 1)
    other.plan(lambda: None, 1)
    assert ran == [(["2-1111bbbb", "1-1111bbbb"], 3)] and wire.is_quiet


@pytest.mark.parametrize("is_apart", [True, False])
def test_on_v2_no_ranks_clock_decides_how_much_room_is_left(monkeypatch: pytest.MonkeyPatch, is_apart: bool) -> None:
    backend = "external_launcher" if is_apart else "mp"
    reports = []
    for rank in (0, 1):
        drafting = drafting_of(rank, Wire(), monkeypatch, backend=backend)
        if rank == 0:
            for step in range(8):
                drafting.speculator.backoff.asked(step, 2, False)  # drafts have not paid here
        reports.append(_report_of(drafting, is_paused=True))
    assert reports[0].limits == {"b": 2}
    assert (reports[0].asks_at == reports[1].asks_at) == is_apart


def _report_of(drafting: Drafting, *, is_paused: bool) -> DraftReport:
    """What a rank with one request that drafts tells its scheduler."""
    runner: Any = object.__new__(Lane)
    host = runner.host = Host(drafting, 100)
    host.add(HostRequest("a", Admission(RequestOptions(), "", DraftMode.TREE, 32), 3, [1, 2, 3, 4]))
    host.limits["b"] = 2
    runner.step, runner.max_draft_tokens, runner._levels = StepState(number=8, num_running=2), 8, 0
    runner.spec_config, runner.spec_rollout = SimpleNamespace(max_depth=8), drafting.speculator
    runner.drafts = SimpleNamespace(is_paused=is_paused, may_branch=False)
    runner.req_states, runner._on_device = SimpleNamespace(req_id_to_index={"a": 0}), {0}
    runner.stats, runner.metrics, runner._windows = Stats(), Metrics(()), {}
    if not is_paused:
        home = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        host.sent(InFlight([host.get("a")], empty_trees(["a"]), 7, lambda: home, 1, True))
        host._in_flight[0].drafted, host.plan = lambda: empty_trees(["a"]), runner._plan
        host.settle()
    return runner._report(SimpleNamespace(get_output=None))


@pytest.mark.parametrize("is_apart", [True, False])
def test_on_v2_no_rank_alone_is_told_what_the_budget_would_verify(
    monkeypatch: pytest.MonkeyPatch, is_apart: bool
) -> None:
    """Where each has a scheduler, these leave the same room, or the ranks compute different rows."""
    drafting = [drafting_of(rank, Wire(), monkeypatch) for rank in (0, 1)]
    for one in drafting:
        one.speculator.budget, one.is_apart = Doubtful(8, 8), is_apart
    first, other = (_report_of(one, is_paused=False).limits for one in drafting)
    assert other == {"b": 2} and first == (other if is_apart else {"a": 0, "b": 2})


def test_on_v2_a_verdict_that_the_first_rank_withholds_is_withheld_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They know of it by what the first one broadcasts: its drafts, which alone say whose it is."""
    wire, counts = Wire(), []
    for rank in (0, 1):
        names = [f"a-{rank}", f"b-{rank}"]
        runner = _drafting_runner(monkeypatch, names, wire.group(rank))
        batch = batch_of(*names, starts=[0, 5, 10])
        batch.seq_lens, batch.num_tokens, batch.logits_indices = None, 10, torch.arange(10)
        if rank == 0:
            for row in (0, 1):
                carry(runner.drafts, row, 3, [4, 5, 6, 7])
            runner.drafts.withhold = lambda own: own[1]
        else:
            runner.drafts.withhold = lambda own: pytest.fail("the first rank chooses")
        assert runner.drafts.propose(batch).tolist() == [[4, 5, 6, 7]] * 2
        runner.verifier = verifier_that_finds(monkeypatch, [[4, 5, 6, 7, 9]] * 2)
        output, num_sampled, _ = SpecRolloutV2.sample(runner, torch.zeros(10, 1), batch, None)
        counts.append(num_sampled.tolist())
        assert output.sampled_token_ids.tolist() == [[4, 5, 6, 7, 9]] * 2
    assert counts == [[5, 1]] * 2 and wire.is_quiet


def _drafting_runner(patch: pytest.MonkeyPatch, names: list[str], group: Any) -> Any:
    """A rank in a step with drafts."""
    runner: Any = object.__new__(SpecRolloutV2)
    patch.setitem(WITHOUT_A_DEVICE, "device_drafts.get_tp_group", lambda: group)
    runner.drafts = drafts_of(patch, dict.fromkeys(names, Told(-1, (), np.zeros(0, np.int32), WIDTH, True)))
    runner.req_states = runner.drafts._states
    runner.step, runner.inputs = StepState(has_drafts=True), SimpleNamespace(has_branches=False)
    runner.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    return runner


class Doubtful(FixedBudget):
    """Believes that drafts may not pay, so whoever has none is to have no room."""

    backs_off = True
