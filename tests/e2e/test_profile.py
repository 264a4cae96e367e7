"""A profile is measured by the command, and the next engine of that model starts from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
START = """
import sys
import vllm_specrollout
from vllm import LLM
if __name__ == "__main__":
    for setting in sys.argv[2:]:
        settings = {"profile": setting}
        llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, spec_rollout=settings)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        print(setting, "known:", worker.model_runner.spec_rollout.budget.cost.is_known)
        llm.llm_engine.engine_core.shutdown()
"""


def _run(cache: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    done = warm.run(command, environment, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.nightly
def test_an_engine_starts_from_the_profile_of_its_model(tmp_path: Path) -> None:
    from vllm_specrollout.bench.policy.random_model import make_random_model

    model = str(make_random_model(tmp_path / "tiny", size="1M", hidden=64, num_layers=2, dtype="float32"))
    flags = ["--dtype", "float32", "--batches", "1,3", "--steps", "4", "--eager", "--json"]
    # in two processes, as users do it: what one keeps, the other finds
    done = _run(tmp_path, str(Path(sys.executable).with_name("specrollout")), "profile", model, *flags)
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    kept = json.loads(Path(report["file"]).read_text())
    assert Path(report["file"]).is_relative_to(tmp_path)
    batch, nodes, branches = (kept["columns"].index(name) for name in ("batch", "nodes", "branches"))
    assert {1, 3} <= {row[batch] for row in kept["rows"]}
    assert {0, 1, 2, 4, 8, 16} <= {row[nodes] for row in kept["rows"] if row[batch] == 1}
    assert {0, 3} <= {row[branches] for row in kept["rows"] if row[batch] == 1}

    script = tmp_path / "start.py"
    script.write_text(START)
    started = _run(tmp_path, str(script), model, "auto", "off")
    assert (started.stdout + started.stderr).count("step costs start from the profile") == 1
    assert "auto known: True\n" in started.stdout and "off known: False\n" in started.stdout
