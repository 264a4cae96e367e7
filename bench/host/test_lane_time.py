"""Host time of a step of the V2 lane beside vLLM's own: what the device is told for the next drafts, what comes home of
the last ones, and what is planned of it. Launches of the lookup and the choice are left out: no step waits for it.

Run: `pytest bench/host/test_lane_time.py --benchmark-only`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.e2e.schedulers import BLOCK, Bench
from tests.v2.models import small_model
from vllm_specrollout.budgets.goodput import Acceptance, GoodputBudget
from vllm_specrollout.config import RequestOptions
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.looked_up import LookedUpHistory
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import DraftMode, empty_trees
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.request import Admission
from vllm_specrollout.worker.v2 import device_drafts
from vllm_specrollout.worker.v2.device_drafts import Bystander, DeviceDrafts
from vllm_specrollout.worker.v2.host import Host, HostRequest, InFlight, StepState
from vllm_specrollout.worker.v2.lane import Home, Lane
from vllm_specrollout.worker.v2.texts import DeviceTexts

WIDTH, PROMPT, KNOWN, LONGEST = 16, 200, 1000, 1 << 14
SAMPLES = 8
"""Requests of a problem."""


def _states(names: list[str]) -> Any:
    """vLLM's tables of these requests, in the host's memory."""
    count, lengths = len(names), np.full(len(names), PROMPT + KNOWN, dtype=np.int32)
    both = {"np": np.full(count, PROMPT, dtype=np.int32), "gpu": torch.full((count,), PROMPT, dtype=torch.int32)}
    return SimpleNamespace(
        device=torch.device("cpu"), num_speculative_steps=WIDTH, max_num_reqs=count, max_model_len=LONGEST,
        max_seq_len=np.full(count, LONGEST, dtype=np.int32),
        req_id_to_index={name: i for i, name in enumerate(names)}, num_computed_tokens_np=lengths,
        prompt_len=SimpleNamespace(**both), prefill_len=SimpleNamespace(**both),
        total_len=SimpleNamespace(gpu=torch.from_numpy(lengths)), all_token_ids=SimpleNamespace(gpu=torch.zeros(1)),
    )  # fmt: skip


def _lane(names: list[str]) -> Lane:
    """As much of one as a step's host time takes, with `SAMPLES` requests of each problem."""
    history = LookedUpHistory(
        HistoryConfig(), lambda store: Texts(store._config, store, most_problems=1024, past=64, most_tokens=1 << 20),
        store=HistoryStore(HistoryConfig()),
    )  # fmt: skip
    speculator = Speculator([history], GoodputBudget(WIDTH, WIDTH), guard=Guard(is_strict=True))
    lane: Any = object.__new__(Lane)
    lane.host, lane.step, lane.stats = Host(Drafting(speculator), LONGEST), StepState(), Stats()
    lane.spec_rollout, lane.metrics, lane.max_draft_tokens = speculator, Metrics(("history",)), WIDTH
    lane.spec_config, lane._levels, lane._history = SimpleNamespace(max_depth=WIDTH), 0, history
    lane._withheld, lane._next_withheld, lane._windows, lane.latest = {}, "", {}, empty_trees([])
    history.latest = lambda: lane.latest
    lane.drafts = DeviceDrafts(
        Bystander(WIDTH), 0, _states(names), lane._told_of, DeviceTexts(history.texts, torch.device("cpu")), WIDTH,
        speculator.guard,
    )  # fmt: skip
    lane._acceptance, lane._may_skip, lane.sources = Acceptance(), False, (0, 0, 1)
    lane.drafts.changed, lane.drafts.held, lane._arrived = lane._changed, lane._held, set(names)
    lane.host.plan, lane.host.came_home = lane._plan, lane._came_home
    ends, tokens = np.array([7], dtype=np.int32), np.arange(PROMPT + KNOWN, dtype=np.int32)
    for i, name in enumerate(names):
        admission = Admission(RequestOptions(), f"problem {i // SAMPLES}", DraftMode.TREE, LONGEST, ends=ends)
        request = HostRequest(name, admission, PROMPT, tokens)
        request.begins_at = PROMPT
        lane.host.add(request)
    return lane


def _step(batch: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    names = [f"request {i}" for i in range(batch)]
    lane: Any = _lane(names)
    chain = np.arange(-1, WIDTH - 1, dtype=np.int32)
    chances = np.full(WIDTH, 0.9, dtype=np.float32)
    found = [np.tile(row, (batch, 1)) for row in (np.arange(WIDTH, dtype=np.int32) + 20, chain, chances)]
    lane.drafts._lookup = lambda *args: tuple(map(torch.from_numpy, found))
    monkeypatch.setattr(device_drafts, "choose", lambda *args, **kwargs: None)
    words = np.concatenate([found[0], found[1], found[2].view(np.int32), np.zeros((batch, 1), np.int32)], axis=1)
    input_batch: Any = SimpleNamespace(
        num_reqs=batch, req_ids=names, idx_mapping=torch.arange(batch), idx_mapping_np=np.arange(batch)
    )
    # three of the drafts hold, and a token of the target's own
    sampled = np.tile(np.array([20, 21, 22, 50, *[-1] * (WIDTH - 3)], np.int32), (batch, 1))
    counts = np.full(batch, 4, dtype=np.int32)
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(device_drafts, "get_tp_group", lambda: alone)

    def run() -> None:
        lane.step.number += 1
        lane.drafts.propose(input_batch)
        home = Home(names, words, np.full(batch, WIDTH, np.int32), (0, 0, 1))
        step = InFlight(
            [lane.host.get(name) for name in names], empty_trees(names), lane.step.number, lambda: (sampled, counts),
            batch * (1 + WIDTH), is_decode_only=True, drafted=lambda: lane._came(home, torch.empty(0)),
        )  # fmt: skip
        lane.host.sent(step)
        lane.host.settle()
        lane.host.learn()

    return run


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_host_time_of_a_step_of_the_lane(benchmark: Any, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    benchmark.extra_info["batch"] = batch
    benchmark.pedantic(_step(batch, monkeypatch), rounds=60, warmup_rounds=5)


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_host_time_of_a_step_of_stocks_scheduler(benchmark: Any, tmp_path: Path, batch: int) -> None:
    """A schedule and its tokens, of plain requests that decode: a part of what stock's host does in a step."""
    scheduler = Bench(small_model(tmp_path, "llama", "float32"), max_num_seqs=256).scheduler("stock ahead", 4096)
    params, hasher = SamplingParams(max_tokens=500, ignore_eos=True), get_request_block_hasher(BLOCK, sha256)
    for i in range(batch):
        scheduler.add_request(Request(f"request {i}", [5] * 8, params, None, block_hasher=hasher))

    def run() -> None:
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, index, [[7]] * len(names)))

    benchmark.extra_info["batch"] = batch
    benchmark.pedantic(run, rounds=60, warmup_rounds=5)
