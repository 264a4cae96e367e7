"""The very tokens of stock vLLM where a model drafts in a process of its own, whatever happens to that process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.drafting_models import perturbed
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine, model

DECOUPLED = {"drafters": [], "budget": "fixed", "max_draft_tokens": 16, "placement": "decoupled"}


def drafts_elsewhere(target: str, folder: Path) -> dict[str, Any]:
    given = {"method": "draft_model", "model": perturbed(target, folder, 0.1), "num_speculative_tokens": 4}
    return {**DECOUPLED, "speculative_config": given}


def test_a_drafter_elsewhere_changes_no_token_whatever_happens_to_it(models: Path, tmp_path: Path) -> None:
    """Every sampling feature; windows from 1 to 16; the process hangs, is killed, and is begun anew meanwhile."""
    target = model(models, "llama", "float32")
    requests = cases(29, VOCAB, seed=21, max_tokens=24)
    with engine(target, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    with engine(target, "float32", is_ours=True, spec_rollout=drafts_elsewhere(target, tmp_path / "draft")) as ours:
        drafter, process = ours.runner.remote.drafter, ours.runner.remote.process
        assert drafter.is_there
        for number, window in enumerate((4, 1, 16)):
            drafter.window = window
            ending = threading.Event()
            mischief = threading.Thread(target=_disturb, args=(process, random.Random(number), ending))
            if number:
                mischief.start()
            try:
                drafted = run(ours.llm, requests)
            finally:
                ending.set()
                if number:
                    mischief.join()
            report = compare(requests, truth, drafted, "float32")
            assert not report.failures, report.failures[:3]
            # the runner itself learns with the next step that the last ones are over
            assert set(drafter._requests) <= set(ours.runner.requests), "nothing is left of requests that are over"
        assert drafter.counts.trees > 0
        pid = process.pid
    assert not process.is_alive and not _exists(pid), "the process ends with its engine"


def _disturb(process: Any, rng: random.Random, ending: threading.Event) -> None:
    while not ending.wait(rng.uniform(0.0, 0.4)):
        pid = process.pid
        if pid is None or not process.is_alive:
            continue
        what = rng.choice((signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL))
        os.kill(pid, what)
        if what is signal.SIGSTOP:
            time.sleep(rng.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGCONT)
        else:
            return  # another one takes seconds to begin


def _exists(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()
