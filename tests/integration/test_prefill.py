"""Hidden states from an engine that is awaited, in processes of its own, on two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.e2e.test_prefill import POLICY, farthest
from tests.integration import async_prefill
from tests.integration.serving import run_beside
from vllm_specrollout.training.rows import Rows


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks_send_each_row_once_and_requests_go_on(tmp_path: Path) -> None:
    given = (tmp_path, POLICY / "checkpoint", POLICY / "head")
    told = run_beside("async_prefill", *given, VLLM_CPU_OMP_THREADS_BIND="0|1")
    found = [Rows(token_ids, 1, 0, hidden) for token_ids, hidden in torch.load(tmp_path / "rows.pt", weights_only=True)]
    assert {tuple(rows.token_ids.tolist()) for rows in found} == set(map(tuple, told["first"]))
    # what the turn amid requests had computed of them is not asked for again
    computed = sum(one["computed"] for one in told["done"])
    assert computed <= sum(map(len, found)) <= computed + told["amid"]["computed"]
    assert any(len(rows) > async_prefill.STEP for rows in found)
    assert max(farthest(rows, has_layers=True) for rows in found) < 1e-4
    assert all(one["asked"] == one["computed"] for one in told["done"])
    assert told["second"] == told["first"] and told["amid"]["computed"] <= told["amid"]["asked"]
