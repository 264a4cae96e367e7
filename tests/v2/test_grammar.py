"""Chains under a grammar: the very tokens of stock vLLM, whose grammar masks the rows of drafts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import Engine
from tests.v2.models import small_model
from tests.v2.test_identity import ENGINE, TREE

GRAMMARS = ("regex", "json", "choice")


@pytest.fixture
def drafted_under_grammar(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(drafts allowed, drafts forbidden) of every request with a grammar in every step."""
    from vllm_specrollout.worker.v2 import scheduler

    seen: list[tuple[int, int]] = []
    original = scheduler.drafted_schedule

    def noting(*args: Any) -> Any:
        step = original(*args)
        for tokens in step.scheduled_spec_decode_tokens.values():
            seen.append((sum(token >= 0 for token in tokens), sum(token < 0 for token in tokens)))
        return step

    monkeypatch.setattr(scheduler, "drafted_schedule", noting)
    return seen


def _check(path: str, seen: list[tuple[int, int]], seed: int, only: tuple[str, ...], **kwargs: Any) -> None:
    requests = cases(8, VOCAB, seed=seed, max_tokens=10, only=only)
    accepted: list[int] = []

    def inspect(ours: Engine) -> None:
        accepted.append(ours.runner.stats.accepted)

    check_identity(path, "float32", requests, spec_rollout=TREE, inspect=inspect, **{**ENGINE, **kwargs})
    assert accepted[0] > 0
    assert any(allowed for allowed, _ in seen), "nothing was drafted for a request with a grammar"
    assert any(forbidden for _, forbidden in seen), "no draft broke its grammar"


@pytest.mark.nightly
def test_chains_under_a_grammar_beside_trees_yield_stocks_tokens(
    tmp_path: Path, drafted_under_grammar: list[tuple[int, int]]
) -> None:
    path = small_model(tmp_path, "qwen3", "float32")
    _check(path, drafted_under_grammar, seed=11, only=(*GRAMMARS, "temperature 1"))


def test_chains_under_a_grammar_scheduled_ahead_yield_stocks_tokens(
    tmp_path: Path,
    ahead: None,
    drafted_under_grammar: list[tuple[int, int]],
) -> None:
    _check(small_model(tmp_path, "qwen3", "float32"), drafted_under_grammar, seed=12, only=GRAMMARS)


def test_masks_take_no_memory_before_a_grammar_does_and_then_as_much_as_steps_need() -> None:
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    from vllm_specrollout.worker.v2.scheduler import with_masks_for_drafts

    made: list[int] = []
    applied: list[tuple[int, int]] = []

    class Worker(StructuredOutputsWorker):
        def __init__(self, max_num_logits: int, **options: Any) -> None:
            super().__init__(max_num_logits, **options)
            made.append(max_num_logits)

        def apply_grammar_bitmask(self, logits: Any, batch: Any, request_ids: Any, bitmask: Any) -> None:
            assert len(bitmask) <= len(self.grammar_bitmask)
            applied.append((len(bitmask), len(self.grammar_bitmask)))

    stock = StructuredOutputsWorker(4, 100, torch.device("cpu"), 1, 1)
    runner: Any = SimpleNamespace(
        structured_outputs_worker=stock, max_draft_tokens=9, max_num_reqs=4, vocab_size=100, device=torch.device("cpu")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_specrollout.worker.v2.scheduler.StructuredOutputsWorker", Worker)
        masks = with_masks_for_drafts(runner)
        assert masks is not None and not made
        for rows in (0, 3, 2, 5, 40):
            masks.apply_grammar_bitmask(torch.zeros(1), None, [], np.zeros((rows, 4), np.int32))  # type: ignore[arg-type]
    assert made == [3, 6, 40] and applied == [(3, 3), (2, 3), (5, 6), (40, 40)]
    runner.structured_outputs_worker = None
    assert with_masks_for_drafts(runner) is None


class _DigitsOnly:
    """In place of vLLM's manager: tokens below 10 are allowed."""

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        allowed = next((i for i, token in enumerate(tokens) if token >= 10), len(tokens))
        return tokens[:allowed]


def test_a_grammars_requests_are_masked_by_what_was_drafted_and_the_schedule_keeps_its_room() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds

    from vllm_specrollout.worker.v2.scheduler import drafted_schedule

    schedule = SchedulerOutput.make_empty()
    schedule.scheduled_spec_decode_tokens = {"all": [-1] * 4, "some": [-1] * 4, "none": [-1] * 4, "free": [-1] * 4}
    drafts = DraftTokenIds(["some", "free", "all"], [[3, 12, 5], [70], [1, 2]])
    requests: Any = dict.fromkeys(("all", "some", "none"))
    manager: Any = _DigitsOnly()
    step = drafted_schedule(schedule, ["all", "some", "none"], drafts, requests, manager)
    padded = {"all": [1, 2, -1, -1], "some": [3, -1, -1, -1], "none": [-1] * 4}
    assert step.scheduled_spec_decode_tokens == padded, "all of the room has rows"
    assert {len(room) for room in schedule.scheduled_spec_decode_tokens.values()} == {4}
    late = drafted_schedule(schedule, ["all"], None, requests, manager)
    assert late.scheduled_spec_decode_tokens == {"all": [-1] * 4}
    # behind the last draft a request's row holds nothing
    cut = drafted_schedule(schedule, ["all"], DraftTokenIds(["all"], [[1, -1, 2]]), requests, manager)
    assert cut.scheduled_spec_decode_tokens == {"all": [1, -1, -1, -1]}
