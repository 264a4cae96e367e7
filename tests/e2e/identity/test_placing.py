"""The very tokens of stock vLLM where an engine goes from drafting in its steps to drafting beside them, and back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from tests.e2e.drafting_models import perturbed
from tests.e2e.elsewhere import placing_of
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine, model
from vllm_specrollout.cluster.duel import Duel


class Restless(Duel):
    """Changes its mind every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    @property
    def choice(self) -> int:
        return self.steps // 5 % 2

    def step(self, num_requests: int, tokens: int, seconds: float) -> None:
        self.steps += 1


def cores() -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


@pytest.mark.nightly
def test_changes_of_placement_change_no_token_and_end_with_the_drafter(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    requests = cases(20, VOCAB, seed=23, max_tokens=24)
    last = max(os.sched_getaffinity(0))
    given = {"method": "draft_model", "model": perturbed(target, tmp_path / "draft", 0.1), "num_speculative_tokens": 4}
    auto = {"drafters": [], "budget": "fixed", "max_draft_tokens": 8, "placement": "auto", "devices": [f"cpu:{last}"]}
    with engine(target, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    with engine(target, "float32", is_ours=True, spec_rollout={**auto, "speculative_config": given}) as ours:
        placing, threads = placing_of(ours), torch.get_num_threads()
        before = set().union(*cores())
        placing.duel = Restless()
        report = compare(requests, truth, run(ours.llm, requests), "float32")
        assert not report.failures, report.failures[:3]
        assert placing.changes >= 2, "it has drafted in both ways"
        acceptance = ours.runner.model_drafter.acceptance
        assert acceptance is not None and ours.runner.remote.totals()[1] > 0, "both have drafted"
        assert ours.runner.stats.accepted > 0
        placing.arrange(1)
        if len(before) > 1:
            assert all(last not in own for own in cores()), "the drafter's core is left to it"
        placing.arrange(0)
        assert set().union(*cores()) == before and torch.get_num_threads() in (threads, len(before))
        # without its drafter elsewhere it goes on, and drafts here
        (link,) = ours.runner.remote.links.values()
        link.process.kill()
        while link.process._restarts.ended():
            pass  # it was begun anew as often as it may be
        report = compare(requests, truth, run(ours.llm, requests), "float32")
        assert not report.failures, report.failures[:3]
        assert placing.now == 0
